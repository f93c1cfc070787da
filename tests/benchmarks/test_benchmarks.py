"""Every benchmark runs, on a tiny model, and prints rows that the others can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train import runs

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TINY_PEERS = "tiny --device cpu --sequence-len 16 --steps 1 --warmup 1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(runs.write_model(tmp_path_factory.mktemp("benchmarks") / "model"))


def start(script: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *words], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"},  # torch, if any, without compiling
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines()]


def test_every_script_is_run_here():
    scripts = {path.name for path in FOLDER.glob("*.py")} - {"common.py", "kernels_cpu.py"}
    assert scripts == {
        "train_cpu.py", "decode_cpu.py", "ceilings_cpu.py", "rounds.py", "kernels_cuda.py", "loss_curve_cuda.py",
        "optimizer_cuda.py", "head_cuda.py", "peers_cuda.py", "serve_parts.py",
        "serve_loop.py", "serve_cpu.py", "serve_cuda.py", "serve_front.py", "decode_cuda.py", "paged_attention_cuda.py",
    }


def test_a_serving_step():
    found = rows(start("decode_cuda.py", "--model", "tiny", "--backend", "cpu", "--sequences", "2", "--position", "20",
                       "--context", "64", "--kernels"))
    assert {"linear", "paged_attention", "rope_kv_write"} <= {row.get("op") for row in found}


def test_paged_attention_alone():
    words = ("--backend", "cpu", "--shape", "4x2x64", "--position", "40")
    lone = rows(start("paged_attention_cuda.py", *words, "--sequences", "1", "--sequences", "2", "--window", "16"))
    assert [row["sequences"] for row in lone] == [1, 2] and all(row["us"] > 0 for row in lone)
    kernels = [word for name in (lone[0]["kernel"],) * 2 for word in ("--kernel", name)]
    both = rows(start("paged_attention_cuda.py", *words, "--sequences", "0", "--prompt", "8", *kernels))
    assert [row["kernel"] for row in both] == [lone[0]["kernel"]] * 2 and "tflops" in both[0]


def test_a_server_under_load():
    first, *turns = rows(start("serve_cpu.py", "--prompt", "32", "--new", "4", "--clients", "1", "--rounds", "1"))
    assert first["metrics"]["output_tokens"] == 4 * first["metrics"]["requests"]
    assert [turn["metrics"]["more"] for turn in turns] == [8, 16, 32]
    assert all(turn["metrics"]["again_ms"] > 0 for turn in turns)


def test_a_server_of_a_gguf():
    made, first, *_ = rows(start("serve_cuda.py", "tiny", "--backend", "cpu", "--format", "q8_0", "--prompt", "16", "--new", "4",
                                 "--clients", "1", "--repetitions", "1"))
    assert made["made"].endswith("tiny-q8_0.gguf") and first["metrics"]["prefill_tokens_per_second"] > 0


def test_the_front_of_a_server():
    found = rows(start("serve_front.py", "--routes", "/v1/completions", "--streams", "2", "--prompts", "16", "--events", "4",
                       "--repetitions", "1", "--paces", "5", "--seconds", "0.3"))
    assert [row.get("prompt") for row in found] == [512, 16, None] and found[0]["metrics"]["event_us"] > 0
    paced = found[2]["metrics"]
    assert found[2]["pace_ms"] == 5 and 100 < paced["tokens_per_second"] <= 440 and 0 < paced["added_ms"]["p50"] < 1000


def test_training(model):
    found = rows(start("train_cpu.py", "--model", model, "--seq", "16", "--batch", "2", "--reps", "2", "--rank", "4"))
    assert [row["bench"] for row in found] == ["train-lora"] * 2
    first, second = (row["metrics"] for row in found)
    assert second["loss"] < first["loss"]
    assert first["train_tok_s"] > 0 and first["share"] > 0 and first["peak_rss_mib"] < 1024


def test_training_profile_accounts_for_every_kernel(model):
    output = start("train_cpu.py", "--model", model, "--seq", "16", "--batch", "2", "--reps", "0", "--profile")
    for op in ("linear ", "linear_cross_entropy_grad", "attention_grad", "linear_weight_grad"):
        assert op in output
    assert "GFLOP/s" in output


def test_decoding(model):
    found = rows(start("decode_cpu.py", "--model", model, "--prompt", "20", "--new", "4", "--batch", "2", "--reps", "1"))
    assert found[0]["bench"] == "decode" and found[0]["batch"] == 2
    assert found[0]["metrics"]["decode_tok_s"] > 0 and found[0]["metrics"]["prompt_tok_s"] > 0


def test_decoding_beside_a_neighbour(model):
    found = rows(start("decode_cpu.py", "--model", model, "--prompt", "8", "--new", "4", "--reps", "1", "--neighbour"))
    assert [row["bench"] for row in found] == ["decode", "decode-beside-one-busy-process", "decode-kept-beside-a-neighbour"]
    assert found[-1]["metrics"]["ratio"] > 0


def test_decoding_profile(model):
    output = start("decode_cpu.py", "--model", model, "--prompt", "8", "--new", "4", "--profile")
    assert "paged_attention" in output


def test_parts_of_serving():
    (row,) = rows(start("serve_parts.py", "--reps", "1"))
    assert row["bench"] == "serve-parts"
    assert all(0 < nanoseconds < 10_000 for nanoseconds in row["metrics"].values())


def test_the_serving_loop():
    found = rows(start("serve_loop.py", "--steps", "50", "--places", "1", "8"))
    assert [row["sequences"] for row in found] == [1, 8]
    assert all(0 < row["metrics"]["total"] < 10_000 for row in found)


def test_ceilings():
    (row,) = rows(start("ceilings_cpu.py", "--tokens", "32", "--reps", "1", "--mib", "1"))
    assert all(value > 0 for value in row["metrics"].values())


def test_kernels_alone():
    """On the CPU, which has a kernel for each of these calls too."""
    found = rows(start("kernels_cuda.py", "--backend", "cpu", "--model", "tiny", "--tokens", "64", "--sequence-len", "32",
                       "--parameters", "4096", "--copies", "2", "--op", "dropout", "--op", "adamw", "--op", "attention_grad"))
    assert [row["bench"] for row in found] == ["ceilings", "copies"] + ["kernel"] * 5
    assert all(row["us"] > 0 and row["kernel"] and row["of_equal_copy"] > 0 for row in found[2:])
    assert {row["op"] for row in found[2:] if "tflops" in row} == {"attention_grad"}
    assert all(microseconds > 0 for microseconds in found[1]["us"].values())


def test_loss_curve_beside_torch(tmp_path):
    pytest.importorskip("transformers", reason="the other curves are of torch: pip install 'surogate-core[test]'")
    curves = tmp_path / "curves.json"
    words = ("--device cpu --steps 4 --compared 2 --sequence-len 32 --sequences 4 --micro-batch 2 --layers 2 --hidden 32 "
             "--intermediate 64 --heads 2 --kv-heads 1")
    found = rows(start("loss_curve_cuda.py", *words.split(), "--curves", str(curves)))
    verdicts = {row["run"]: row for row in found if row["bench"] == "loss-curve-verdict"}
    assert verdicts.keys() == {"ours-bf16", "ours-pure-bf16"}
    differences = {row["run"]: row["largest_difference"] for row in found if row["bench"] == "loss-curve"}
    assert len(differences) == 6 and all(value < 0.01 for value in differences.values())
    bits = {row["way"]: row for row in found if row["bench"] == "loss-curve-bits"}
    assert len(bits) == 5 and all(row["equal"] for row in bits.values())
    assert bits["recomputed"]["saved_bytes"][1] < bits["recomputed"]["saved_bytes"][0]
    assert bits["resumed"]["first_step"] == 2
    assert all(len(losses) == 4 for losses in json.loads(curves.read_text()).values())


def test_update_of_many_parameters():
    words = "--backend cpu --parameters 100003 --piece 30000 --rounds 2"
    (row,) = rows(start("optimizer_cuda.py", *words.split()))
    assert row["bytes"] == 20 * 100003 and row["norm"] == pytest.approx(1e-4 * 100003**0.5, rel=0.02)
    assert row["parts"].keys() == {"global_norm", "adamw"} and all(part["ms"] > 0 for part in row["parts"].values())


def test_head_beside_torch():
    pytest.importorskip("torch", reason="the other head is torch's: pip install 'surogate-core[test]'")
    found = rows(start("head_cuda.py", "--backend", "cpu", "--tokens", "32", "--vocabulary", "300", "--features", "64",
                       "--rounds", "1", "--torch", "--chunk", "24"))
    heads = [row for row in found if row["bench"] == "head"]
    assert [(row["whose"], row["weight_gradient"]) for row in heads] == [
        ("ours", True), ("torch", True), ("ours", False), ("torch", False)]
    assert all(row["ms"] > 0 and 5.5 < row["loss"] < 7.5 for row in heads)


@pytest.mark.parametrize("kind", [(), ("--full", "--apart")])
def test_peers_take_turns(kind):
    pytest.importorskip("peft", reason="a peer is transformers with PEFT: pip install 'surogate-core[test]'")
    words = "--rounds 2 --peer compile --peer unsloth --set threads=1"
    found = rows(start("peers_cuda.py", *TINY_PEERS.split(), *words.split(), *kind))
    assert [row["contender"] for row in found if row["bench"] == "peers-turn"] == ["ours", "compile", "compile", "ours"]
    assert {row["bench"] for row in found} == {"peers-absent", "peers-ready", "peers-turn", "peers"}
    assert found[-1]["rounds"] == {"ours": 2, "compile": 2} and found[-1]["ours_over"]["compile"] > 0


def test_a_contender_that_fails_leaves_the_others_their_turns():
    words = "--rounds 1 --peer unsloth --set no_such_key=1"
    found = rows(start("peers_cuda.py", *TINY_PEERS.split(), *words.split()))
    assert "no_such_key" in found[-1]["failed"]["ours"] and found[-1]["rounds"] == {"ours": 0}


def test_rounds_take_medians_of_rows_that_had_their_cores(tmp_path):
    script = tmp_path / "rows.py"
    script.write_text(
        "for share, speed in ((0.9, 1.0), (1.0, 3.0), (0.5, 100.0), (0.95, 5.0)):\n"
        "    print('{\"bench\": \"b\", \"metrics\": {\"share\": %f, \"speed\": %f}}' % (share, speed))\n"
    )
    (row,) = rows(start("rounds.py", "--rounds", "2", f"{sys.executable} {script}"))
    assert (row["rows"], row["kept"], row["median"]["speed"]) == (8, 6, 3.0)
