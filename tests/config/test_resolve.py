"""From a file and overrides to a configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from surogate_core.config import TrainConfig
from surogate_core.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("learning_rate: 1e-4", "learning_rate", 1e-4),  # text, for YAML
        ("learning_rate: '3e-4'", "learning_rate", 3e-4),
        ("learning_rate: ${LR:-2e-3}", "learning_rate", 2e-3),
        ("max_steps: 1_000", "max_steps", 1000),
        ("max_steps: 1e3", "max_steps", 1000),
        ("num_epochs: 3.0", "num_epochs", 3),
        ("lora_rank: 010", "lora_rank", 10),  # eight, for YAML
        ("run_name: 007", "run_name", "007"),  # seven, for YAML
        ("run_name: off", "run_name", "off"),  # false, for YAML
        ("run_name: 1:30", "run_name", "1:30"),  # ninety, for YAML
        ("run_name: 2024-01-02", "run_name", "2024-01-02"),
        ("lora: off", "lora", False),
        ("sample_packing: No", "sample_packing", False),
        ("use_rslora: yes", "use_rslora", True),
        ("report_to: off", "report_to", []),
        ("report_to: none", "report_to", []),
        ("report_to: a, b", "report_to", ["a", "b"]),
        ("resume_from_checkpoint: off", "resume_from_checkpoint", False),
        ("resume_from_checkpoint: true", "resume_from_checkpoint", "auto"),
        ("memory_budget: 1.5GiB", "memory_budget", 3 * 2**29),
        ("memory_budget: 2 GB", "memory_budget", 2 * 10**9),
        ("memory_budget: 1048576", "memory_budget", 2**20),
        ("memory_budget: auto", "memory_budget", "auto"),
        ("threads: 2", "threads", 2),
        ("validation_split: 1", "validation_split", 1),
        ("validation_split: 0.1", "validation_split", 0.1),
        ("save_steps: .25", "save_steps", 0.25),
        ("save_steps: 100.0", "save_steps", 100),
        ("lora_target_modules: all-linear", "lora_target_modules", ["all"]),
        ("lora_target_modules: q_proj,v_proj", "lora_target_modules", ["q_proj", "v_proj"]),
        ("lora_target_modules: [attn.q, attn.v]", "lora_target_modules", ["attn.q", "attn.v"]),
        ("max_steps:", "max_steps", None),
        ("learning_rate:", "learning_rate", 2e-4),
        ("save_total_limit: null", "save_total_limit", None),
        ("system_prompt: '${NAME:-x} $${y}'", "system_prompt", "x ${y}"),
    ],
)
def test_values(with_lines, line: str, key: str, value: object):
    found = getattr(with_lines(line), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learnig_rate: 1e-3", r"run\.yaml:3: unknown key `learnig_rate`\nDid you mean `learning_rate`\?"),
        ("learningRate: 1e-3", r"Did you mean `learning_rate`"),
        ("per-device-train-batch-size: 1", r"Did you mean `per_device_train_batch_size`"),
        ("micro_batchsize: 1", r"Did you mean `micro_batch_size` \(per_device_train_batch_size\)"),
        ("quux: 1", r"run\.yaml:3: unknown key `quux`\ndocs/config\.md"),
        ("learning_rate: fast", r"run\.yaml:3: `learning_rate`: should be a valid number.*'fast'"),
        ("learning_rate: .nan", r"run\.yaml:3: `learning_rate`"),
        ("learning_rate: nan", r"run\.yaml:3: `learning_rate`: .*finite"),
        ("learning_rate: 1e999", r"run\.yaml:3: `learning_rate`: .*finite"),
        ("learning_rate: 0", r"greater than 0"),
        ("max_grad_norm: off", r"run\.yaml:3: `max_grad_norm`: should be a valid number.*'off'"),
        ("seed: yes", r"run\.yaml:3: `seed`: should be a valid integer.*'yes'"),
        ("num_epochs: 0.5", r"run\.yaml:3: `num_epochs`: should be a valid integer"),
        ("lora: maybe", r"run\.yaml:3: `lora`: should be a valid boolean"),
        ("lr_scheduler_type: cosin", r"'cosin' is not one of constant, linear, cosine, wsd; did you mean cosine\?"),
        ("overlong: off", r"'off' is not one of drop, truncate, split, error"),
        ("validation_split: 1.0", r"run\.yaml:3: `validation_split`: 1\.0 could mean one or all"),
        ("validation_split: 1.5", r"neither an integer nor a fraction"),
        ("validation_split: -1", r"is negative"),
        ("save_steps: often", r"run\.yaml:3: `save_steps`: 'often' is no number"),
        ("memory_budget: 2 GBit", r"'GBit' is no unit of size"),
        ("memory_budget: lots", r"'lots' is no size"),
        ("memory_budget: 0", r"greater than or equal to 1"),
        ("threads: many", r"run\.yaml:3: `threads`: .*integer, or should be 'auto' \(it says 'many'\)"),
        ("threads: 0", r"run\.yaml:3: `threads`"),
        ("lora_target_modules: []", r"run\.yaml:3: `lora_target_modules`"),
        ("lora_target_modules: [all, q_proj]", r"run\.yaml:3: `lora_target_modules` has `all` and others"),
        ("warmup_steps: {a: 1}", r"run\.yaml:3: `warmup_steps`"),
        ("output_dir: [a]", r"run\.yaml:3: `output_dir`"),
        ("eval_steps: 10", r"run\.yaml:3: `eval_steps` is set, but there is nothing to evaluate on"),
        ("warmup_steps: 1\nwarmup_ratio: 0.1", r"run\.yaml:3 and .*run\.yaml:4: `warmup_steps` and `warmup_ratio` are"),
        ("warmup_steps: 10\nmax_steps: 5", r"`warmup_steps` 10 is more than `max_steps` 5"),
        ("lr_scheduler_type: wsd\nwarmup_ratio: .6\nwsd_decay_ratio: .6", r"more than the whole run"),
        ("validation_datasets: b.jsonl\nvalidation_split: .1", r"are both set: keep one"),
        ("architecture: {hidden_size: 8}", r"`architecture` is only for `from_scratch: true`"),
        ("from_scratch: true\nlora: true", r"`lora` trains adapters on trained weights"),
        ("from_scratch: true\narchitecture: {a: 1}", r"`model` and `architecture` both say"),
        ("global_batch_size: 3", r"3 is no multiple of `per_device_train_batch_size` 2"),
        (
            "global_batch_size: 16\ngradient_accumulation_steps: 3",
            r"2 x `gradient_accumulation_steps` 3 = 6, but `global_batch_size` is 16",
        ),
    ],
)
def test_refusals_say_what_and_where(with_lines, line: str, message: str):
    with pytest.raises(ConfigError) as error:
        with_lines(line)
    assert re.search(message, str(error.value)), str(error.value)


def test_everything_wrong_is_told_at_once(with_lines):
    with pytest.raises(ConfigError) as error:
        with_lines("learnig_rate: 1", "sead: 2")
    assert "learnig_rate" in str(error.value) and "sead" in str(error.value)
    with pytest.raises(ConfigError) as error:
        with_lines("learning_rate: x", "seed: y", "lora_rank: z")
    assert [f"run.yaml:{line}" in str(error.value) for line in (3, 4, 5)] == [True] * 3
    # A default that depends on a wrong key is no error of its own.
    assert "run_name" not in str(error.value) and len(str(error.value).splitlines()) == 3


def test_missing_keys(workshop):
    with pytest.raises(ConfigError, match="`datasets` is missing"):
        workshop.read("model: m.gguf\n")
    with pytest.raises(ConfigError, match="`model` is missing"):
        workshop.read("datasets: a.jsonl\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: the file is empty"):
        workshop.read("# nothing\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: expected `key: value` lines"):
        workshop.read("- a\n")


def test_files_that_cannot_be_read(workshop):
    workshop.file.write_bytes(b"model: \xff\n")
    from surogate_core.config import resolve

    with pytest.raises(ConfigError, match="not UTF-8"):
        resolve(workshop.file)
    with pytest.raises(ConfigError, match="there is no such file"):
        resolve(workshop.folder / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        resolve(workshop.folder)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a.jsonl", {"path": "a.jsonl"}),
        ("[a.jsonl, b.jsonl#5]", {"path": "a.jsonl"}),
        ("a.jsonl:train", {"path": "a.jsonl", "split": "train"}),
        ("'a.jsonl:train[:10]'", {"path": "a.jsonl", "split": "train[:10]"}),
        ("a.jsonl#500", {"path": "a.jsonl", "samples": 500}),
        ("'a.jsonl:train[10%:]#1_000'", {"path": "a.jsonl", "split": "train[10%:]", "samples": 1000}),
        ("{path: a.jsonl, type: chat, weight: 2}", {"path": "a.jsonl", "type": "chat", "weight": 2.0}),
        ("[{path: a.jsonl, columns: {text: body}}]", {"path": "a.jsonl", "columns": {"text": "body"}}),
    ],
)
def test_datasets(workshop, written: str, expected: dict):
    dataset = workshop.read(f"model: m.gguf\ndatasets: {written}\n").datasets[0]
    expected = {**expected, "path": str(workshop.folder / expected["path"])}
    defaults = {"type": "auto", "split": None, "subset": None, "samples": None, "weight": 1.0, "columns": {}}
    assert dataset.model_dump() == {**defaults, **expected}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[]", r"run\.yaml:2: `datasets`"),
        ("[{path: a.jsonl, tipe: chat}]", r"unknown key `datasets\.0\.tipe`\nDid you mean `datasets\.0\.type`"),
        ("[{type: chat}]", r"`datasets\.0\.path` is missing"),
        ("[{path: a.jsonl, samples: 0}]", r"run\.yaml:2: `datasets\.0\.samples`"),
        ("[{path: nix.jsonl}]", r"run\.yaml:2: `datasets\.0`: nix\.jsonl does not exist \(tried .*/nix\.jsonl and"),
        ("[{path: ''}]", r"`datasets\.0\.path`"),
        ("[[a.jsonl]]", r"run\.yaml:2: `datasets\.0`"),
    ],
)
def test_datasets_refused(workshop, written: str, message: str):
    with pytest.raises(ConfigError, match=message):
        workshop.read(f"model: m.gguf\ndatasets: {written}\n")


def test_paths_beside_the_file_win_over_the_working_directory(workshop, monkeypatch):
    elsewhere = workshop.folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for name in ("a.jsonl", "only_here.jsonl"):
        (elsewhere / name).touch()
    config = workshop.read("model: m.gguf\ndatasets: [a.jsonl, only_here.jsonl]\n", "datasets.2.path=a.jsonl")
    paths = [Path(each.path) for each in config.datasets]
    assert paths == [workshop.folder / "a.jsonl", elsewhere / "only_here.jsonl", elsewhere / "a.jsonl"]


def test_names_of_the_hub_stay(workshop):
    assert workshop.read("model: m.gguf\ndatasets: owner/name\n").datasets[0].path == "owner/name"


def test_a_model_that_is_missing_names_a_way_out(workshop):
    with pytest.raises(ConfigError, match="`model`: owner/name does not exist") as error:
        workshop.read("model: owner/name\ndatasets: a.jsonl\n")
    assert "surogate fetch-default-model" in error.value.hint


def test_the_default_model(workshop, monkeypatch):
    from surogate_core.weights.packaged import PackagedModel

    text = "model: default\ndatasets: a.jsonl\n"
    monkeypatch.setattr(PackagedModel, "find", lambda self: workshop.folder / "b.jsonl")
    assert workshop.read(text).model == str(workshop.folder / "b.jsonl")
    monkeypatch.setattr(PackagedModel, "find", lambda self: None)
    with pytest.raises(ConfigError, match=r"run\.yaml:1: `model`: the model 'default' is not here yet"):
        workshop.read(text)
    (workshop.folder / "default").touch()
    assert workshop.read(text).model == str(workshop.folder / "default")


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["learning_rate=1e-3"], "learning_rate", 1e-3),
        (["lr=1e-3"], "learning_rate", 1e-3),
        (["seed=1", "seed=2"], "seed", 2),
        (["optimizer.lr=1e-3"], "learning_rate", 1e-3),
        (["peft.dim=4"], "lora_rank", 4),
        (["run_name="], "run_name", "output"),
        (["run_name=a=b"], "run_name", "a=b"),
        (["lora_target_modules=[attn.q, attn.v]"], "lora_target_modules", ["attn.q", "attn.v"]),
        (["lora=off"], "lora", False),
        (["output_dir=${OUT}"], "output_dir", "there"),
        (["train_on_inputs=true"], "train_on", "all"),
        (["max_steps=-1"], "max_steps", None),
    ],
)
def test_overrides(workshop, overrides: list[str], key: str, value: object):
    text = "model: m.gguf\ndatasets: a.jsonl\nlearning_rate: 5e-5\nlora_rank: 8\ntrain_on: last\nmax_steps: 3\n"
    assert getattr(workshop.read(text, *overrides, environ={"OUT": "there"}), key) == value


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("datasets.0.samples=7", {"samples": 7, "split": "train"}),
        ("datasets.0.path=b.jsonl", {"path": "b.jsonl", "split": "train"}),
        ("datasets.0.text_field=body", {"columns": {"text": "body"}}),
        ("datasets.0.columns.text=body", {"columns": {"text": "body"}}),
        ("datasets.0=b.jsonl", {"path": "b.jsonl", "split": None}),
        ("dataset.0.type=chat", {"type": "chat"}),
        ("datasets={path: b.jsonl}", {"path": "b.jsonl"}),
    ],
)
@pytest.mark.parametrize(
    "written", ["'a.jsonl:train'", "[{path: a.jsonl, split: train}]", "{path: a.jsonl, split: train}"]
)
def test_overrides_of_datasets(workshop, monkeypatch, written: str, override: str, expected: dict):
    monkeypatch.chdir(workshop.folder)
    dataset = workshop.read(f"model: m.gguf\ndatasets: {written}\n", override).datasets[0]
    for key, value in expected.items():
        assert getattr(dataset, key) == (str(workshop.folder / value) if key == "path" else value)


def test_override_adds_a_dataset(workshop):
    config = workshop.read("model: m.gguf\ndatasets: a.jsonl\n", "datasets.1.path=b.jsonl", "val_dataset.0=b.jsonl")
    assert [Path(each.path).name for each in config.datasets] == ["a.jsonl", "b.jsonl"]
    assert [Path(each.path).name for each in config.validation_datasets] == ["b.jsonl"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learnig_rate=1", r"--set learnig_rate=1: unknown key `learnig_rate`\nDid you mean `learning_rate`"),
        ("learning_rate", r"--set learning_rate: expected key=value"),
        ("=3", r"expected key=value"),
        ("seed=x", r"--set seed=x: `seed`: should be a valid integer"),
        ("seed=[", r"--set seed=\[: not valid YAML"),
        ("seed.x=1", r"`seed` has no parts"),
        ("datasets.5.path=a.jsonl", r"`datasets` has 1 entries, and no '5'"),
        ("datasets.first.path=a.jsonl", r"has 1 entries, and no 'first'"),
        ("datasets.0.smaples=1", r"Did you mean `datasets\.0\.samples`"),
        ("nested.key=1", r"unknown key `nested`"),
        ("batch_size=4", r"`batch_size` means one micro-batch in some tools"),
        ("model=${NOT_SET}", r"the environment variable NOT_SET is not set"),
        ("global_batch_size=3", r"--set global_batch_size=3"),
    ],
)
def test_overrides_refused(workshop, override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        workshop.read("model: m.gguf\ndatasets: a.jsonl\n", override)


def test_global_batch_size_gives_the_accumulation(with_lines):
    config = with_lines("global_batch_size: 32", "per_device_train_batch_size: 4")
    assert (config.gradient_accumulation_steps, config.effective_batch_size) == (8, 32)
    assert with_lines().gradient_accumulation_steps == 4
    agreed = with_lines("global_batch_size: 8", "gradient_accumulation_steps: 4")
    assert agreed.effective_batch_size == 8


def test_defaults_that_depend(workshop, with_lines):
    assert with_lines().learning_rate == 2e-4
    assert with_lines("lora: false").learning_rate == 2e-5
    assert with_lines("from_scratch: true").lora is False
    assert with_lines("from_scratch: true").learning_rate == 2e-4
    assert with_lines().eval_steps == 0
    assert with_lines("validation_split: 5").eval_steps == 100
    assert with_lines("validation_datasets: b.jsonl").eval_steps == 100
    assert with_lines("output_dir: out/notes").run_name == "notes"


def test_pretraining_splits_long_texts(workshop):
    text = "model: m.gguf\ndatasets: a.jsonl\n"
    assert workshop.read(text, mode="pt").overlong == "split"
    assert workshop.read(text, mode="sft").overlong == "drop"
    assert workshop.read(text + "overlong: error\n", mode="pt").overlong == "error"


def test_from_scratch_with_an_architecture(workshop):
    text = (
        "from_scratch: true\ndatasets: a.jsonl\ntokenizer: m.gguf\n"
        "architecture: {model_type: llama, hidden_size: 64, rms_norm_eps: 1e-5, tie: yes, "
        "rope_scaling: {factor: 8.0}}\n"
    )
    config = workshop.read(text, "architecture.hidden_size=32", "model_config.layers=2")
    assert config.architecture == {
        "model_type": "llama",
        "hidden_size": 32,
        "rms_norm_eps": 1e-5,
        "tie": True,
        "rope_scaling": {"factor": 8.0},
        "layers": 2,
    }
    with pytest.raises(ConfigError, match="brings no tokenizer"):
        workshop.read(text.replace("tokenizer: m.gguf\n", ""))
    with pytest.raises(ConfigError, match="`from_scratch` needs `architecture`"):
        workshop.read("from_scratch: true\ndatasets: a.jsonl\n")


def test_chat_templates(workshop):
    (workshop.folder / "t.jinja").write_text("{{ x }}")
    base = "model: m.gguf\ndatasets: a.jsonl\n"
    assert workshop.read(base + "chat_template: t.jinja").chat_template == str(workshop.folder / "t.jinja")
    assert workshop.read(base + "chat_template: chatml").chat_template == "chatml"
    assert workshop.read(base + "chat_template: qwen2.5").chat_template == "qwen2.5"
    assert workshop.read(base + "chat_template: '{{ messages }}'").chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"run\.yaml:3: `chat_template`: nix\.jinja does not exist"):
        workshop.read(base + "chat_template: nix.jinja")


def test_intervals():
    config = TrainConfig(model="m", datasets="a.jsonl", eval_steps=0, save_steps=0.25, warmup_ratio=0.1)
    assert (config.eval_interval(10), config.save_interval(10), config.warmup(15)) == (0, 3, 2)
    assert config.model_copy(update={"save_steps": 7}).save_interval(10) == 7
    assert config.model_copy(update={"warmup_steps": 4}).warmup(15) == 4


def test_a_configuration_is_frozen():
    config = TrainConfig(model="m", datasets="a.jsonl")
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValueError, match="Extra inputs"):
        TrainConfig(model="m", datasets="a.jsonl", learnig_rate=1.0)
