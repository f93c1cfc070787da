"""Every family of the one family plugin that is installed, beside the core and surogate-serve alone: a tiny model is trained
whole, an adapter is trained on it, and what came out is served.

    python .ci/families_alone.py <name of the plugin> <empty folder>
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surogate_core.plugins import get_manager
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_serve.llm import LLM

VOCABULARY = 264  # all bytes, and the token that ends a text
SENTENCE = "the quick brown fox jumps over the lazy dog and naps. "
SUROGATE = str(Path(sys.executable).with_name("surogate"))


def main(plugin: str, folder: Path) -> None:
    manager = get_manager()
    manager.require(plugin)
    write_byte_tokenizer(folder / "tokenizer", ["<|end|>"], eos_token="<|end|>", bos_token="<|end|>")
    rows = [json.dumps({"text": SENTENCE * 4}) for _ in range(24)]
    (folder / "text.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    for name, family in manager.families.items():
        source = manager.families.source(name)
        if not source.startswith(plugin):
            raise SystemExit(f"FAILED: {name} is here too, from {source}")
        variants = list(family.tiny_configs().values())
        if not variants:  # it writes no text
            continue
        vocabularies = {key: VOCABULARY for key in variants[0] if key.startswith("vocab_size")}
        config = {**variants[0], **vocabularies, "max_position_embeddings": 256}
        whole = train(folder / name, {"from_scratch": True, "architecture": config, "tokenizer": str(folder / "tokenizer")})
        lora = train(folder / f"{name}-lora", {"model": str(whole / "model"), "lora_rank": 4})
        llm = LLM(lora)
        (answer,) = llm.generate("the quick", max_tokens=8)
        llm.close()
        if not 1 <= len(answer.tokens) <= 8:
            raise SystemExit(f"FAILED: {name} answers with {len(answer.tokens)} tokens")
        print(f"{name}: trained whole and with an adapter, served: {answer.text!r}", flush=True)


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


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
