"""Tiny runs: a model that fits a millisecond, a tokenizer of bytes, and configurations over them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from surogate_llama.family import LlamaFamily

from surogate_core.config import TrainConfig
from surogate_core.model import initial_values
from surogate_core.testing.tiny import write_byte_tokenizer
from surogate_core.train.prepare import Prepared, prepare
from surogate_core.train.run import run_training
from surogate_core.train.session import TrainSession
from surogate_core.train.trainer import RunResult
from surogate_core.weights.export import write_hf
from surogate_core.weights.tensor import StoredTensor

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "tie_word_embeddings": True,
}
WORDS = "the quick brown fox jumps over a lazy dog while seven old owls watch from their tree".split()


def write_tokenizer(folder: Path) -> Path:
    """Bytes, and the special tokens of ChatML."""
    return write_byte_tokenizer(folder, SPECIAL, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE)


def write_model(folder: Path, dtype: str = "bf16", scale: float = 4.0, **changes: Any) -> Path:
    """A random model that answers with more than noise: its matrices are ``scale`` times those of a new one."""
    family = LlamaFamily("llama", "LlamaForCausalLM", ("llama",))
    h = family.from_hf({**ARCHITECTURE, **changes})
    parameters = {}
    for name, parameter in family.model(h).parameters():
        array = initial_values(name, parameter.shape, parameter, 7)
        array = array * np.float32(scale) if array.ndim > 1 else array
        parameters[name] = StoredTensor(name, "f32", parameter.shape, np.ascontiguousarray(array, np.float32))
    write_hf(folder, family.hf_names(h).export(parameters), family.hf_config(h), dtype=dtype)
    return write_tokenizer(folder)


def text_of(seed: int, words: int) -> str:
    generator = np.random.default_rng(seed)
    return " ".join(generator.choice(WORDS, words))


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Answers of very different lengths, so that micro-batches have uneven counts of targets."""
    return [
        {"messages": [{"role": "user", "content": text_of(seed + i, 1 + i % 3)},
                      {"role": "assistant", "content": text_of(seed + i + 1000, 1 + (i * 7) % 6)}]}
        for i in range(count)
    ]


def config(root: Path, **changes: Any) -> TrainConfig:
    """LoRA on the tiny chat model under ``root``, in fp32 where nothing else is said."""
    keys: dict[str, Any] = {
        "model": str(root / "model"), "datasets": str(root / "chat.jsonl"), "output_dir": str(root / "out"),
        "sequence_len": 96, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_epochs": 1,
        "lora_rank": 4, "learning_rate": 1e-2, "recipe": "fp32", "threads": 1, "memory_budget": "1GiB", "save_steps": 0,
        "backend": "cpu",
    }
    return TrainConfig.model_validate({**keys, **changes})


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def shown(screen: Console) -> str:
    return screen.file.getvalue()


def run(settings: TrainConfig, mode: str = "sft", screen: Console | None = None) -> RunResult:
    return run_training(settings, mode, screen or console())


def open_run(settings: TrainConfig, mode: str = "sft") -> tuple[Prepared, TrainSession]:
    prepared = prepare(settings, mode)
    return prepared, TrainSession.of(prepared)


def lift_b(session: TrainSession) -> None:
    """Adapters start with B = 0, where A has no gradient: gives B what A starts with."""
    for name in session.layout.parameters:
        if name.endswith("lora_b"):
            shape = session.layout.parameters[name].shape
            session.set_parameter(name, 0.1 * initial_values(name.replace("lora_b", "lora_a"), shape, None, 3))
    session.refresh()


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def course(folder: Path) -> list[tuple[Any, ...]]:
    """What must not depend on when a run was stopped."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens", "targets", "tokens_seen", "epoch")
    return [tuple(r[k] for k in keys) for r in records(folder)]


def final_state(folder: Path) -> dict[str, bytes]:
    """The newest checkpoint's tensors."""
    newest = sorted(Path(folder).glob("step_*"))[-1]
    from surogate_core.weights.safetensors_file import SafetensorsFile

    file = SafetensorsFile(newest / "state.safetensors")
    return {newest.name: b"", **{name: np.array(file.get(name).data).tobytes() for name in file.names()}}
