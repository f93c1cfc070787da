"""TrainSession: a training program bound to memory, with its trained parameters readable and writable by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..data.loader import Batch, Step
from ..engine import Memory, Session
from ..model import FrozenWeights, LoadedModel, TrainPlan, initial_values
from ..program.trainable import TrainedParameter
from ..weights.quants import bf16_to_f32, f32_to_bf16

if TYPE_CHECKING:
    from .prepare import Prepared


class TrainSession:
    """Runs steps. Parameters start from the checkpoint, or from ``seed`` where the checkpoint has none."""

    def __init__(
        self, plan: TrainPlan, model: LoadedModel, weights: FrozenWeights, optimizer, seed: int,
        threads: int | None = None, graphs: bool = True,
    ) -> None:
        self.plan, self.model, self.seed, self.graphs = plan, model, seed, graphs
        self.session = weights.open_session(plan.graph, plan.program, threads, graphs)
        self.layout = plan.layout
        self.states = ("master", *(f"optimizer.{state}" for state in optimizer.states))
        self._dropout = any(t.name == "dropout_seed" for t in plan.program.tensors)
        self._initialise(weights)

    @classmethod
    def of(cls, prepared: Prepared) -> TrainSession:
        """The session of a prepared run."""
        config = prepared.config
        return cls(prepared.plan, prepared.model, prepared.weights, prepared.optimizer, config.seed, prepared.threads,
                   config.cuda_graphs)

    def _initialise(self, weights: FrozenWeights) -> None:
        declared = dict(self.model.dsl().parameters())
        from_file = self.model.store is not None
        for name, parameter in self.layout.parameters.items():
            if not (from_file and name in declared):
                self.set_parameter(name, initial_values(name, parameter.shape, declared.get(name), self.seed))
                continue
            stored = weights.stored(name, parameter.shape)
            if stored.dtype == self.dtype(f"master.{name}"):
                self.session.write(f"master.{name}", stored.data)  # as it is: nothing is converted there and back
            else:
                self.set_parameter(name, stored.to_f32())
        self.refresh()

    def refresh(self) -> None:
        """Makes all copies that products read follow the masters, after these were written from outside."""
        if any(entry.name == "refresh" for entry in self.plan.program.entries):
            self.session.run("refresh")

    def parameter(self, name: str) -> np.ndarray:
        """A copy of one trained parameter's master, float32."""
        values = self.session.read(f"master.{name}")
        return bf16_to_f32(values) if self.dtype(f"master.{name}") == "bf16" else values

    def set_parameter(self, name: str, values: np.ndarray) -> None:
        """Writes one trained parameter's master from float32, rounding to nearest; `refresh` when all are written."""
        bf16 = self.dtype(f"master.{name}") == "bf16"
        self.session.write(f"master.{name}", f32_to_bf16(np.asarray(values, np.float32)) if bf16 else values)

    def dtype(self, tensor: str) -> str:
        """What a tensor of the program is kept in."""
        return self.plan.program.tensor(tensor).dtype

    def state(self, state: str, parameter: TrainedParameter) -> np.ndarray:
        """A copy of one of `states` of a parameter, as it is kept (bf16 as uint16)."""
        flat, first = self.layout.flat(state, parameter)
        return self.session.read(flat, first, parameter.size).reshape(parameter.shape)

    def set_state(self, state: str, parameter: TrainedParameter, values: np.ndarray) -> None:
        """Writes what `state` read; `refresh` when all are written."""
        flat, first = self.layout.flat(state, parameter)
        self.session.write(flat, values.reshape(-1), first)

    def state_dtype(self, state: str, parameter: TrainedParameter) -> str:
        """What one of `states` of a parameter is kept in."""
        return self.dtype(self.layout.flat(state, parameter)[0])

    def gradient(self, name: str) -> np.ndarray:
        """A copy of what was accumulated for one trained parameter: fp32."""
        return self.session.read(f"gradients.{name}")

    def compute_tensor(self, name: str) -> tuple[str, Memory]:
        """dtype and memory that ops read parameter ``name`` from; it follows training."""
        tensor = self.layout.tensor_name(name)
        return self.dtype(tensor), self.session.share(tensor)

    def step(self, step: Step, index: int, learning_rate: float) -> tuple[float, float]:
        """One optimizer step over its micro-batches. Returns (loss per target token, gradient norm before clipping)."""
        self.start(step, index, learning_rate)
        return self.loss(), self.grad_norm()

    def start(self, step: Step, index: int, learning_rate: float) -> None:
        """Begins an optimizer step; on a device the caller is free while it runs. Gradients that are not finite leave
        parameters and optimizer as they are."""
        self._run_micro_steps(step, index)
        self._run_update(index, learning_rate)

    def accumulate(self, step: Step, index: int) -> float:
        """Gradients of a whole step; returns its loss."""
        self._run_micro_steps(step, index)
        return self.loss()

    def update(self, index: int, learning_rate: float) -> float:
        """The update with what was accumulated; returns the norm of the gradients before clipping."""
        self._run_update(index, learning_rate)
        return self.grad_norm()

    def _run_micro_steps(self, step: Step, index: int) -> None:
        self.session.run("begin")
        for number, batch in enumerate(step.micro_batches):
            write_batch(self.session, batch)
            if self._dropout:
                key = np.random.SeedSequence([self.seed, index, number]).generate_state(2, np.uint32)
                self.session.write("dropout_seed", key.view(np.int32))
            self.session.run("micro_step")

    def _run_update(self, index: int, learning_rate: float) -> None:
        self.session.write("hyper", np.array([learning_rate, index + 1, 0, 0], np.float32))
        self.session.run("update")

    def loss(self) -> float:
        """Loss per target token of the last step; waits for it."""
        return float(self.session.read("loss")[0])

    def grad_norm(self) -> float:
        """Norm of the last update's gradients before clipping; waits for it."""
        return float(self.session.read("grad_norm")[0])


def write_batch(session: Session, batch: Batch) -> None:
    """Puts a micro-batch into a program's inputs; doc_starts is padded with its last entry. ValueError when it has more
    documents than the program was planned for."""
    for name in ("tokens", "targets", "positions", "token_weights"):
        session.write(name, getattr(batch, name))
    capacity = session.shape("doc_starts")[0]
    count = int(np.searchsorted(batch.doc_starts, batch.doc_starts[-1])) + 1
    if count > capacity:
        raise ValueError(f"the batch has {count - 1} documents; the program holds {capacity - 1}")
    starts = np.full(capacity, batch.doc_starts[-1], np.int32)
    starts[:count] = batch.doc_starts[:count]
    session.write("doc_starts", starts)
