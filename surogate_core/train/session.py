"""TrainSession: a training program bound to memory, with its trained parameters readable and writable by name."""

from __future__ import annotations

import numpy as np

from ..data.loader import Batch, Step
from ..engine import Session
from ..model import FrozenWeights, LoadedModel, TrainPlan, initial_values
from ..program.trainable import TrainableLayout
from ..weights.quants import quantize


class TrainSession:
    """Runs steps. Parameters start from the checkpoint, or from ``seed`` where the checkpoint has none."""

    def __init__(
        self, plan: TrainPlan, model: LoadedModel, weights: FrozenWeights, optimizer, compute: str, seed: int,
        backend: str, threads: int | None,
    ) -> None:
        self.plan, self.model, self.seed = plan, model, seed
        self.session = weights.open_session(plan.graph, plan.program, backend, threads)
        self.layout = TrainableLayout.of(plan.graph, compute)
        self.states = ("master", *(f"optimizer.{state}" for state in optimizer.states))
        self._dropout = any(t.name == "dropout_seed" for t in plan.program.tensors)
        self._initialise(weights)

    def _initialise(self, weights: FrozenWeights) -> None:
        for state in self.states:
            self.session.tensor(state)[:] = 0
        declared = dict(self.model.dsl().parameters())
        from_file = self.model.store is not None
        for name, parameter in self.layout.parameters.items():
            target = self.session.tensor(f"master.{name}")
            if from_file and name in declared:
                target[...] = weights.stored(name, parameter.shape).to_f32()
            else:
                target[...] = initial_values(name, parameter.shape, declared.get(name), self.seed)
        self.refresh()

    def refresh(self) -> None:
        """Makes the compute copies follow the masters, after these were written from outside."""
        if self.layout.has_copy:
            self.session.tensor("trained")[:] = quantize(self.session.tensor("master"), self.layout.compute)

    def parameter(self, name: str) -> np.ndarray:
        """The fp32 master of one trained parameter; a view."""
        return self.session.tensor(f"master.{name}")

    def compute_tensor(self, name: str) -> tuple[str, np.ndarray]:
        """dtype and memory that ops read parameter ``name`` from; a view that follows training."""
        tensor = self.layout.tensor_name(name)
        return self.plan.program.tensor(tensor).dtype, self.session.tensor(tensor)

    def step(self, step: Step, index: int, learning_rate: float) -> tuple[float, float]:
        """One optimizer step over its micro-batches. Returns (loss per target token, gradient norm before clipping)."""
        loss = self.accumulate(step, index)
        norm = self.update(index, learning_rate)
        return loss, norm

    def accumulate(self, step: Step, index: int) -> float:
        """Gradients of a whole step; returns its loss."""
        run, tensor = self.session.run, self.session.tensor
        run("begin")
        for number, batch in enumerate(step.micro_batches):
            write_batch(self.session, batch)
            if self._dropout:
                key = np.random.SeedSequence([self.seed, index, number]).generate_state(2, np.uint32)
                tensor("dropout_seed")[:] = key.view(np.int32)
            run("micro_step")
        return float(tensor("loss")[0])

    def update(self, index: int, learning_rate: float) -> float:
        self.session.tensor("hyper")[:] = (learning_rate, index + 1, 0, 0)
        self.session.run("update")
        return float(self.session.tensor("grad_norm")[0])


def write_batch(session: Session, batch: Batch) -> None:
    """Puts a micro-batch into a program's inputs; doc_starts is padded with its last entry. ValueError when it has more
    documents than the program was planned for."""
    for name in ("tokens", "targets", "positions", "token_weights"):
        session.tensor(name)[:] = getattr(batch, name)
    starts = session.tensor("doc_starts")
    count = int(np.searchsorted(batch.doc_starts, batch.doc_starts[-1])) + 1
    if count > len(starts):
        raise ValueError(f"the batch has {count - 1} documents; the program holds {len(starts) - 1}")
    starts[:count] = batch.doc_starts[:count]
    starts[count:] = batch.doc_starts[-1]
