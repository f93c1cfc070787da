"""`surogate bench train`: whole training steps, and what they are made of, as one mapping for JSON."""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, engine
from ..data.loader import Step
from ..errors import TrainingError
from ..train.prepare import Prepared
from .ceilings import Ceilings, measure_ceilings, wall_seconds
from .flops import ModelCost
from .workload import Workload, open_workload


def bench_train(name: str, prepared: Prepared, warmup: int, steps: int) -> dict[str, Any]:
    """Opens a run and trains ``warmup`` + ``steps`` steps. The ceilings come first, while all memory is free."""
    backend, device = prepared.config.backend, prepared.config.device
    before = _device_bytes(backend, device)
    ceilings = measure_ceilings(backend, prepared.threads, device=device)
    started = time.perf_counter()
    workload = open_workload(name, prepared)
    opened = time.perf_counter() - started
    course = _train(workload, warmup, steps)
    after = _device_bytes(backend, device)
    parts = _parts(workload)
    return {
        "bench": "train",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **_facts(workload, backend, device),
        "steps": {"warmup": warmup, "measured": steps},
        **_rates(workload, course, ceilings, warmup),
        "seconds": {"open": round(opened, 3), "first_step": round(course["seconds"][0], 4), **parts["seconds"]},
        "idle_share": _idle(course, parts, len(workload.prepared.loader.next_step()), warmup),
        "memory": _memory(workload, before, after),
        "loss": {"first": course["losses"][0], "last": course["losses"][-1]},
        "grad_norm": course["norm"],
        "ceilings": asdict(ceilings),
        "kernels_run_one_by_one": parts["not_recorded"],
    }


def _train(workload: Workload, warmup: int, steps: int) -> dict[str, Any]:
    """As the trainer does: the next step's data is drawn while the device works on this one. wall: of the measured steps."""
    session, loader = workload.session, workload.prepared.loader
    seconds, losses, lengths, padded = [], [], [], 0
    step, norm, measured_from = loader.next_step(), 0.0, 0.0
    for index in range(warmup + steps):
        started = time.perf_counter()
        if index == warmup:
            measured_from = started
        session.start(step, index, workload.prepared.schedule.rate(index))
        following = loader.next_step()
        loss, norm = session.loss(), session.grad_norm()
        ended = time.perf_counter()
        seconds.append(ended - started)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(f"step {index + 1} has loss {loss} and gradient norm {norm}: there is nothing to measure")
        losses.append(loss)
        if index >= warmup:
            lengths += document_lengths(step)
            padded += len(step) * loader.num_tokens
        step = following
    return {"seconds": seconds, "losses": losses, "norm": norm, "lengths": lengths, "padded": padded,
            "wall": time.perf_counter() - measured_from}


def document_lengths(step: Step) -> list[int]:
    """Of the documents of a step, padding left out: a range without any target holds none."""
    lengths = []
    for batch in step:
        edges = np.unique(batch.doc_starts)
        lengths += [int(b - a) for a, b in zip(edges[:-1], edges[1:]) if (batch.targets[a:b] >= 0).any()]
    return lengths


def _rates(workload: Workload, course: dict[str, Any], ceilings: Ceilings, warmup: int) -> dict[str, Any]:
    cost = ModelCost.of(workload.prepared.model, workload.prepared.config.sequence_len)
    useful = sum(course["lengths"])
    flops = cost.flops(workload.full, course["lengths"])
    rate = flops / course["wall"]
    median = statistics.median(course["seconds"][warmup:])
    return {
        "tokens_per_second": round(useful / course["wall"], 1),
        "padded_tokens_per_second": round(course["padded"] / course["wall"], 1),
        "step_seconds": {"median": round(median, 6), "mean": round(course["wall"] / len(course["seconds"][warmup:]), 6)},
        "model_flops_per_token": flops / useful,
        "adapter_flops_per_token": _adapter_flops(workload),
        "model_flops_per_second": rate,
        "model_flops_share_of_gemm_peak": round(rate / ceilings.gemm_peak, 4),
        "model_flops_share_of_sustained_gemm": round(rate / ceilings.gemm_sustained, 4),
    }


def _adapter_flops(workload: Workload) -> float:
    """Not among the model's: what adapters add for a token, both their products and the three gradients' parts of them."""
    if workload.full:
        return 0.0
    return 6.0 * sum(p.size for p in workload.session.layout.parameters.values() if len(p.shape) == 2)


def _parts(workload: Workload) -> dict[str, Any]:
    """Seconds of each entry alone, whole and as the sum of its kernels. The rate is 0, so parameters stay as they are."""
    session = workload.session.session
    session.write("hyper", np.array([0.0, 1.0, 0.0, 0.0], np.float32))
    seconds, busy = {}, {}
    for entry in ("begin", "micro_step", "update"):
        def run(entry: str = entry) -> None:
            session.run(entry)

        run()
        once = wall_seconds(run, session.synchronize, 1)
        repeats = max(1, min(20, int(1.0 / max(once, 1e-6))))
        seconds[entry] = wall_seconds(run, session.synchronize, repeats) / repeats
        busy[entry] = min(sum(s for _, _, s in session.profile(entry)) for _ in range(2))
    reasons = {entry: session.why_not_recorded(entry) for entry in ("begin", "micro_step", "update")}
    return {
        "seconds": {**{k: round(v, 6) for k, v in seconds.items()},
                    "kernels": {k: round(v, 6) for k, v in busy.items()}},
        "not_recorded": {entry: reason for entry, reason in reasons.items() if reason},
    }


def _idle(course: dict[str, Any], parts: dict[str, Any], accumulation: int, warmup: int) -> float:
    """Share of a step in which no kernel ran: the median step less the sum of its kernels, each timed alone."""
    kernels = parts["seconds"]["kernels"]
    busy = kernels["begin"] + accumulation * kernels["micro_step"] + kernels["update"]
    return round(max(0.0, 1.0 - busy / statistics.median(course["seconds"][warmup:])), 4)


def _memory(workload: Workload, before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, Any]:
    """Bytes: what the program holds by part, and what the device (the process, on the CPU) says."""
    planned = workload.session.session.memory()
    parts = {
        "arenas": planned["arenas"], "workspace": planned["workspace"], "weights": sum(planned["external"].values()),
        "saved_activations": workload.prepared.plan.saved_bytes[1],
        "saved_activations_without_recompute": workload.prepared.plan.saved_bytes[0],
    }
    parts["program"] = sum(planned["arenas"].values()) + parts["workspace"] + parts["weights"]
    if before is None or after is None:
        return {**parts, "peak_of_process": peak_of_process()}
    used = before["free_bytes"] - after["free_bytes"]
    return {**parts, "taken_of_device": used, "used_on_device": after["total_bytes"] - after["free_bytes"]}


def peak_of_process() -> int:
    """Bytes that this process held at most."""
    line = next(line for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if "VmHWM" in line)
    return int(line.split()[1]) << 10


def _device_bytes(backend: str, device: int) -> dict[str, int] | None:
    return None if backend == "cpu" else engine.device_info(backend, device)


def _facts(workload: Workload, backend: str, device: int) -> dict[str, Any]:
    """What the figures hold for: machine, versions, seeds, settings."""
    config, prepared = workload.prepared.config, workload.prepared
    return {
        "version": __version__, "backend": backend, "device": describe_device(backend, device),
        "versions": versions(backend, device), "seed": config.seed, "model": workload.name,
        "method": "full" if workload.full else f"lora r{prepared.adapter.rank}",
        "trained_parameters": sum(p.size for p in workload.session.layout.parameters.values()),
        "settings": {
            "sequence_len": config.sequence_len, "batch": config.per_device_train_batch_size,
            "accumulation": config.gradient_accumulation_steps, "recipe": config.recipe, "optimizer": repr(prepared.optimizer),
            "master_dtype": config.master_dtype, "optimizer_state_dtype": config.optimizer_state_dtype,
            "graphs": config.cuda_graphs, "deterministic": config.deterministic,
            "memory_budget": prepared.budget, "recomputed": prepared.plan.saved_bytes[1] < prepared.plan.saved_bytes[0],
            "passes": prepared.plan.graph.history, "threads": workload.session.session.threads,
        },
    }


def describe_device(backend: str, device: int = 0) -> dict[str, Any]:
    """Name, size and number of units; of the CPU its model and cores."""
    if backend != "cpu":
        info = engine.device_info(backend, device)
        return {key: info[key] for key in ("name", "total_bytes", "num_units", "architecture")}
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"name": names[0] if names else platform.machine(), "num_units": engine.default_threads()}


def versions(backend: str, device: int = 0) -> dict[str, str]:
    """Of everything that a figure may depend on."""
    found = {"python": platform.python_version(), "numpy": np.__version__}
    if backend == "cuda":
        from ..engine import cuda

        found |= {"driver": cuda.kernel_module() or "unknown", **cuda.library_versions()}
    if backend != "cpu":
        found["backend"] = engine.device_info(backend, device)["versions"]
    return found
