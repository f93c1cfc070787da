"""What OpenAI's official client makes of a server, run by the client's own environment:

    python contract_openai.py URL MODEL

The server needs one key, "secret", and a model whose answers may have calls. Needs nothing but the client; prints its
release and the checks that it passed."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import sys
from collections.abc import Callable
from typing import Any, Literal

import openai
from pydantic import BaseModel

HI: Any = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"word": {"enum": ["river", "stone"]}}, "required": ["word"],
              "additionalProperties": False}  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS, "strict": True}}
FLAT: Any = {"type": "function", "name": "look_up", "parameters": PARAMETERS, "strict": True}


class Answer(BaseModel):
    word: Literal["river", "stone"]


class Contract:
    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.client = self.with_key("secret")

    def with_key(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=60)

    # -- chat ----------------------------------------------------------------------------------------------------------

    def chat_plain(self) -> None:
        reply = self.client.chat.completions.create(model=self.model, messages=HI, max_tokens=12, temperature=0)
        choice = reply.choices[0]
        assert reply.id.startswith("chatcmpl-") and reply.object == "chat.completion" and reply.model == self.model
        assert choice.message.role == "assistant" and choice.message.tool_calls is None
        assert choice.finish_reason in ("stop", "length") and choice.index == 0
        usage = reply.usage
        assert usage and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and usage.completion_tokens <= 12
        assert usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens is not None
        assert reply._request_id

    def chat_stream(self) -> None:
        fields: dict[str, Any] = {"model": self.model, "messages": HI, "max_tokens": 12, "temperature": 0}
        whole = self.client.chat.completions.create(**fields)
        chunks = list(self.client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
        assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [
            whole.choices[0].finish_reason
        ]
        assert chunks[-1].choices == [] and chunks[-1].usage and all(c.usage is None for c in chunks[:-1])
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert len({c.id for c in chunks}) == 1
        without = list(self.client.chat.completions.create(**fields, stream=True))
        assert all(c.choices and c.usage is None for c in without)

    def chat_choices_and_logprobs(self) -> None:
        reply = self.client.chat.completions.create(
            model=self.model, messages=HI, max_tokens=6, n=3, seed=1, logprobs=True, top_logprobs=3,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        for choice in reply.choices:
            assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == 6
            assert all(-9999.0 <= each.logprob <= 0 and len(each.top_logprobs) >= 3 for each in choice.logprobs.content)
        chunks = self.client.chat.completions.create(model=self.model, messages=HI, max_tokens=6, n=3, stream=True)
        ends = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
        assert sorted(ends) == [0, 1, 2]

    def chat_tools(self) -> None:
        fields: dict[str, Any] = {"model": self.model, "messages": HI, "max_tokens": 800, "tools": [TOOL]}
        for choice, finish in (("required", "tool_calls"), ({"type": "function", "function": {"name": "look_up"}}, "stop")):
            reply = self.client.chat.completions.create(**fields, tool_choice=choice, parallel_tool_calls=False)
            calls = reply.choices[0].message.tool_calls
            assert calls and len(calls) == 1 and calls[0].function.name == "look_up" and calls[0].id.startswith("call_")
            assert json.loads(calls[0].function.arguments)["word"] in ("river", "stone")
            assert reply.choices[0].finish_reason == finish and reply.choices[0].message.content is None
        with self.client.chat.completions.stream(**fields, tool_choice="required", parallel_tool_calls=False) as stream:
            kinds = [event.type for event in stream]
            message = stream.get_final_completion().choices[0].message
        assert "tool_calls.function.arguments.done" in kinds
        assert message.tool_calls and json.loads(message.tool_calls[0].function.arguments)["word"] in ("river", "stone")
        told = [*HI, {"role": "assistant", "content": None, "tool_calls": [calls[0].model_dump()]},
                {"role": "tool", "tool_call_id": calls[0].id, "content": "water"}]  # fmt: skip
        assert self.client.chat.completions.create(**{**fields, "messages": told}, tool_choice="none").choices

    def chat_structured(self) -> None:
        parsed = self.client.chat.completions.parse(model=self.model, messages=HI, max_tokens=800, response_format=Answer)
        assert isinstance(parsed.choices[0].message.parsed, Answer)
        with self.client.chat.completions.stream(
            model=self.model, messages=HI, max_tokens=800, response_format=Answer
        ) as stream:
            for _ in stream:
                pass
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Answer)
        try:
            self.client.chat.completions.parse(model=self.model, messages=HI, max_tokens=2, response_format=Answer)
        except openai.LengthFinishReasonError:
            return
        raise AssertionError("an answer that was cut was parsed")

    def chat_async(self) -> None:
        async def ask() -> None:
            async with openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="secret", max_retries=0) as client:
                fields: dict[str, Any] = {"model": self.model, "messages": HI, "max_tokens": 8, "temperature": 0}
                replies = await asyncio.gather(*(client.chat.completions.create(**fields) for _ in range(4)))
                assert len({reply.choices[0].message.content for reply in replies}) == 1
                text = ""
                async for chunk in await client.chat.completions.create(**fields, stream=True):
                    text += chunk.choices[0].delta.content or ""
                assert text == replies[0].choices[0].message.content

        asyncio.run(ask())

    # -- the others ----------------------------------------------------------------------------------------------------

    def completions(self) -> None:
        reply = self.client.completions.create(model=self.model, prompt=["a", "b"], max_tokens=3, n=2, logprobs=2)
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3] and reply.object == "text_completion"
        assert all(choice.logprobs and choice.logprobs.tokens for choice in reply.choices)
        echoed = self.client.completions.create(model=self.model, prompt="river", max_tokens=1, echo=True, logprobs=1)
        assert echoed.choices[0].text.startswith("river") and echoed.choices[0].logprobs.token_logprobs[0] is None
        fields: dict[str, Any] = {"model": self.model, "prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0}
        text = "".join(c.choices[0].text for c in self.client.completions.create(**fields, stream=True))
        assert text == self.client.completions.create(**fields).choices[0].text

    def embeddings(self) -> None:
        plain = self.client.embeddings.create(model=self.model, input=["a b", "c"], encoding_format="float")
        default = self.client.embeddings.create(model=self.model, input=["a b", "c"])
        raw = self.client.embeddings.with_raw_response.create(model=self.model, input="a b", encoding_format="base64")
        vector = json.loads(raw.text if isinstance(raw.text, str) else raw.text())["data"][0]["embedding"]
        assert len(struct.unpack(f"<{len(plain.data[0].embedding)}f", base64.b64decode(vector))) == len(plain.data[0].embedding)
        assert [each.index for each in default.data] == [0, 1] and default.usage.prompt_tokens > 0
        close = zip(plain.data[0].embedding, default.data[0].embedding, strict=True)
        assert all(abs(a - b) < 1e-5 for a, b in close)

    def models(self) -> None:
        assert self.model in [each.id for each in self.client.models.list()]
        assert self.client.models.retrieve(self.model).object == "model"
        self.fails(openai.NotFoundError, 404, "model_not_found", lambda: self.client.models.retrieve("nobody"))

    def responses(self) -> None:
        fields: dict[str, Any] = {"model": self.model, "input": "Hi", "max_output_tokens": 16, "temperature": 0}
        reply = self.client.responses.create(**fields)
        assert reply.status in ("completed", "incomplete") and reply.id.startswith("resp_")
        assert reply.usage and reply.usage.output_tokens <= 16
        events = list(self.client.responses.create(**fields, stream=True))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == reply.output_text == events[-1].response.output_text
        assert self.client.responses.retrieve(reply.id).output_text == reply.output_text
        after = self.client.responses.create(**{**fields, "input": "And?"}, previous_response_id=reply.id)
        assert after.usage.input_tokens > reply.usage.input_tokens
        self.client.responses.delete(reply.id)
        self.fails(openai.NotFoundError, 404, None, lambda: self.client.responses.retrieve(reply.id))

    def responses_tools_and_forms(self) -> None:
        fields: dict[str, Any] = {"model": self.model, "input": "Hi", "max_output_tokens": 800}
        reply = self.client.responses.create(**fields, tools=[FLAT], tool_choice="required", parallel_tool_calls=False)
        call = next(item for item in reply.output if item.type == "function_call")
        assert call.name == "look_up" and json.loads(call.arguments)["word"] in ("river", "stone") and call.call_id
        parsed = self.client.responses.parse(**fields, text_format=Answer)
        assert isinstance(parsed.output_parsed, Answer)
        with self.client.responses.stream(**fields, text_format=Answer) as stream:
            for _ in stream:
                pass
            assert isinstance(stream.get_final_response().output_parsed, Answer)

    # -- errors --------------------------------------------------------------------------------------------------------

    def errors(self) -> None:
        def chat(client: openai.OpenAI = self.client, **fields: Any) -> Callable[[], Any]:
            body = {"model": self.model, "messages": HI, "max_tokens": 4} | fields
            return lambda: client.chat.completions.create(**body)

        self.fails(openai.AuthenticationError, 401, "invalid_api_key", chat(self.with_key("wrong")))
        self.fails(openai.NotFoundError, 404, "model_not_found", chat(model="nobody"))
        self.fails(openai.BadRequestError, 400, None, chat(messages=[]), param="messages")
        self.fails(openai.BadRequestError, 400, None, chat(temperature=9), param="temperature")
        self.fails(openai.BadRequestError, 400, None, chat(n=100000), param="n")
        long: Any = [{"role": "user", "content": "x" * 5000}]
        self.fails(openai.BadRequestError, 400, "context_length_exceeded", chat(messages=long))
        self.fails(openai.BadRequestError, 400, "context_length_exceeded", chat(messages=long, stream=True))
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
        self.fails(openai.BadRequestError, 400, None, chat(response_format=form))

    def fails(
        self, kind: type[openai.APIStatusError], status: int, code: str | None, call: Callable[[], Any],
        param: str | None = None,
    ) -> None:
        try:
            call()
        except kind as error:
            body: Any = error.body
            assert error.status_code == status and error.request_id, error
            assert set(body) >= {"message", "type", "param", "code"}, body
            assert code is None or body["code"] == code, body
            assert param is None or body["param"] == param, body
            return
        raise AssertionError(f"no error {status}")


def main() -> None:
    contract = Contract(*sys.argv[1:])
    checks = [name for name, value in vars(Contract).items() if callable(value) and name not in ("__init__", "with_key", "fails")]
    for name in checks:
        try:
            getattr(contract, name)()
        except Exception as error:
            raise AssertionError(f"{name} of openai {openai.__version__}") from error
    print(json.dumps({"client": "openai", "version": openai.__version__, "passed": checks}))


if __name__ == "__main__":
    main()
