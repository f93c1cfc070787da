"""Loss on held-out data, with the weights that are being trained: nothing is copied."""

from __future__ import annotations

from ..engine import Session
from ..model import loss_program
from .prepare import Prepared
from .session import TrainSession, write_batch


class Evaluator:
    """Runs the forward-only program; planned at first use."""

    def __init__(self, prepared: Prepared, session: TrainSession) -> None:
        self.prepared, self.train = prepared, session
        self._session: Session | None = None

    def losses(self) -> dict[str, float]:
        """Mean loss per target token of each evaluation set, whatever the packing."""
        return {name: self._loss(loader) for name, loader in self.prepared.evaluations.items()}

    def _loss(self, loader) -> float:
        session = self._session = self._session or self._open()
        steps = list(loader.epoch())
        total = sum(step.weight_sum for step in steps)
        if total == 0:
            return float("nan")
        loss = 0.0
        for step in steps:
            session.run("begin")
            for batch in step.micro_batches:
                write_batch(session, batch)
                session.run("forward")
            loss += float(session.read("loss")[0]) * step.weight_sum / total
        return loss

    def _open(self) -> Session:
        p = self.prepared
        for name in (*self.train.layout.parameters, *self.train.layout.joined):
            dtype, memory = self.train.compute_tensor(name)
            p.weights.adopt(name, dtype, memory)
        graph, program = loss_program(
            p.model, p.recipe, p.weights, p.plan.bindings, max_positions=p.config.sequence_len, adapter=p.adapter,
            join_projections=p.plan.joins_projections, widened=p.plan.widened,
        )
        return p.weights.open_session(graph, program, p.threads, self.train.graphs)
