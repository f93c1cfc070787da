"""Trainer, server and exported GGUF say the same of the same conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from surogate_serve.cli.parity import parity
from surogate_serve.engine import EngineOptions
from surogate_serve.parity import compare


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("adapted", [False, True])
def test_batch_invariant_servers_say_exactly_what_the_trainer_says(tiny_long, adapter, recipe, adapted):
    """With an adapter the trainer adds two products where the server has one op, so bits may differ."""
    options = EngineOptions(recipe=recipe, threads=2, max_sequences=4, kv_memory=4 << 20, batch_invariant=True)
    rows = compare(tiny_long, adapter(1) if adapted else None, False, options, 12)
    assert [row.name for row in rows] == ["server, decoding", "server, reading"]
    for row in rows:
        assert row.tokens == 72
        if adapted:
            assert row.largest < (1e-4 if recipe == "fp32" else 0.3)
        else:
            assert (row.differ, row.largest) == (0, 0.0)


def test_the_verb_tells_a_table_and_json(tiny_long, adapter):
    app = typer.Typer()
    app.command()(parity)
    arguments = [str(tiny_long), "--recipe", "fp32", "--tokens", "8", "--threads", "2"]
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 0, table.output
    assert "GGUF, reading" in table.output and "server, decoding" in table.output
    told = CliRunner().invoke(app, [*arguments, "--adapter", str(adapter(2)), "--json", "--tolerance", "1e-3"])
    assert told.exit_code == 0, told.output
    rows = {row["name"]: row for row in json.loads(told.output)["rows"]}
    assert rows["GGUF, reading"]["tokens"] == 48 and rows["GGUF, reading"]["prompts_differ"] == 0
    assert rows["GGUF, reading"]["largest"] < 0.5  # merged weights are rounded to bf16
    assert CliRunner().invoke(app, [*arguments, "--gguf", "x", "--no-gguf"]).exit_code != 0


@pytest.fixture(scope="module")
def tiny_long(tmp_path_factory: pytest.TempPathFactory, write_tiny) -> Path:
    """As `tiny`, with room for the conversations."""
    return write_tiny(tmp_path_factory.mktemp("long") / "model", max_position_embeddings=1024)
