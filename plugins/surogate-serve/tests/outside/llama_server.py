"""Stands in for llama.cpp's server where its tests start one: its flags become those of `surogate serve`.

The model is a random one, whichever is asked for; what has no equivalent here is let be."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> Path:
    """The model: a random one of 8,192 positions, whose tokens are bytes."""
    sys.path.insert(0, str(TESTS))
    from conftest import write_tiny_model

    return write_tiny_model(folder, max_position_embeddings=8192)


def command(model: Path, words: list[str]) -> list[str]:
    """The words of `surogate serve` for those of llama-server."""
    flags = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--port", "--host", "--alias", "--api-key", "--chat-template", "--chat-template-file", "--cors-origins"):
        flags.add_argument(name)
    flags.add_argument("--ctx-size", type=int)
    flags.add_argument("--parallel", type=int, default=4)
    known, _ = flags.parse_known_args(words)
    if known.chat_template or known.chat_template_file:
        model = _with_template(model, known.chat_template, known.chat_template_file)
    result = [
        str(Path(sys.executable).with_name("surogate")), "serve", f"{known.alias or 'tiny'}={model}",
        "--port", known.port, "--host", known.host.split(",")[0], "--max-sequences", str(known.parallel),
        "--threads", "1", "--backend", "cpu", "--kv-memory", "64M", "--open-metrics",
    ]  # fmt: skip
    if known.ctx_size:
        result += ["--context", str(known.ctx_size // known.parallel)]
    if known.api_key:
        result += ["--api-key", known.api_key]
    if known.cors_origins:
        result += ["--allowed-origin", known.cors_origins]
    return result


def _with_template(model: Path, text: str | None, file: str | None) -> Path:
    """A copy of the model with another chat template. Left behind: the tests' temporary folder goes as a whole."""
    copy = Path(tempfile.mkdtemp(dir=model.parent)) / "model"
    shutil.copytree(model, copy)
    (copy / "chat_template.jinja").write_text(Path(file).read_text() if file else CHATML if text == "chatml" else text or "")
    return copy


def main(model: Path) -> None:
    words = command(model, sys.argv[1:])
    os.execv(words[0], words)
