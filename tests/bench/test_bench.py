"""`surogate bench` and `surogate profile` on the CPU, with a model that fits a millisecond."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from surogate_core.bench import ceilings, kernels, presets, workload
from surogate_core.bench.flops import ModelCost
from surogate_core.bench.presets import architecture
from surogate_core.bench.random_model import RandomWeights, random_model
from surogate_core.bench.train import document_lengths
from surogate_core.cli.app import app
from surogate_core.data.loader import Batch, Step
from surogate_core.dsl.module import Parameter
from surogate_core.errors import ConfigError
from surogate_core.plugins import get_manager
from surogate_core.program.program import Instruction

from ..train import runs

SMALL = ["--sequence-len", "32", "--batch", "2", "--accumulation", "2", "--memory-budget", "1GiB", "--backend", "cpu"]
LOW_CEILINGS = ceilings.Ceilings(1024, 1e12, 8e11, 1e10)


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    """Measured once, in a test of its own."""
    for module in ("bench.train", "bench.ceilings"):
        monkeypatch.setattr(f"surogate_core.{module}.measure_ceilings", lambda *_, **__: LOW_CEILINGS)


def shown(*words: str):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def families():
    return list(get_manager().families.values())


@pytest.mark.parametrize("method", [["--lora-rank", "4"], ["--full"]])
def test_bench_train(method):
    found = json.loads(shown("bench", "train", "tiny", *SMALL, *method, "--steps", "2", "--warmup", "1"))
    assert (found["bench"], found["model"]) == ("train", "tiny")
    assert found["method"] == ("full" if method == ["--full"] else "lora r4")
    assert found["tokens_per_second"] == found["padded_tokens_per_second"] > 0
    rate = found["model_flops_per_token"] * found["tokens_per_second"]
    assert found["model_flops_share_of_gemm_peak"] == pytest.approx(rate / 1e12, rel=0.02, abs=1e-4)
    assert found["loss"]["first"] == pytest.approx(np.log(512), abs=0.3)
    assert 0 <= found["idle_share"] < 1
    assert found["seconds"]["micro_step"] > 0 and found["seconds"]["kernels"]["update"] > 0
    parts = found["memory"]
    assert parts["program"] == sum(parts["arenas"].values()) + parts["workspace"] + parts["weights"]
    assert parts["peak_of_process"] > parts["program"] > parts["saved_activations"] > 0
    assert found["device"]["num_units"] >= 1 and found["seed"] == 1234 and found["versions"]["numpy"]


@pytest.mark.cuda
@pytest.mark.parametrize("method", [["--lora-rank", "4"], ["--full", "--optimizer-state-dtype", "bf16"]])
def test_bench_train_on_a_device(method):
    found = json.loads(shown("bench", "train", "tiny", *SMALL[:-1], "cuda", *method, "--steps", "3"))
    assert found["backend"] == "cuda" and found["kernels_run_one_by_one"] == {}
    assert found["loss"]["first"] == pytest.approx(np.log(512), abs=0.3)
    assert found["memory"]["used_on_device"] >= found["memory"]["program"]  # others may come and go beside it
    assert found["versions"]["cuBLASLt"] and found["device"]["architecture"] >= 80
    text = shown("profile", "tiny", *SMALL[:-1], "cuda", *method)
    assert "attention_grad" in text and "adamw" in text


@pytest.mark.cuda
def test_ceilings_of_a_device(monkeypatch):
    monkeypatch.undo()
    found = ceilings.measure_ceilings("cuda", seconds=0.1)
    assert found.gemm_peak >= 0.9 * found.gemm_sustained > 0 and found.copy > 1e11
    small = ceilings.measure_small_copies("cuda", found)
    assert (1 << 20) / small.seconds[0] < found.copy, "a launch is in it"


def test_bench_of_a_configuration_counts_useful_tokens_apart(tmp_path):
    runs.write_model(tmp_path / "model")
    runs.write_rows(tmp_path / "chat.jsonl", runs.chats(6))
    file = tmp_path / "run.yaml"
    file.write_text("model: model\ndatasets: chat.jsonl\nsequence_len: 192\nlora_rank: 4\nbackend: cpu\n")
    found = json.loads(shown("bench", "train", file, "--batch", "1", "--accumulation", "1", "--steps", "2", "--set", "seed=5",
                             "--memory-budget", "1GiB"))
    assert 0 < found["tokens_per_second"] < found["padded_tokens_per_second"]
    assert (found["seed"], found["settings"]["batch"]) == (5, 1)


def test_profile_accounts_for_every_kernel():
    text = shown("profile", "tiny", *SMALL, "--full")
    for word in ("begin:", "micro_step:", "update:", "linear_weight_grad", "attention_grad", "adamw", "global_norm", "of floor"):
        assert word in text
    found = json.loads(shown("profile", "tiny", *SMALL, "--json", "--shapes"))
    rows = [row for entry in found["entries"].values() for row in entry]
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    (head,) = [row for row in rows if row["op"] == "linear_cross_entropy_grad"]
    assert head["count"] == 2 and head["operands"].startswith("bf16[64x128] bf16[512x128]")


def test_unknown_models_and_settings(tmp_path):
    for words, message in (
        (["bench", "train", "llama-9"], "neither a preset nor a .yaml file"),
        (["profile", "tiny", "--recipe", "fp3"], "fp3"),
        (["profile", "tiny", "--set", "learnig_rate=1"], "learning_rate"),
        (["bench", "train", "tiny", "--sequence-len", "8", "--documents", "5"], "cannot hold 5 documents"),
    ):
        result = CliRunner().invoke(app, [*words, *SMALL[2:]])
        assert result.exit_code == 2 and message in result.stderr, result.output
    with pytest.raises(ConfigError, match="no preset is called 'x'"):
        architecture("x")


def test_presets_are_those_of_installed_families(monkeypatch):
    class Made:
        def __init__(self, name):
            self.name = name

        def presets(self):
            return {"acme-1b": {"hidden_size": 2048}}

    both = SimpleNamespace(families={name: Made(name) for name in ("acme", "copycat")})
    monkeypatch.setattr(presets, "get_manager", lambda: SimpleNamespace(families={"acme": both.families["acme"]}))
    assert architecture("acme-1b") == {"hidden_size": 2048}
    with pytest.raises(ConfigError, match="no preset is called 'tiny'"):
        architecture("tiny")
    monkeypatch.setattr(presets, "get_manager", lambda: both)
    with pytest.raises(ConfigError, match="the families acme and copycat both have a preset called 'acme-1b'"):
        presets.presets()


def test_model_flops_are_the_published_ones():
    """100 % of a 777 TFLOP/s product at sequences of 2,048 would be 24.6k and 16.7k tokens/s for Llama-3.1-8B."""
    cost = ModelCost.of(random_model(architecture("llama-3.1-8b"), families()), 2048)
    assert cost.matrix_weights == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    assert cost.attention == ((4096, 0),) * 32
    assert [round(777e12 * 2048 / cost.flops(full, [2048]) / 1e3, 1) for full in (False, True)] == [24.6, 16.7]
    tied = ModelCost.of(random_model(architecture("llama-3.2-1b"), families()), 2048)
    assert tied.matrix_weights == 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192) + 2048 * 128256


def test_packed_documents_and_windows_cost_less_attention():
    cost = ModelCost(0, ((8, 0), (8, 4)))
    assert cost.flops(True, [10]) == 12 * 8 * (50 + (40 - 8))
    assert cost.flops(True, [5, 5]) == 12 * 8 * (25 + (40 - 16))


def test_random_weights_differ_by_name_and_come_back_the_same():
    parameters = {"a": Parameter((64, 128), "x", 0.02), "b": Parameter((64, 128), "x", 0.02), "n": Parameter((8,), "norm"),
                  "z": Parameter((8,), "bias", 0.0)}
    for dtype in ("bf16", "f32", "q8_0"):
        weights, again = (RandomWeights(parameters, dtype, 3) for _ in range(2))
        a, b = (weights.load(None, name, (64, 128)) for name in "ab")
        assert a.dtype == dtype and a.to_f32().std() == pytest.approx(0.02, rel=0.05)
        assert not np.array_equal(a.data, b.data)
        np.testing.assert_array_equal(again.load(None, "a", (64, 128)).data, a.data)
        assert (weights.load(None, "n", (8,)).to_f32() == 1).all() and not weights.load(None, "z", (8,)).to_f32().any()


def test_tensors_larger_than_the_block_go_round(monkeypatch):
    monkeypatch.setattr("surogate_core.bench.random_model.BLOCK", 1000)
    found = RandomWeights({"a": Parameter((50, 64), "x", 1.0)}, "f32", 0).load(None, "a", (50, 64)).data.reshape(-1)
    np.testing.assert_array_equal(found[:2200], found[1000:])


def test_documents_of_a_step_leave_padding_out():
    targets = np.array([5, 6, -100, 7, -100, -100, -100, -100], np.int32)
    starts = np.array([0, 3, 5, 8, 8], np.int32)
    blank = np.zeros(8, np.float32)
    batch = Batch(targets, targets, targets, starts, blank, blank, 3, 5, [])
    assert document_lengths(Step([batch, batch], 0, 0)) == [3, 2, 3, 2]


def test_random_documents_fill_every_sequence():
    config = SimpleNamespace(seed=1, effective_batch_size=3, sequence_len=32)
    data = workload._tokens(config, 100, 4)
    assert len(data) == 4 * 3 * workload.STEPS_OF_DATA and int(data.offsets[-1]) == 3 * 32 * workload.STEPS_OF_DATA
    assert int(data.lengths.min()) >= 2 and (data.weights == 1).all()


def test_costs_of_instructions():
    prepared = workload.from_preset("tiny", {"lora": False, "backend": "cpu", "sequence_len": 32, "memory_budget": "1GiB",
                                             "per_device_train_batch_size": 2}, ())
    program = prepared.plan.program

    def first(op: str) -> Instruction:
        return next(i for i in program.instructions if i.op == op)

    flops, moved = kernels.cost(program, first("linear"), [], 1)
    assert flops == 2 * 64 * 128 * 128 and moved == 2 * (64 * 128 + 128 * 128 + 64 * 128)
    flops, moved = kernels.cost(program, first("embedding"), [], 1)
    assert flops == 0 and moved == 64 * 128 * (2 + 4) + 4 * 64, "only the rows that the tokens name"
    flops, _ = kernels.cost(program, first("attention"), [32] * 4, 2)
    assert flops == 4 * 128 * (2 * 32 * 32 / 2)
    head = first("linear_cross_entropy_grad")
    assert kernels.cost(program, head, [], 1)[0] == 3 * 2 * 64 * 512 * 128
    frozen = replace(head, outputs=(*head.outputs[:2], None))
    assert kernels.cost(program, frozen, [], 1)[0] == pytest.approx(2 * 2 * 64 * 512 * 128)
    flops, moved = kernels.cost(program, first("linear_weight_grad"), [], 1)
    assert moved > 2 * 4 * 128 * 128, "the accumulator is read and written"


def test_ceilings_are_measured_by_programs(monkeypatch):
    monkeypatch.undo()
    found = ceilings.measure_ceilings("cpu", 1, seconds=0.02)
    assert found.gemm_peak > 1e9 and found.gemm_sustained > 1e9 and found.copy > 1e8


def test_copies_as_small_as_a_kernel():
    small = ceilings.measure_small_copies("cpu", LOW_CEILINGS, 1, copies=2)
    assert (small.bytes[-1], small.seconds[-1]) == (1 << 25, (1 << 25) / LOW_CEILINGS.copy)
    assert 0 < small.seconds[0] < small.seconds[2], "256 times the bytes"
    known = ceilings.SmallCopies((10.0, 20.0, 40.0), (1.0, 2.0, 6.0))
    assert [known.seconds_of(moved) for moved in (5, 10, 15, 30, 80)] == [1, 1, 1.5, 4, 12]


def test_kernels_that_training_would_run():
    chosen = kernels.chosen_kernels("cpu", "tiny")
    assert {"linear", "linear_weight_grad", "adamw", "attention"} <= set(chosen) and all(chosen.values())
