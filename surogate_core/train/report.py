"""What a run shows: a banner before the first step, a line for each step, a plot at the end."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from ..engine import Session
from ..errors import TrainingError
from ..files import replacing
from ..program import Program
from .machine import describe_machine
from .prepare import Prepared
from .session import TrainSession

PLOT_FILE = "loss.png"


def mib(size: float) -> str:
    """With a decimal where whole numbers would hide what there is."""
    return f"{size / 2**20:,.0f} MiB" if size >= 10 << 20 or size == 0 else f"{size / 2**20:.2f} MiB"


def banner(prepared: Prepared, session: TrainSession, resumed: int) -> str:
    """Versions, model, batch, data and memory."""
    from .. import __version__

    config, loader, plan = prepared.config, prepared.loader, prepared.plan
    trained = sum(p.size for p in session.layout.parameters.values())
    total = sum(math.prod(v.shape) for _, v, _ in plan.graph.instances())
    memory = session.session.memory()
    mean = loader.dataset.num_targets / max(1, int(loader.dataset.offsets[-1]))
    lines = [
        f"surogate {__version__} · {prepared.model.family.name} · recipe {prepared.recipe.name}",
        f"backend   {describe_machine(config, session.session.threads, prepared.backend_reason)}",
        f"trained   {trained:,} of {total:,} parameters ({trained / total:.2%})" + _lora_line(prepared),
        f"data      {len(loader.dataset):,} documents, {int(loader.dataset.offsets[-1]):,} tokens, {mean:.0%} carry loss; "
        f"packed {loader.packing_efficiency:.0%} full",
        f"batch     {config.per_device_train_batch_size} x {config.gradient_accumulation_steps} accumulation = "
        f"{config.effective_batch_size} sequences of {config.sequence_len} tokens",
        f"steps     {prepared.total_steps} ({loader.steps_per_epoch} an epoch)" + (f", from step {resumed}" if resumed else ""),
        f"memory    {memory_line(memory)}; saved activations {mib(plan.saved_bytes[1])}"
        + (f" of {mib(plan.saved_bytes[0])}, the rest is recomputed" if plan.saved_bytes[1] < plan.saved_bytes[0] else ""),
    ]
    return "\n".join(lines)


def _lora_line(prepared: Prepared) -> str:
    spec = prepared.adapter
    return "" if spec is None else f"; LoRA rank {spec.rank}, scale {spec.scale:g}"


def memory_line(memory: dict[str, Any]) -> str:
    parts = [f"{name} {mib(size)}" for name, size in memory["arenas"].items()]
    parts += [f"workspace {mib(memory['workspace'])}", f"weights {mib(sum(memory['external'].values()))}"]
    total = sum(memory["arenas"].values()) + memory["workspace"] + sum(memory["external"].values())
    return f"{mib(total)}: {', '.join(parts)}"


class Progress:
    """Prints one line for every ``logging_steps``-th record: loss, learning rate, useful tokens/s, memory, time left."""

    def __init__(self, prepared: Prepared, console: Any) -> None:
        self.console, self.every, self.total = console, prepared.config.logging_steps, prepared.total_steps
        self._times: list[float] = [time.perf_counter()]

    def __call__(self, record: dict[str, Any]) -> None:
        if "note" in record or "skipped" in record:
            note = record.get("note") or f"no token carries loss in a batch of {', '.join(record['skipped'][:4])}: skipped"
            self.console.print(f"step {record['step']}: {note}", style="yellow")
            return
        self._times = [*self._times[-20:], time.perf_counter()]
        if record["step"] % self.every and record["step"] != self.total and "eval_loss" not in record:
            return
        seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        line = (
            f"step {record['step']:>{len(str(self.total))}}/{self.total}  loss {record['loss']:.4f}  "
            f"norm {record['grad_norm']:.3f}  lr {record['learning_rate']:.2e}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"{resident_mib():,.0f} MiB  left {_clock(seconds * (self.total - record['step']))}"
        )
        for name, loss in record.get("eval_loss", {}).items():
            line += f"  {name} {loss:.4f}"
        self.console.print(line)


def resident_mib() -> float:
    """Resident memory of this process, MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plot_losses(history: list[dict[str, Any]], folder: Path, title: str) -> Path:
    """loss.png: training loss by step, and each evaluation loss."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([r["step"] for r in history], [r["loss"] for r in history], label="training", linewidth=1.2)
    for name in sorted({n for r in history for n in r.get("eval_loss", {})}):
        points = [(r["step"], r["eval_loss"][name]) for r in history if name in r.get("eval_loss", {})]
        axes.plot(*zip(*points), marker="o", markersize=3, label=name)
    axes.set(xlabel="step", ylabel="loss per target token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / PLOT_FILE
    with replacing(path, TrainingError) as file:
        figure.savefig(file, format="png", dpi=120)
    return path


def slow_products(program: Program, session: Session) -> list[str]:
    """A line where products were meant for cuBLASLt, and it has no algorithm for them: a plain kernel runs these."""
    refused = [
        instruction for instruction, row in zip(program.instructions, session.explain(), strict=True)
        if row["op"].startswith("linear") and row["kernel"] == "cublaslt" and not row["tuning"]
    ]
    if not refused:
        return []
    operands = " ".join(
        "-" if name is None else f"{t.dtype}{list(t.shape)}"
        for name in refused[0].inputs for t in [None if name is None else program.tensor(name)]
    )
    return [f"{len(refused)} products run in a plain, slow kernel: cuBLASLt has no algorithm for operands such as {operands}"]
