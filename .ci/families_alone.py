"""Every family of the one family plugin that is installed, beside the core and surogate-serve alone: a tiny model is trained
whole, an adapter is trained on it, and what came out answers as a batch and over HTTP, where it must also call a function in the
format of one of the plugin's chat templates. A family that writes no text makes vectors, over HTTP.

    python .ci/families_alone.py <name of the plugin> <empty folder>
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from surogate_core.dsl import Family
from surogate_core.model import initial_values
from surogate_core.plugins import get_manager
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.weights.embedding import Dense, Embedding
from surogate_core.weights.export import write_hf
from surogate_core.weights.sentence_transformers import write_modules
from surogate_core.weights.tensor import from_f32
from surogate_serve import LLM, Sampling

VOCABULARY = 264  # all bytes, and the token that ends a text
SENTENCE = "the quick brown fox jumps over the lazy dog and naps. "
SUROGATE = str(Path(sys.executable).with_name("surogate"))
TOOL = {"type": "function", "function": {"name": "pick", "parameters": {
    "type": "object", "required": ["a"], "additionalProperties": False,
    "properties": {"a": {"type": "string", "enum": ["x y", "z"]}}}}}  # fmt: skip
# The plugins' templates that write calls; families take turns at them.
CALLING = {"surogate-gemma": ("functiongemma", "gemma4"), "surogate-qwen": ("qwen2.5", "qwen3")}
# Families that write no text, whose tiny model is of these settings.
VECTORS: dict[str, dict[str, Any]] = {
    "gemma-embedding": {
        "model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True,
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8,
        "max_position_embeddings": 256, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
WIDTH, SHORT = 24, 8  # of vectors, and of those that are cut


def main(plugin: str, folder: Path) -> None:
    manager = get_manager()
    manager.require(plugin)
    rows = [json.dumps({"text": SENTENCE * 4}) for _ in range(24)]
    (folder / "text.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    templates = cycle(CALLING[plugin])
    texts: dict[str, Path] = {}
    vectors: dict[str, Path] = {}
    for name, family in manager.families.items():
        source = manager.families.source(name)
        if not source.startswith(plugin):
            raise SystemExit(f"FAILED: {name} is here too, from {source}")
        if name in VECTORS:
            vectors[name] = write_vectors(folder / name, family, VECTORS[name])
        else:
            texts[name] = train_twice(folder / name, next(iter(family.tiny_configs().values())), next(templates))
    said = {name: generated(run) for name, run in texts.items()}
    with served({**texts, **vectors}) as client:
        for name, expected in said.items():
            text, called = completion(client, name), call(client, name)
            if text != expected:
                raise SystemExit(f"FAILED: {name} says {text!r} over HTTP and {expected!r} without")
            print(f"{name}: trained whole and with an adapter, served: {text!r}, {called}", flush=True)
        for name in vectors:
            check_vectors(client, name)
            print(f"{name}: makes vectors", flush=True)


# -- models -----------------------------------------------------------------------------------------------------------


def train_twice(folder: Path, config: Mapping[str, Any], template: str) -> Path:
    """The run of an adapter, on what a run from scratch made."""
    tokenizer = write_byte_tokenizer(
        folder.with_name(f"{folder.name}-tokenizer"), ["<|end|>"], eos_token="<|end|>", bos_token="<|end|>",
        chat_template=get_manager().chat_templates[template],
    )  # fmt: skip
    vocabularies = {key: VOCABULARY for key in config if key.startswith("vocab_size")}
    architecture = {**config, **vocabularies, "max_position_embeddings": 1024}
    whole = train(folder, {"from_scratch": True, "architecture": architecture, "tokenizer": str(tokenizer)})
    return train(folder.with_name(f"{folder.name}-lora"), {"model": str(whole / "model"), "lora_rank": 4})


def train(run: Path, keys: Mapping[str, Any]) -> Path:
    """Six steps of `surogate pt`, which must lower the loss. Returns the run's folder."""
    config = {
        **keys, "datasets": [str(run.parent / "text.jsonl")], "sequence_len": 64, "overlong": "split", "max_steps": 6,
        "per_device_train_batch_size": 1, "learning_rate": 5e-3, "output_dir": str(run), "seed": 1,
    }  # fmt: skip
    path = run.with_suffix(".json")
    path.write_text(json.dumps(config), encoding="utf-8")  # which is YAML too
    subprocess.run([SUROGATE, "pt", str(path)], check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    if not losses[-1] < losses[0]:
        raise SystemExit(f"FAILED: {run.name} learns nothing: losses {losses}")
    return run


def write_vectors(folder: Path, family: Family, config: Mapping[str, Any]) -> Path:
    """A random model whose vectors are `WIDTH` long, and may be cut."""
    h = family.from_hf(config)
    parameters = {name: from_f32(name, initial_values(name, each.shape, each, 7)) for name, each in family.model(h).parameters()}
    sizes = {"matryoshka_dimensions": [WIDTH, SHORT]}
    write_hf(folder, family.hf_names(h).export(parameters), {**family.hf_config(h), **sizes}, dtype="f32")
    linear = np.random.default_rng(1).standard_normal((WIDTH, h.hidden_size)).astype(np.float32)
    write_modules(folder, Embedding("mean", (Dense(from_f32("linear", linear)),)), h.hidden_size, "f32")
    return write_byte_tokenizer(folder, ["<|end|>"], eos_token="<|end|>")


# -- answers ----------------------------------------------------------------------------------------------------------


def generated(run: Path) -> str:
    """What a batch of one is answered with."""
    llm = LLM(run)
    (answer,) = llm.generate("the quick", Sampling(temperature=0), max_tokens=8)
    llm.close()
    if not 1 <= len(answer.tokens) <= 8:
        raise SystemExit(f"FAILED: {run.name} answers with {len(answer.tokens)} tokens")
    return answer.text


@contextmanager
def served(models: Mapping[str, Path]) -> Iterator[httpx.Client]:
    """A client of one server of these, which must end well when it is told to."""
    named = [f"{name}={path}" for name, path in models.items()]
    server = subprocess.Popen([SUROGATE, "serve", *named, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().rpartition(" at ")[2].strip()
    try:
        if not url.startswith("http"):
            raise SystemExit("FAILED: no server of " + ", ".join(named))
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client
    finally:
        server.terminate()
        code = server.wait()
    if code:
        raise SystemExit(f"FAILED: the server ended with {code}")


def post(client: httpx.Client, path: str, **body: Any) -> httpx.Response:
    reply = client.post(path, json=body)
    if reply.status_code != 200:
        raise SystemExit(f"FAILED: {path} gives {body['model']} {reply.status_code}: {reply.text}")
    return reply


def completion(client: httpx.Client, model: str) -> str:
    """As `generated`, streamed."""
    reply = post(client, "/v1/completions", model=model, prompt="the quick", max_tokens=8, temperature=0, stream=True)
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        raise SystemExit(f"FAILED: a stream of {model} ends with {events[-1]}")
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def call(client: httpx.Client, model: str) -> str:
    """The call of a model that has to call."""
    asked = {"messages": [{"role": "user", "content": "pick one"}], "tools": [TOOL], "tool_choice": "required",
             "parallel_tool_calls": False, "reasoning_effort": "none", "max_tokens": 200, "temperature": 0}  # fmt: skip
    message = post(client, "/v1/chat/completions", model=model, **asked).json()["choices"][0]["message"]
    (called,) = message["tool_calls"]
    arguments = called["function"]["arguments"]
    if called["function"]["name"] != "pick" or json.loads(arguments)["a"] not in ("x y", "z"):
        raise SystemExit(f"FAILED: {model} calls {called}")
    return f"pick({arguments})"


def check_vectors(client: httpx.Client, model: str) -> None:
    """Of two texts, which have other ones: all are of length one, and those that are cut are the beginnings of the others."""
    asked = {"model": model, "input": ["a text", "and quite another one"]}
    whole, cut = (
        np.array([row["embedding"] for row in post(client, "/v1/embeddings", **asked, **size).json()["data"]])
        for size in ({}, {"dimensions": SHORT})
    )
    begun = whole[:, :SHORT] / np.linalg.norm(whole[:, :SHORT], axis=1, keepdims=True)
    fits = whole.shape == (2, WIDTH) and cut.shape == (2, SHORT) and np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)
    if not (fits and np.allclose(cut, begun, atol=1e-5) and np.abs(whole[0] - whole[1]).max() > 0.01):
        raise SystemExit(f"FAILED: {model} makes of two texts {whole} and {cut}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
