"""The command as a whole: verbs, errors and exit codes, verbs of plugins, and what starting it costs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

import surogate_core
from surogate_core.cli import group
from surogate_core.errors import ConfigError, DataError, EngineError, PluginError

VERBS = ["sft", "pt", "merge", "export", "generate", "explain", "plugins", "doctor", "fetch-default-model", "data",
         "bench", "profile"]


def result(status: str = "completed") -> types.SimpleNamespace:
    return types.SimpleNamespace(status=status)


def test_help_lists_every_verb(run):
    shown = run("--help")
    assert shown.exit_code == 0
    for verb in VERBS:
        assert verb in shown.stdout
        assert run(verb, "--help").exit_code == 0


def test_version(run):
    shown = run("--version")
    assert (shown.exit_code, shown.stdout) == (0, f"surogate {surogate_core.__version__}\n")


@pytest.mark.parametrize("words", [[], ["nothing"], ["sft"], ["sft", "--nothing"], ["data", "nothing"]])
def test_bad_usage_ends_with_2(run, words):
    assert run(*words).exit_code == 2


def test_bad_configuration_ends_with_2_and_no_traceback(run, config_file):
    config_file.write_text(config_file.read_text() + "learnig_rate: 1\n")
    shown = run("sft", config_file)
    assert shown.exit_code == 2
    assert f"error: {config_file}:4: unknown key `learnig_rate`\nDid you mean `learning_rate`?\n" in shown.stderr
    assert "Traceback" not in shown.output and shown.stdout == ""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("no such recipe", "Choose one."), 2, "error: no such recipe\nChoose one.\n"),
        (DataError("a.jsonl:3: [bad] row"), 1, "error: a.jsonl:3: [bad] row\n"),
        (EngineError("op x"), 1, "error: op x\n"),
        (ValueError("oops"), 1, "error: ValueError: oops\nThis is not an error that Surogate expects."),
        (OSError(28, "No space left on device"), 1, "error: OSError: [Errno 28] No space left on device\n"),
        (PermissionError(13, "Permission denied", "out/x"), 1, "error: out/x: Permission denied\n"),
        (PluginError("no recipe is named x"), 2, "error: no recipe is named x\n"),
        (MemoryError(), 1, "error: MemoryError"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_messages_and_exit_codes(run, config_file, stand_in, error, code, message):
    def fail(*_: object) -> None:
        raise error

    stand_in("train.run", run_training=fail)
    shown = run("sft", config_file)
    assert shown.exit_code == code
    assert message in shown.stderr and "Traceback" not in shown.output


@pytest.mark.parametrize("words", [["--debug", "sft"], ["sft", "--debug"]])
def test_debug_shows_the_traceback(run, config_file, stand_in, words):
    def fail(*_: object) -> None:
        raise ValueError("oops")

    stand_in("train.run", run_training=fail)
    shown = run(*words, config_file)
    assert shown.exit_code == 1 and "Traceback" in shown.stderr and "ValueError: oops" in shown.stderr


def test_debug_after_two_dashes_is_an_argument(run):
    assert "there is no such file" in run("sft", "--", "--debug").stderr


def test_verbs_of_plugins(run, monkeypatch):
    def greet(name: str, loud: bool = False) -> None:
        """Say hello."""
        if name == "nobody":
            raise DataError("nobody is there")
        typer.echo(f"hello {name}" + "!" * loud)

    tools = typer.Typer(help="Tools of a plugin.")
    tools.command("one")(lambda: typer.echo("one"))
    tools.command("two")(lambda: typer.echo("two"))
    monkeypatch.setattr(group, "plugin_verbs", lambda group: {"greet": greet, "tools": tools, "sft": greet})
    assert run("greet", "world", "--loud").stdout == "hello world!\n"
    assert run("tools", "two").stdout == "two\n"
    failed = run("greet", "nobody")
    assert failed.exit_code == 1 and failed.stderr == "error: nobody is there\n"
    shown = run("--help").stdout
    assert "Say hello." in shown and "Tools of a plugin." in shown
    assert "Fine-tune" in run("sft", "--help").stdout  # a plugin takes no verb of the core's


def test_core_verbs_load_no_plugin(run, monkeypatch):
    def forbidden(group: str) -> dict[str, object]:
        raise AssertionError("plugins were loaded")

    monkeypatch.setattr(group, "plugin_verbs", forbidden)
    assert run("sft", "--help").exit_code == 0


def test_starting_imports_nothing_that_a_verb_works_with():
    """Numbers of seconds depend on the machine; what is imported does not."""
    script = (
        "import sys; from surogate_core.cli.app import app\n"
        "heavy = {'numpy', 'pydantic', 'yaml', 'tokenizers', 'jinja2', 'safetensors', 'gguf', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "print(sorted(name for name in sys.modules if name.startswith('surogate_core.') and '.cli' not in name))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "['surogate_core.errors']"]


def test_the_page_of_the_command_has_every_verb():
    page = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    for verb in VERBS:
        assert f"| `surogate {verb}" in page, verb


def test_the_pages_commands_parse(run):
    """Every example of the page names options that exist: a missing file may stop it, bad usage may not."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert len(commands) > 10
    for command in commands:
        words = shlex.split(command.partition("<")[0])[1:]
        verb = words[:2] if words[0] in ("data", "bench") else words[:1]
        known = set(re.findall(r"--[a-z-]+", run(*verb, "--help").stdout))
        assert {word for word in words if word.startswith("--")} <= known, command
