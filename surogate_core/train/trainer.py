"""The training loop: steps, evaluations, checkpoints, and what happens when something goes wrong."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..data.loader import Step
from ..errors import TrainingError
from . import checkpoint as checkpoints
from .evaluation import Evaluator
from .prepare import Prepared
from .session import TrainSession
from .trackers import JsonLines

Status = Literal["completed", "interrupted"]
METRICS_FILE = "metrics.jsonl"


@dataclass
class RunResult:
    """What a run gives back. ``history``: the records of metrics.jsonl of this process; ``evaluation``: the last losses on
    evaluation sets."""

    status: Status
    output_dir: Path
    steps: int
    history: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Runs a prepared training. ``report`` is called with every record of metrics.jsonl, and with notes.

    The batches of the next step are drawn while the device works on this one. Checkpoints hold the place in the data before
    what was drawn ahead."""

    def __init__(self, prepared: Prepared, session: TrainSession, report: Callable[[dict[str, Any]], None]) -> None:
        self.prepared, self.session, self.report = prepared, session, report
        self.config = prepared.config
        self.folder = Path(self.config.output_dir)
        self.step = 0
        self.tokens_seen = 0
        self.evaluator = Evaluator(prepared, session)
        self.trackers = [(name, prepared.manager.trackers[name]) for name in self.config.report_to]
        self._stop = False
        self._ahead: tuple[dict[str, Any], Step] | None = None
        """The loader's place before the step that was drawn ahead, and that step."""

    def resume(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Goes on from a checkpoint. TrainingError or DataError, naming what changed, where it is of another run."""
        info = checkpoint.info
        changed = [key for key, value in self._identity().items() if info.get(key) != value]
        if changed:
            raise TrainingError(
                f"checkpoint {checkpoint.path} was written with another {' and '.join(changed)}",
                "Resume with the settings of the run that wrote it, or start a new run in another output_dir.",
            )
        checkpoints.load(checkpoint, self.session)
        self.prepared.loader.load_state_dict(info["loader"])
        self.step, self.tokens_seen = info["step"], info["tokens_seen"]

    def run(self) -> RunResult:
        """Trains to the end, or until Ctrl-C: the step under way is finished and saved."""
        total = self.prepared.total_steps
        metrics = JsonLines(self.folder / METRICS_FILE, self.step + 1)
        open_trackers = [(name, make(self.config, self.folder)) for name, make in self.trackers]
        result = RunResult("completed", self.folder, total)
        saved_at = self.step
        status = "failed"
        previous = signal.getsignal(signal.SIGINT)
        try:
            signal.signal(signal.SIGINT, self._interrupt)
        except ValueError:  # not the main thread: whoever runs us there handles Ctrl-C
            previous = None
        try:
            while self.step < total and not self._stop:
                record = self._one_step()
                if record is None:
                    continue
                if self.prepared.evaluations and (self._due(self.config.eval_interval(total)) or self.step == total):
                    record["eval_loss"] = result.evaluation = self.evaluator.losses()
                metrics.write(record)
                self._track(open_trackers, record)
                result.history.append(record)
                self.report(record)
                if self._due(self.config.save_interval(total)) and self.step < total:
                    self._save()
                    saved_at = self.step
            if self.step != saved_at:
                self._save()
            status = result.status = "interrupted" if self._stop and self.step < total else "completed"
        finally:
            metrics.close()
            self._each(open_trackers, lambda tracker: tracker.finish(status))
            if previous is not None:
                signal.signal(signal.SIGINT, previous)
        result.steps = self.step
        if result.status == "completed" and not result.history:  # the run was at its end already
            result.evaluation = self.evaluator.losses()
        return result

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._stop:  # asked twice: at once
            raise KeyboardInterrupt
        self._stop = True

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _next_step(self) -> Step:
        if self._ahead is None:
            return self.prepared.loader.next_step()
        (_, step), self._ahead = self._ahead, None
        return step

    def _draw_ahead(self) -> None:
        loader = self.prepared.loader
        self._ahead = loader.state_dict(), loader.next_step()

    def _one_step(self) -> dict[str, Any] | None:
        started = time.perf_counter()
        step = self._next_step()
        if step.num_targets == 0:
            self.report({"step": self.step, "skipped": [row for batch in step for row in batch.rows]})
            return None
        rate = self.prepared.schedule.rate(self.step)
        self.session.start(step, self.step, rate)
        if self.step + 1 < self.prepared.total_steps:
            self._draw_ahead()
        loss, norm = self.session.loss(), self.session.grad_norm()
        self._require_finite(loss, "loss", step)
        self._require_finite(norm, "gradient norm", step)
        self.step += 1
        self.tokens_seen += step.useful_tokens
        seconds = time.perf_counter() - started
        padded = len(step) * self.prepared.loader.num_tokens
        return {
            "step": self.step, "epoch": round(self.step / self.prepared.loader.steps_per_epoch, 4), "loss": loss,
            "grad_norm": norm, "learning_rate": rate, "tokens": step.useful_tokens, "targets": step.num_targets,
            "tokens_seen": self.tokens_seen, "seconds": round(seconds, 4),
            "tokens_per_second": round(step.useful_tokens / seconds, 1),
            "padded_tokens_per_second": round(padded / seconds, 1),
        }

    def _require_finite(self, value: float, what: str, step: Step) -> None:
        if math.isfinite(value):
            return
        rows = [row for batch in step for row in batch.rows]
        shown = ", ".join(rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
        kept = checkpoints.list_checkpoints(self.folder)
        raise TrainingError(
            f"the {what} of step {self.step + 1} is {value}; its batch holds {shown}",
            "Look at these rows, lower learning_rate, or use recipe: fp32. "
            + (f"The newest checkpoint is {kept[-1].path}." if kept else "No checkpoint was written yet."),
        )

    def _identity(self) -> dict[str, Any]:
        """What must be the same in every process that works on a run, beside the data and the parameters' names."""
        adapter = self.prepared.adapter
        return {
            "model": repr(self.prepared.model.hyperparameters), "seed": self.config.seed,
            "lora scale": adapter.scale if adapter else None, "lora dropout": adapter.dropout if adapter else None,
        }

    def _save(self) -> None:
        place = self.prepared.loader.state_dict() if self._ahead is None else self._ahead[0]
        info = {"loader": place, "tokens_seen": self.tokens_seen, **self._identity()}
        checkpoints.save(self.folder, self.step, self.session, info, self.config.save_total_limit)

    def _track(self, trackers: list[tuple[str, Any]], record: dict[str, Any]) -> None:
        flat = {k: v for k, v in record.items() if isinstance(v, (int, float))}
        flat |= {f"eval_loss/{k}": v for k, v in record.get("eval_loss", {}).items()}
        self._each(trackers, lambda tracker: tracker.log(record["step"], flat))

    def _each(self, trackers: list[tuple[str, Any]], call: Callable[[Any], None]) -> None:
        """A tracker that fails is dropped with one line: metrics elsewhere must not stop a run."""
        for entry in list(trackers):
            try:
                call(entry[1])
            except Exception as error:  # whatever a third party's tracker raises
                trackers.remove(entry)
                self.report({"step": self.step, "note": f"tracker {entry[0]} failed and is dropped: {error}"})
