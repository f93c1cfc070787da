"""What Anthropic's official client makes of a server, run by the client's own environment:

    python contract_anthropic.py URL MODEL

The server needs one key, "secret", and a model whose answers may have calls. Needs nothing but the client; prints its
release and the checks that it passed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic

HI: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"word": {"enum": ["river", "stone"]}}, "required": ["word"],
          "additionalProperties": False}  # fmt: skip
TOOL: Any = {"name": "look_up", "description": "Looks a word up.", "input_schema": SCHEMA}
KINDS = {
    "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
}  # fmt: skip


class Contract:
    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.client = self.with_key("secret")

    def with_key(self, key: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def fields(self, **more: Any) -> dict[str, Any]:
        # Which of the sampling fields a release has changes; the server takes them from all.
        return {"model": self.model, "messages": HI, "max_tokens": 12, "extra_body": {"temperature": 0}} | more

    def plain(self) -> None:
        reply = self.client.messages.create(**self.fields())
        assert reply.id.startswith("msg_") and reply.type == "message" and reply.role == "assistant"
        assert reply.model == self.model and reply.content[0].type == "text"
        assert reply.stop_reason in ("end_turn", "max_tokens") and reply.stop_sequence is None
        assert reply.usage.output_tokens <= 12 and reply.usage.cache_read_input_tokens is not None
        assert reply._request_id

    def stream_events(self) -> None:
        whole = self.client.messages.create(**self.fields())
        events = list(self.client.messages.create(**self.fields(), stream=True))
        kinds = [event.type for event in events if event.type != "ping"]
        assert set(kinds) == KINDS and kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
        assert text == whole.content[0].text
        last = next(event for event in events if event.type == "message_delta")
        assert last.delta.stop_reason == whole.stop_reason and last.usage.output_tokens == whole.usage.output_tokens

    def stream_helper(self) -> None:
        whole = self.client.messages.create(**self.fields())
        with self.client.messages.stream(**self.fields()) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert text == message.content[0].text == whole.content[0].text and message.stop_reason == whole.stop_reason

    def asynchronous(self) -> None:
        async def ask() -> None:
            async with anthropic.AsyncAnthropic(base_url=self.url, api_key="secret", max_retries=0) as client:
                replies = await asyncio.gather(*(client.messages.create(**self.fields()) for _ in range(4)))
                assert len({reply.content[0].text for reply in replies}) == 1
                async with client.messages.stream(**self.fields()) as stream:
                    message = await stream.get_final_message()
                assert message.content[0].text == replies[0].content[0].text

        asyncio.run(ask())

    def tools(self) -> None:
        fields = self.fields(max_tokens=800, tools=[TOOL], extra_body={})  # greedy, a random model writes spaces for ever
        one = {"type": "any", "disable_parallel_tool_use": True}
        for choice in (one, {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True}):
            reply = self.client.messages.create(**fields, tool_choice=choice)
            call = reply.content[-1]
            assert reply.stop_reason == "tool_use" and call.type == "tool_use" and call.id.startswith("toolu_")
            assert call.name == "look_up" and call.input["word"] in ("river", "stone")
        with self.client.messages.stream(**fields, tool_choice=one) as stream:
            partial = "".join(event.partial_json for event in stream if event.type == "input_json")
            final = stream.get_final_message().content[-1]
        assert final.type == "tool_use" and json.loads(partial.split("}")[0] + "}") and final.input["word"] in ("river", "stone")
        told = [*HI, {"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "water"}]}]  # fmt: skip
        after = self.client.messages.create(**{**fields, "messages": told, "max_tokens": 8}, tool_choice={"type": "none"})
        assert after.content[0].type == "text"

    def structured(self) -> None:
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        reply = self.client.messages.create(**self.fields(max_tokens=800, extra_body={"output_config": form}))
        assert json.loads(reply.content[0].text)["word"] in ("river", "stone")

    def system_prefill_and_stops(self) -> None:
        turns = [*HI, {"role": "assistant", "content": "The river"}]
        reply = self.client.messages.create(**self.fields(messages=turns, system="Be brief.", stop_sequences=["\x7f"]))
        assert reply.content and reply.stop_reason in ("end_turn", "max_tokens", "stop_sequence")

    def count_tokens(self) -> None:
        short = self.client.messages.count_tokens(model=self.model, messages=HI)
        longer = self.client.messages.count_tokens(model=self.model, messages=HI, system="Be brief.", tools=[TOOL])
        assert 0 < short.input_tokens < longer.input_tokens
        assert self.client.messages.create(**self.fields()).usage.input_tokens <= short.input_tokens

    def models(self) -> None:
        assert self.model in [each.id for each in self.client.models.list()]

    def errors(self) -> None:
        def ask(client: anthropic.Anthropic = self.client, **fields: Any) -> Callable[[], Any]:
            return lambda: client.messages.create(**self.fields(**fields))

        fails = self.fails
        fails(anthropic.AuthenticationError, 401, "authentication_error", ask(self.with_key("wrong")))
        fails(anthropic.NotFoundError, 404, "not_found_error", ask(model="nobody"))
        fails(anthropic.BadRequestError, 400, "invalid_request_error", ask(messages=[]))
        fails(anthropic.BadRequestError, 400, "invalid_request_error", ask(max_tokens=-1))
        long = [{"role": "user", "content": "x" * 5000}]
        fails(anthropic.BadRequestError, 400, "invalid_request_error", ask(messages=long))
        fails(anthropic.BadRequestError, 400, "invalid_request_error", ask(messages=long, stream=True))

    def fails(self, kind: type[anthropic.APIStatusError], status: int, name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except kind as error:
            body: Any = error.body
            assert error.status_code == status and error.request_id, error
            assert body["type"] == "error" and body["error"]["type"] == name and body["error"]["message"], body
            return
        raise AssertionError(f"no error {status} {name}")


def main() -> None:
    contract = Contract(*sys.argv[1:])
    others = ("__init__", "with_key", "fields", "fails")
    checks = [name for name, value in vars(Contract).items() if callable(value) and name not in others]
    for name in checks:
        try:
            getattr(contract, name)()
        except Exception as error:
            raise AssertionError(f"{name} of anthropic {anthropic.__version__}") from error
    print(json.dumps({"client": "anthropic", "version": anthropic.__version__, "passed": checks}))


if __name__ == "__main__":
    main()
