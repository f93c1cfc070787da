"""Spellings of other tools."""

from __future__ import annotations

import pytest

from surogate_core.config import TrainConfig
from surogate_core.config.aliases import CONVERTED, DECIDED, NESTED, REFUSED, RENAMED, RESPELLED, Meaning
from surogate_core.errors import ConfigError

# Anything valid that is not the default, for each key that has other names.
EXAMPLES = {
    "model": "a.jsonl",
    "architecture": None,  # needs others beside it
    "output_dir": "elsewhere",
    "run_name": "fifth",
    "datasets": "b.jsonl",
    "system_prompt": "Be brief.",
    "validation_datasets": "b.jsonl",
    "validation_split": "0.25",
    "sequence_len": "77",
    "sample_packing": "false",
    "num_epochs": "7",
    "per_device_train_batch_size": "5",
    "gradient_accumulation_steps": "6",
    "learning_rate": "1e-5",
    "lr_scheduler_type": "wsd",
    "warmup_steps": "12",
    "min_lr_ratio": "0.1",
    "wsd_decay_ratio": "0.2",
    "max_grad_norm": "0.5",
    "adam_beta1": "0.8",
    "adam_beta2": "0.95",
    "adam_epsilon": "1e-6",
    "optimizer": "other",
    "weight_decay": "0.1",
    "lora_rank": "4",
    "lora_alpha": "8",
    "lora_dropout": "0.05",
    "lora_target_modules": "[attn.q]",
    "eval_steps": None,  # needs validation data
    "save_total_limit": "2",
    "seed": "5",
    "optimizer_state_dtype": "bf16",
    "master_dtype": "bf16",
    "cuda_graphs": "false",
    "deterministic": "false",
}
NESTED_NAMES = {f"{group}.{spelled}": key for group, keys in NESTED.items() for spelled, key in keys.items()}


def document(*lines: str) -> str:
    keys = {line.partition(":")[0] for line in lines}
    head = []
    if not keys & {"model", *(name for name, key in RENAMED.items() if key == "model")}:
        head.append("model: m.gguf")
    if not keys & {"datasets", *(name for name, key in RENAMED.items() if key == "datasets")}:
        head.append("datasets: a.jsonl")
    return "\n".join([*head, *lines]) + "\n"


@pytest.mark.parametrize("spelled", [*RENAMED, *NESTED_NAMES])
def test_other_names(workshop, spelled: str):
    key = {**RENAMED, **NESTED_NAMES}[spelled]
    value = EXAMPLES[key]
    extra = []
    if key == "architecture":
        value, extra = "{a: 1}", ["from_scratch: true", "tokenizer: m.gguf"]
    if key == "eval_steps":
        value, extra = "9", ["validation_datasets: b.jsonl"]
    group, dot, inner = spelled.partition(".")
    line = f"{group}: {{{inner}: {value}}}" if dot else f"{spelled}: {value}"
    text = document(line, *extra)
    if key == "architecture":
        text = text.replace("model: m.gguf\n", "")
    config = workshop.read(text)
    notes = list(workshop.notes)
    canonical = workshop.read(text.replace(line, f"{key}: {value}"))
    assert config == canonical
    assert getattr(config, key) != TrainConfig(model="m", datasets="a.jsonl").model_dump().get(key)
    assert notes == [f"read `{spelled}` as {key}"] and workshop.notes == []


@pytest.mark.parametrize(("spelled", "value"), [(key, value) for key, table in CONVERTED.items() for value in table])
def test_converted_values(workshop, spelled: str, value: str):
    meaning = CONVERTED[spelled][value]
    text = document(f"{spelled}: {value}")
    if meaning is None:
        assert workshop.read(text) == workshop.read(document())
    elif isinstance(meaning, Meaning):
        config = workshop.read(text)
        notes = list(workshop.notes)
        assert config == workshop.read(document(f"{meaning.key}: {meaning.value}"))
        assert bool(notes) != meaning.weak
    else:
        with pytest.raises(ConfigError, match=rf"run\.yaml:3: `{spelled}: {value}`: ") as error:
            workshop.read(text)
        assert error.value.hint


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, table in RESPELLED.items() for value in table])
def test_values_of_other_tools(workshop, key: str, value: str):
    config = workshop.read(document(f"{key}: {value}"))
    assert workshop.notes
    assert config == workshop.read(document(f"{key}: {RESPELLED[key][value]}"))


@pytest.mark.parametrize("key", DECIDED)
def test_settings_that_something_else_decides(workshop, key: str):
    assert workshop.read(document(f"{key}: true")) == TrainConfig.model_validate(workshop.read(document()))
    workshop.read(document(f"{key}: true"))
    assert workshop.notes == [f"read `{key}` and changed nothing: {DECIDED[key]}"]


@pytest.mark.parametrize("key", REFUSED)
def test_refused_keys(workshop, key: str):
    with pytest.raises(ConfigError, match=r"run\.yaml:3: ") as error:
        workshop.read(document(f"{key}: 4"))
    assert error.value.hint


def test_bare_batch_size_offers_both_choices(workshop):
    with pytest.raises(ConfigError) as error:
        workshop.read(document("batch_size: 4"))
    assert "per_device_train_batch_size" in error.value.hint and "global_batch_size" in error.value.hint


@pytest.mark.parametrize(
    "lines",
    [
        ["micro_batch_size: 4", "per_device_train_batch_size: 2"],
        ["lr: 1e-4", "learning_rate: 2e-4"],
        ["val_set_size: 0.1", "val_size: 0.2"],
        ["packing: true", "sample_packing: false"],
        ["train_on_inputs: true", "train_on: assistant"],
        ["adapter: lora", "lora: false"],
        ["lora_target_linear: true", "lora_target_modules: [q_proj]"],
        ["optimizer: {lr: 1e-4}", "learning_rate: 2e-4"],
        ["warmup_steps: 0.1", "warmup_ratio: 0.2"],
        ["assistant_only_loss: true", "completion_only_loss: true"],
    ],
)
def test_two_spellings_that_disagree(workshop, lines: list[str]):
    with pytest.raises(ConfigError, match=r"run\.yaml:4: .*run\.yaml:3\) both set .*, to different values"):
        workshop.read(document(*lines))


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        (["micro_batch_size: 4", "per_device_train_batch_size: 4"], "per_device_train_batch_size", 4),
        (["lr: 1e-4", "learning_rate: 0.0001"], "learning_rate", 1e-4),
        (["packing: true", "neat_packing: true"], "sample_packing", True),
        (["packing: true", "neat_packing: false"], "sample_packing", True),
        (["train_on_prompt: false", "mask_history: true"], "train_on", "last"),
        (["assistant_only_loss: false", "completion_only_loss: true"], "train_on", "completion"),
        (["bf16: false", "recipe: bf16"], "recipe", "bf16"),
        (["lora_target: all-linear", "lora_target_linear: false"], "lora_target_modules", ["all"]),
        (["roles_to_train: [assistant]", "train_on_inputs: false"], "train_on", "assistant"),
        (["warmup_steps: 0.1"], "warmup_ratio", 0.1),
        (["warmup_ratio: 0", "warmup_steps: 20"], "warmup_steps", 20),
        (["adapter:"], "lora", False),
    ],
)
def test_spellings_that_agree(workshop, lines: list[str], key: str, value: object):
    assert getattr(workshop.read(document(*lines)), key) == value


def test_unknown_value_lists_those_understood(workshop):
    with pytest.raises(ConfigError, match=r"run\.yaml:3: `loss_scale: thinking_only` has no counterpart") as error:
        workshop.read(document("loss_scale: thinking_only"))
    assert "default, last_round, all" in error.value.hint


def test_unknown_key_of_a_group(workshop):
    with pytest.raises(ConfigError, match=r"run\.yaml:3: unknown key `peft\.dimm`\nDid you mean `peft\.dim`"):
        workshop.read(document("peft: {dimm: 4}"))


def test_dataset_spellings(workshop):
    text = "model: m.gguf\ndatasets:\n- path: a.jsonl\n  name: main\n  max_samples: 5\n  field_messages: turns\n"
    dataset = workshop.read(text).datasets[0]
    assert (dataset.subset, dataset.samples, dataset.columns) == ("main", 5, {"messages": "turns"})
    assert workshop.notes == [
        "read `datasets.0.name` as datasets.0.subset",
        "read `datasets.0.max_samples` as datasets.0.samples",
        "read `datasets.0.field_messages` as datasets.0.columns.messages",
    ]
    with pytest.raises(ConfigError, match=r"run\.yaml:5: `datasets\.0\.subset` is set twice; first at .*run\.yaml:4"):
        workshop.read("model: m.gguf\ndatasets:\n- path: a.jsonl\n  name: main\n  subset: main\n")


def test_a_note_is_told_once(workshop):
    workshop.read(document("lr: 1e-4"), "lr=2e-4")
    assert workshop.notes == ["read `lr` as learning_rate"]


@pytest.mark.parametrize(
    "text",
    [
        # As axolotl's users write it
        "base_model: m.gguf\nadapter: lora\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\nval_set_size: 0.05\n"
        "datasets:\n  - path: a.jsonl\n    type: chat\n    field_messages: messages\nsequence_len: 2048\n"
        "sample_packing: true\nmicro_batch_size: 2\nnum_epochs: 1\noptimizer: adamw_torch\nlr_scheduler: cosine\n"
        "learning_rate: 0.0002\ntrain_on_inputs: false\nbf16: auto\ngradient_checkpointing: true\n"
        "load_in_4bit: false\nwarmup_ratio: 0.1\noutput_dir: ./out\nflash_attention: true\n",
        # As LLaMA-Factory's
        "model_name_or_path: m.gguf\nfinetuning_type: lora\nlora_rank: 32\nlora_alpha: 16\nlora_target: all\n"
        "dataset: a.jsonl\ncutoff_len: 2048\npacking: true\nneat_packing: true\n"
        "per_device_train_batch_size: 2\nnum_train_epochs: 1.0\n"
        "lr_scheduler_type: cosine\nlearning_rate: 2.0e-4\ntrain_on_prompt: false\nbf16: true\nval_size: 0.05\n"
        "warmup_ratio: 0.1\noutput_dir: ./out\nreport_to: none\n",
        # As TRL's and ms-swift's
        "model_name_or_path: m.gguf\ntuner_type: lora\nlora_r: 32\nlora_alpha: 16\ntarget_modules: all-linear\n"
        "dataset_name: a.jsonl\nmax_length: 2048\npacking: true\nper_device_train_batch_size: 2\nnum_train_epochs: 1\n"
        "lr_scheduler_type: cosine\nlearning_rate: 2e-4\nassistant_only_loss: true\nsplit_dataset_ratio: 0.05\n"
        "warmup_steps: 0.1\nmax_steps: -1\noutput_dir: ./out\noptim: adamw_torch_fused\n",
    ],
)
def test_one_run_in_the_words_of_several_tools(workshop, text: str):
    config = workshop.read(text)
    assert (config.lora, config.lora_rank, config.lora_alpha, config.lora_target_modules) == (True, 32, 16.0, ["all"])
    assert (config.sequence_len, config.sample_packing, config.train_on) == (2048, True, "assistant")
    assert (config.per_device_train_batch_size, config.num_epochs, config.max_steps) == (2, 1, None)
    assert (config.optimizer, config.lr_scheduler_type, config.learning_rate) == ("adamw", "cosine", 2e-4)
    assert (config.validation_split, config.warmup_ratio, config.output_dir) == (0.05, 0.1, "./out")
    assert (config.recipe, config.report_to) == ("bf16", [])
