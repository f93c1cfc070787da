"""The models of the configuration, and what is generated from them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from surogate_core.config import DatasetConfig, TrainConfig, document
from surogate_core.config.aliases import CONVERTED, DECIDED, NESTED, REFUSED, RENAMED, RESPELLED, Meaning
from surogate_core.config.train import SECTIONS

DOCS = Path(__file__).resolve().parents[2] / "docs"
REMEDY = "run: python -m surogate_core.config.document"

# Files of users hold these keys. One may be added; none may be renamed or dropped without its old name still working.
KEYS = """
model family from_scratch architecture tokenizer chat_template
datasets validation_datasets validation_split sequence_len overlong sample_packing train_on train_on_empty_think
system_prompt bad_rows
num_epochs max_steps per_device_train_batch_size global_batch_size gradient_accumulation_steps
lora lora_rank lora_alpha lora_dropout lora_target_modules use_rslora
optimizer learning_rate lr_scheduler_type warmup_steps warmup_ratio min_lr_ratio wsd_decay_ratio weight_decay
max_grad_norm adam_beta1 adam_beta2 adam_epsilon optimizer_state_dtype master_dtype
recipe backend device cuda_graphs deterministic strategy threads memory_budget plugins
output_dir run_name seed resume_from_checkpoint eval_steps save_steps save_total_limit logging_steps report_to
""".split()
DATASET_KEYS = ["path", "type", "split", "subset", "samples", "weight", "columns"]


def test_keys_are_the_agreed_ones():
    assert list(TrainConfig.model_fields) == KEYS
    assert list(DatasetConfig.model_fields) == DATASET_KEYS


def test_every_key_is_documented_once():
    for model in (TrainConfig, DatasetConfig):
        for key, field in model.model_fields.items():
            assert field.description and field.description.endswith("."), key
    assert [key for section in SECTIONS for key in section.__annotations__] == KEYS


def test_defaults_of_the_models_are_valid_defaults_of_the_page():
    for model in (TrainConfig, DatasetConfig):
        for key, field in model.model_fields.items():
            text = document.default_text(field)
            assert text != "derived" or "Default:" in field.description, f"{key} does not say its default"


def test_other_names_lead_to_keys_that_exist():
    targets = [*RENAMED.values(), *RESPELLED, *(key for keys in NESTED.values() for key in keys.values())]
    targets += [each.key for table in CONVERTED.values() for each in table.values() if isinstance(each, Meaning)]
    assert set(targets) <= set(KEYS)
    spelled = [*RENAMED, *CONVERTED, *DECIDED, *REFUSED]
    assert len(spelled) == len(set(spelled)) and not set(spelled) & set(KEYS)


def test_schema_is_up_to_date():
    assert (DOCS / "schema" / "train.json").read_text(encoding="utf-8") == document.schema_text(), REMEDY


def test_page_is_up_to_date():
    text = (DOCS / "config.md").read_text(encoding="utf-8")
    assert document.page(text) == text, REMEDY


def test_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="generated: begin"):
        document.page("# Configuration\n")


def test_examples_of_the_page_are_valid(workshop):
    text = (DOCS / "config.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    for name in ("default", "notes.jsonl"):
        (workshop.folder / name).touch()
    assert workshop.read(example).effective_batch_size == 8


def test_schema_covers_every_key_and_no_other():
    schema = json.loads((DOCS / "schema" / "train.json").read_text(encoding="utf-8"))
    assert set(schema["properties"]) == set(KEYS)
    assert schema["additionalProperties"] is False and schema["required"] == ["datasets"]
    assert {"type": "string"} in schema["properties"]["datasets"]["anyOf"]


def test_generation_writes_both_files(tmp_path):
    (tmp_path / "config.md").write_text(f"intro\n{document.BEGIN}stale{document.END}\nend\n")
    document.main(tmp_path)
    assert (tmp_path / "schema" / "train.json").read_text() == document.schema_text()
    page = (tmp_path / "config.md").read_text()
    assert page.startswith("intro\n") and page.endswith("\nend\n") and "`learning_rate`" in page and "stale" not in page
