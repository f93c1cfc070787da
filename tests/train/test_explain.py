"""explain and --dry-run: memory by part, and why each fast path is on or off."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from surogate_core import engine
from surogate_core.train import explain as explaining
from surogate_core.train.prepare import prepare
from surogate_core.train.report import slow_products
from surogate_core.train.run import explain

from . import runs


def paths(root, **changes) -> dict[str, tuple[bool, str]]:
    prepared = prepare(runs.config(root, **changes), "sft")
    planned = engine.plan(prepared.plan.program.to_bytes(), "cpu", prepared.threads)
    return {name: (on, why) for name, on, why in explaining.fast_paths(prepared, planned)}


def test_memory_by_part_adds_up(root):
    text = explain(runs.config(root, per_device_train_batch_size=4), "sft", dry_run=True)
    parts = ("trained weights", "gradients", "activations", "optimizer states", "inputs", "kernel workspace", "frozen weights")
    for part in (*parts, "peak of the program", "of it logits", "of it saved activations", "budget", "checkpoint on disk"):
        assert part in text, part
    sizes = {line[2:26].strip(): float(line[26:].split(" MiB")[0].replace(",", "")) for line in text.splitlines()
             if " MiB" in line and line.startswith("  ") and "  o" not in line[:4]}
    held = sum(v for k, v in sizes.items() if k in parts)
    assert held == pytest.approx(sizes["peak of the program"], abs=0.05) and held > 0.5


def test_a_dry_run_neither_trains_nor_writes(root):
    text = explain(runs.config(root), "sft", dry_run=True)
    assert "fast paths" in text and "layer bodies" not in text
    assert not (root / "out").exists()


def test_explain_shows_kernels_and_bodies(root):
    text = explain(runs.config(root), "sft", dry_run=False)
    assert "full x 2, forward" in text and "full, backward" in text
    assert "passes     trace -> lora -> autodiff -> fuse -> precision(fp32) -> dead_code" in text
    assert "rms_norm_grad " in text


def test_all_on(root):
    found = paths(root)
    for name in ("loss with its gradient in one sweep", "sums inside products", "nothing recomputed", "packing",
                 "weights read in place"):
        assert found[name][0], (name, found[name])


def test_packing_off(root):
    assert paths(root, sample_packing=False)["packing"] == (False, "sample_packing is false")


def test_recomputation_on(root):
    plan = prepare(runs.config(root), "sft").plan
    found = paths(root, memory_budget=plan.resident_bytes - plan.saved_bytes[0] // 4)
    assert found["nothing recomputed"] == (False, "memory_budget is smaller than what would be saved")
    assert "without recomputation" in explain(
        runs.config(root, memory_budget=plan.resident_bytes - plan.saved_bytes[0] // 4), "sft", dry_run=True)


def test_f32_weights_copied(root):
    runs.write_model(root / "wide", dtype="f32")
    on, why = paths(root, model=str(root / "wide"), recipe="bf16")["weights read in place"]
    assert not on and why == "15 f32 matrices are copied as bf16"
    assert paths(root, model=str(root / "wide"))["weights read in place"][0]


def test_all_weights_trained(root):
    on, why = paths(root, lora=False)["weights read in place"]
    assert not on and "masters are kept in fp32" in why


def test_kernels_on_and_off_with_the_reason(root):
    found = {name: entry for name, entry in paths(root, recipe="bf16").items() if name.endswith(" kernels")}
    used = {i["kernel"] for i in engine.plan(
        prepare(runs.config(root, recipe="bf16"), "sft").plan.program.to_bytes(), "cpu", 1)["instructions"]}
    assert used and {name.removesuffix(" kernels") for name, (on, _) in found.items() if on} == used
    assert any(not on for on, _ in found.values())
    for name, (on, why) in found.items():
        assert "instructions" in why if on else why, name


def test_a_processor_that_lacks_something_is_named(root, monkeypatch):
    prepared = prepare(runs.config(root), "sft")
    planned = engine.plan(prepared.plan.program.to_bytes(), "cpu", 1)
    for instruction in planned["instructions"]:
        instruction |= {"kernel": "avx2", "candidates": [("avx2", "cpu", 1)]}
    kinds = [{"name": name, "backend": "cpu"} for name in ("avx2", "avx512", "avx512bf16", "amx")]
    kinds.append({"name": "cudnn", "backend": "cuda"})
    features = {"avx2": True, "avx512f": True, "avx512bf16": False, "amxbf16": False}
    monkeypatch.setattr(engine, "kernels", lambda: kinds)
    monkeypatch.setattr(engine, "cpu_features", lambda: features)
    found = {name: (on, why) for name, on, why in explaining.fast_paths(prepared, planned)}
    assert found["avx2 kernels"] == (True, f"{len(planned['instructions'])} instructions")
    assert found["avx512bf16 kernels"] == (False, "this processor lacks avx512bf16")
    assert found["amx kernels"] == (False, "this processor lacks amxbf16")
    assert "cudnn kernels" not in found, "of another backend"


def test_a_kernel_that_another_outranks_is_told_from_one_that_has_no_call(root):
    found = paths(root)
    assert {why for name, (on, why) in found.items() if not on and name.endswith("kernels")} <= {
        "faster kernels take all these calls", "they take none of this program's calls",
        *(why for _, (_, why) in found.items() if why.startswith("this processor lacks"))}
    assert found["avx2 kernels"][1] == "faster kernels take all these calls" or found["avx2 kernels"][0]


def test_a_name_that_two_ops_have_may_be_outranked_in_one(root, monkeypatch):
    monkeypatch.setattr(engine, "kernels", lambda: [{"name": name, "backend": "cuda"} for name in ("tiles", "cudnn", "flash")])
    prepared = prepare(runs.config(root), "sft")
    prepared = dataclasses.replace(prepared, config=prepared.config.model_copy(update={"backend": "cuda"}))
    candidates = {"low_rank_grad": ["tiles"], "attention_grad": ["cudnn", "tiles", "flash"]}
    planned = {"instructions": [
        {"op": op, "kernel": names[0], "candidates": [(name, "cuda", 9 - n) for n, name in enumerate(names)]}
        for op, names in candidates.items()
    ]}
    found = {name: (on, why) for name, on, why in explaining.fast_paths(prepared, planned)}
    assert found["tiles kernels"] == (True, "1 instructions; faster kernels take attention_grad")
    assert found["cudnn kernels"] == (True, "1 instructions")
    assert found["flash kernels"] == (False, "faster kernels take all these calls")


def test_products_that_the_library_refuses_are_told(root):
    program = prepare(runs.config(root), "sft").plan.program
    rows = [{"op": i.op, "kernel": "cublaslt", "tuning": "an algorithm"} for i in program.instructions]
    assert slow_products(program, SimpleNamespace(explain=lambda: rows)) == []
    first = next(n for n, i in enumerate(program.instructions) if i.op == "linear")
    others = [n for n, i in enumerate(program.instructions) if not i.op.startswith("linear")]
    for n in (first, *others):
        rows[n]["tuning"] = ""
    (line,) = slow_products(program, SimpleNamespace(explain=lambda: rows))
    weight = program.tensor(program.instructions[first].inputs[1])
    assert line.startswith("1 products run in a plain, slow kernel") and f"{weight.dtype}{list(weight.shape)}" in line
