"""The file of resolved values: it reads back to the same run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from surogate_core.config import TrainConfig, dump_resolved, resolve, resolved_text
from surogate_core.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
TRICKY = st.sampled_from(
    ["off", "1e-4", "007", "null", "", "~", "${HOME}", "$${X}", "a: b", "- a", "# x", " x ", "\n", "é", "<<", "=", ".5"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT | TRICKY
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | TRICKY, inner, max_size=3), max_leaves=8
)
NUMBERS = st.floats(1e-12, 0.99)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    text = TRICKY | TEXT
    return {
        "run_name": draw(text),
        "system_prompt": draw(st.none() | text),
        "learning_rate": draw(NUMBERS),
        "adam_beta1": draw(NUMBERS),
        "adam_epsilon": draw(NUMBERS),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "save_steps": draw(st.integers(0, 10**9) | NUMBERS),
        "max_steps": draw(st.none() | st.integers(1, 10**9)),
        "save_total_limit": draw(st.none() | st.integers(1, 9)),
        "threads": draw(st.just("auto") | st.integers(1, 64)),
        "memory_budget": draw(st.just("auto") | st.integers(1, 2**50)),
        "resume_from_checkpoint": draw(st.sampled_from(["auto", False])),
        "lora_target_modules": draw(st.lists(st.sampled_from(["attn.q", "mlp.up", "on"]), min_size=1)),
        "report_to": draw(st.lists(st.sampled_from(["off", "wandb"]), max_size=2)),
        "plugins": draw(st.none() | st.lists(TRICKY, max_size=2)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    for name in ("m.gguf", "a#1 b.jsonl"):
        (folder / name).touch()
    return folder


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    values=configurations(),
    tree=st.dictionaries(TEXT | TRICKY, TREES, max_size=3),
    columns=st.dictionaries(TEXT, TEXT, max_size=2),
)
def test_a_resolved_file_reads_back_equal(folder: Path, values: dict[str, Any], tree: dict, columns: dict):
    config = TrainConfig(
        from_scratch=True,
        architecture=tree,
        tokenizer=str(folder / "m.gguf"),
        datasets=[{"path": str(folder / "a#1 b.jsonl"), "columns": columns}],
        **values,
    )
    dump_resolved(config, folder / "resolved.yaml")
    assert resolve(folder / "resolved.yaml", environ={"HOME": "nowhere", "X": "nothing"}) == config


def test_every_key_is_written_once_with_its_value(workshop):
    config = workshop.read("model: m.gguf\ndatasets: a.jsonl\nlr: 1e-3\n")
    written = yaml.safe_load(resolved_text(config))
    assert list(written) == list(TrainConfig.model_fields)
    assert written == config.model_dump(mode="json")


def test_resolved_files_resolve_to_themselves(workshop):
    config = workshop.read("model: m.gguf\ndatasets: a.jsonl\nvalidation_split: 3\nglobal_batch_size: 8\n")
    text = resolved_text(config)
    again = workshop.read(text)
    assert again == config and resolved_text(again) == text and workshop.notes == []


def test_a_resolved_file_takes_overrides(workshop):
    text = resolved_text(workshop.read("model: m.gguf\ndatasets: a.jsonl\n"))
    assert workshop.read(text, "gradient_accumulation_steps=8").effective_batch_size == 16


def test_writing_is_whole_or_not_at_all(workshop, monkeypatch):
    config = workshop.read("model: m.gguf\ndatasets: a.jsonl\n")
    target = workshop.folder / "run" / "resolved.yaml"
    dump_resolved(config, target)
    before = target.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot write .*resolved\.yaml: No space left on device"):
        dump_resolved(config.model_copy(update={"seed": 5}), target)
    assert target.read_bytes() == before
    assert [path.name for path in target.parent.iterdir()] == ["resolved.yaml"]
