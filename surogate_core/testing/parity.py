"""Family parity: a random tiny model of `transformers`, the same files opened here, and everything compared.

A family takes part by declaring `tiny_configs`. Each method of `Parity` runs one comparison and returns figures that a test
bounds; tests/parity/test_families.py does so for every variant of every installed family:

    parity = Parity.make(family, family.tiny_configs()["gqa"], tmp_path)
    assert parity.logits_error() < 1e-4

torch and transformers are asked of pytest, so a test that cannot have them is skipped with the reason printed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.loader import IGNORED, Batch, Step
from ..dsl import Family
from ..generate import Decoder
from ..ir.graph import BUFFER
from ..model import FrozenWeights, LoadedModel, loss_program, training_program
from ..passes import LoraSpec
from ..passes.precision import RECIPES
from ..plugins import get_manager
from ..train.optimizers import AdamW
from ..train.session import TrainSession
from ..weights.export import write_hf
from ..weights.safetensors_file import open_folder
from ..weights.tensor import from_f32

DOCUMENT_LENGTHS = (13, 1, 24, 6)
"""Documents of the packed batch: one longer than any tiny window, one of a single token."""
PADDING = 4
"""Tokens of the batch that belong to no document."""
_WHY = "family parity compares with transformers: pip install 'surogate-core[test]'"


def _need(module: str) -> Any:
    import pytest

    return pytest.importorskip(module, reason=_WHY)


def installed_family(name: str) -> Family:
    """The family that a plugin registered under ``name``, with the kernels of plugins loaded."""
    manager = get_manager()
    manager.load_kernels()
    return manager.families[name]


def random_reference(config: Mapping[str, Any], seed: int = 0) -> Any:
    """A float32 model of transformers in which all that files hold is random, norms and biases too, activations are O(1),
    and text varies."""
    torch, transformers = _need("torch"), _need("transformers")
    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        _need("pytest").skip(f"transformers {transformers.__version__} has no model_type {config['model_type']!r}")
    made = transformers.AutoConfig.for_model(config["model_type"], **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32)
        held = model.state_dict()
        for parameter in (*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name in held)):
            if parameter.ndim == 1:  # around what it starts at: ones for most norms, zeros for biases and for norms of 1 + w
                parameter.data.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.data.normal_(0, 1.0).mul_(1.5 * parameter.shape[1] ** -0.5)
        if made.tie_word_embeddings:
            _let_text_vary(model)
    # Random weights mean nothing by their end token: generation is to go on to its limit.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _let_text_vary(model: Any) -> None:
    """Under a tied head, a token's embedding in the residual stream is a vote for that token again. Where a model multiplies its
    embeddings, the vote outweighs random layers, and greedy text would be one token for ever. Random signs in the norm before
    the head make of it a vote for some other token, and leave the size of everything as it was."""
    torch = _need("torch")
    with torch.no_grad():
        enters = model(torch.arange(8)[None], output_hidden_states=True).hidden_states[0][0]
        if not torch.equal(enters, model.get_input_embeddings().weight[:8]):
            norm = model.base_model.norm
            factors = norm(torch.ones_like(norm.weight))  # the weight, or 1 + the weight
            norm.weight -= 2 * torch.randint(2, factors.shape) * factors


def packed_batch(vocab_size: int, seed: int = 0) -> Batch:
    """Random documents end to end, some of their targets unsupervised, and padding in a range of its own."""
    generator = np.random.default_rng(seed)
    total = sum(DOCUMENT_LENGTHS) + PADDING
    tokens = generator.integers(0, vocab_size, total).astype(np.int32)
    targets = np.full(total, IGNORED, np.int32)
    starts = np.cumsum([0, *DOCUMENT_LENGTHS, PADDING]).astype(np.int32)
    for first, end in zip(starts[:-2], starts[1:-1]):
        targets[first:end - 1] = tokens[first + 1:end]
    targets[generator.random(total) < 0.2] = IGNORED
    positions = np.concatenate([np.arange(b - a) for a, b in zip(starts, starts[1:])]).astype(np.int32)
    weights = (targets >= 0).astype(np.float32)
    count = int(weights.sum())
    return Batch(tokens, targets, positions, starts, weights, weights / count, count, total - PADDING, [])


def document_ranges(batch: Batch) -> list[slice]:
    """The documents of a `packed_batch`, padding left out."""
    return [slice(int(a), int(b)) for a, b in zip(batch.doc_starts[:-2], batch.doc_starts[1:-1])]


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference over the largest value of ``theirs`` (over 1e-6 where that is smaller)."""
    return float(np.abs(ours - theirs).max(initial=0.0) / max(float(np.abs(theirs).max(initial=0.0)), 1e-6))


@dataclass
class Gradients:
    """The loss of a packed batch, and float32 gradients by our parameter names."""

    loss: float
    values: dict[str, np.ndarray]


class _GradientStore:
    """Gradients under the names of files, as a name map reads tensors."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.tensors = tensors

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def get(self, name: str) -> Any:
        return from_f32(name, self.tensors[name])

    def names(self) -> list[str]:
        return list(self.tensors)

    def missing(self, name: str) -> str:
        return f"transformers' model has no parameter {name!r}; it has {', '.join(list(self.tensors)[:8])} ..."


@dataclass
class Parity:
    """One checkpoint in two hands. ``folder``: its files; ``reference``: transformers' model, float32; ``loaded``: ours, which
    ``backend`` runs. ``joins``: the CPU's programs too are planned as those of a device are, where products that read the same
    input are one and adapters lie inside them."""

    folder: Path
    reference: Any
    loaded: LoadedModel
    batch: Batch
    backend: str = "cpu"
    joins: bool = False

    @classmethod
    def make(cls, family: Family, config: Mapping[str, Any], folder: str | Path, seed: int = 0) -> Parity:
        """Writes a random checkpoint of ``config`` (a config.json mapping with model_type) to ``folder`` and opens it."""
        reference = random_reference(config, seed)
        _save(reference, folder, config)
        return cls.of(family, reference, folder, seed)

    @classmethod
    def of(cls, family: Family, reference: Any, folder: str | Path, seed: int = 0) -> Parity:
        """Opens a checkpoint that ``reference`` was saved to."""
        loaded = LoadedModel.open(folder, [family])
        return cls(Path(folder), reference, loaded, packed_batch(loaded.hyperparameters.vocab_size, seed))

    @property
    def max_positions(self) -> int:
        return len(self.batch.tokens)

    # -- theirs ------------------------------------------------------------------------------------------------------

    def reference_logits(self, dtype: str = "float32", texts: Sequence[Sequence[int]] | None = None) -> np.ndarray:
        """float64 [useful tokens, vocab]: each document, or each of ``texts``, alone through transformers in ``dtype``."""
        torch = _need("torch")
        model = self._reference_in(dtype)
        given = [self._ids(part) for part in document_ranges(self.batch)] if texts is None else map(_batch_of_one, texts)
        with torch.no_grad():
            return np.concatenate([model(ids).logits[0].double().numpy() for ids in given])

    def reference_gradients(self, dtype: str = "float32", module: Any = None) -> Gradients:
        """Of the mean loss over the batch's targets, each document alone. ``module``: instead of the reference."""
        torch = _need("torch")
        model = self._reference_in(dtype) if module is None else module
        model.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64)
        for part in document_ranges(self.batch):
            logits = model(self._ids(part)).logits[0]
            targets = torch.from_numpy(self.batch.targets[part].astype(np.int64))
            loss = loss + torch.nn.functional.cross_entropy(
                logits.float() if dtype != "float64" else logits, targets, ignore_index=IGNORED, reduction="sum"
            ).double()
        loss = loss / self.batch.num_targets
        loss.backward()
        found = {name: p.grad.double().numpy() for name, p in model.named_parameters() if p.grad is not None}
        return Gradients(float(loss.detach()), self._by_our_names(found) if module is None else found)

    def reference_greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        torch = _need("torch")
        with torch.no_grad():
            ids = _batch_of_one(prompt)
            # Without a mask, tokens that happen to be the padding token would be hidden.
            ids = self.reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return ids[0, len(prompt):].tolist()

    def _reference_in(self, dtype: str) -> Any:
        torch = _need("torch")
        return self.reference if dtype == "float32" else copy.deepcopy(self.reference).to(getattr(torch, dtype))

    def _ids(self, part: slice) -> Any:
        return _batch_of_one(self.batch.tokens[part])

    def _by_our_names(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        store = _GradientStore({name: value.astype(np.float32) for name, value in tensors.items()})
        names = [name for name, parameter in self.loaded.dsl().parameters() if parameter.role != BUFFER]
        return {name: self.loaded.names.load(store, name).to_f32() for name in names}

    # -- ours --------------------------------------------------------------------------------------------------------

    def logits(self, recipe: str = "fp32", adapter: Any = None) -> np.ndarray:
        """float32 [useful tokens, vocab] of the packed batch, all documents in one run. ``adapter``: an AppliedAdapter."""
        weights = FrozenWeights(self.loaded, RECIPES[recipe].compute, self.backend)
        for name, array in ({} if adapter is None else adapter.arrays).items():
            weights.adopt(name, "f32", array)
        graph, program = loss_program(
            self.loaded, RECIPES[recipe], weights, self._bindings(), max_positions=self.max_positions, output="logits",
            adapter=None if adapter is None else adapter.spec, join_projections=self._joins(),
        )
        session = weights.open_session(graph, program, threads=1)
        for name in ("tokens", "positions", "doc_starts"):
            session.write(name, getattr(self.batch, name))
        session.run("forward")
        return session.read("logits")[:self.batch.useful_tokens]

    def train_session(
        self, recipe: str = "fp32", adapter: LoraSpec | None = None, memory_budget: int | None = None,
        optimizer: AdamW = AdamW(),
    ) -> TrainSession:
        """A training session on one thread: of ``adapter``, or of every parameter."""
        weights = FrozenWeights(self.loaded, RECIPES[recipe].compute, self.backend)
        plan = training_program(
            self.loaded, RECIPES[recipe], weights, self._bindings(), max_positions=self.max_positions, adapter=adapter,
            optimizer=optimizer, memory_budget=memory_budget, backend=self.backend, join_projections=self._joins(),
            widen=self._joins(),
        )
        return TrainSession(plan, self.loaded, weights, optimizer, 0, 1)

    def gradients(self, session: TrainSession | None = None, recipe: str = "fp32") -> Gradients:
        """Of one micro-batch; of every parameter, or of what ``session`` trains."""
        session = session or self.train_session(recipe)
        loss = session.accumulate(Step([self.batch], 0, 0), 0)
        return Gradients(loss, {name: session.gradient(name) for name in session.layout.parameters})

    def training_losses(
        self, optimizer: AdamW, learning_rate: float, steps: int, session: TrainSession | None = None
    ) -> tuple[list[float], list[float]]:
        """Loss before each of ``steps`` updates on the same batch, ours and torch.optim.AdamW's: of every parameter, or of what
        ``session`` trains with ``optimizer``, where the reference trains that from the same values."""
        torch = _need("torch")
        session = session or self.train_session(optimizer=optimizer)
        ours = [session.step(Step([self.batch], 0, 0), index, learning_rate)[0] for index in range(steps)]
        model = copy.deepcopy(self.reference)
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices, vectors = ([p for p in trained if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
        groups = [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        theirs_optimizer = torch.optim.AdamW(
            groups, lr=learning_rate, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon)
        theirs = []
        for _ in range(steps):
            theirs.append(self.reference_gradients(module=model).loss)
            torch.nn.utils.clip_grad_norm_(trained, optimizer.max_grad_norm)
            theirs_optimizer.step()
        return ours, theirs

    def greedy(self, prompt: Sequence[int], count: int, recipe: str = "fp32", chunk: int = 8) -> list[int]:
        """``count`` tokens through the key-value cache, the prompt fed ``chunk`` tokens at a time."""
        weights = FrozenWeights(self.loaded, RECIPES[recipe].compute, self.backend)
        decoder = Decoder(self.loaded, weights, RECIPES[recipe], len(prompt) + count, threads=1)
        for start in range(0, len(prompt), chunk):
            part = list(prompt[start:start + chunk])
            row = decoder.logits(part, [0] * len(part), range(start, start + len(part)), [len(part) - 1])[0]
        ids = [int(row.argmax())]
        while len(ids) < count:
            ids.append(int(decoder.logits([ids[-1]], [0], [len(prompt) + len(ids) - 1], [0])[0].argmax()))
        return ids

    def _joins(self) -> bool:
        return self.joins or self.backend != "cpu"

    def _bindings(self) -> dict[str, int]:
        return {"T": len(self.batch.tokens), "D": len(self.batch.doc_starts)}

    # -- compared ----------------------------------------------------------------------------------------------------

    def logits_error(self) -> float:
        """Largest difference of the fp32 logits, relative to the largest logit."""
        return relative_error(self.logits(), self.reference_logits())

    def gradient_errors(self) -> dict[str, float]:
        """Relative error of "loss" and of each parameter's gradient in fp32. AssertionError when a parameter has none."""
        ours, theirs = self.gradients(), self.reference_gradients()
        assert ours.values.keys() == theirs.values.keys(), ours.values.keys() ^ theirs.values.keys()
        errors = {name: relative_error(value, theirs.values[name]) for name, value in ours.values.items()}
        return {"loss": abs(ours.loss - theirs.loss) / abs(theirs.loss), **errors}

    def bf16_errors(self, recipe: str = "bf16") -> dict[str, tuple[float, float]]:
        """Errors of a bf16 recipe and of transformers in bf16 against float64: of "logits" (mean absolute), and of
        "gradients" (length of the difference of all gradients over the length of all, each parameter weighing the same)."""
        exact, exact_gradients = self.reference_logits("float64"), self.reference_gradients("float64").values
        ours, theirs = self.logits(recipe), self.reference_logits("bfloat16")
        pair = self.gradients(recipe=recipe).values, self.reference_gradients("bfloat16").values
        distances = [
            np.mean([np.linalg.norm(each[name] - value) / np.linalg.norm(value) for name, value in exact_gradients.items()])
            for each in pair
        ]
        return {
            "logits": (float(np.abs(ours - exact).mean()), float(np.abs(theirs - exact).mean())),
            "gradients": (float(distances[0]), float(distances[1])),
        }

    def round_trip(self, folder: str | Path, dtype: str = "f32") -> None:
        """Writes the checkpoint anew to ``folder`` and holds it against transformers' own files, byte by byte; the new
        config.json has to make transformers the same model. ``dtype``: "f32", or "bf16" for files saved so."""
        torch, transformers = _need("torch"), _need("transformers")
        loaded, folder = self.loaded, Path(folder)
        original = self.folder
        if dtype == "bf16":
            original = folder / "original"
            _save(copy.deepcopy(self.reference).to(torch.bfloat16), original, loaded.store.config)
            loaded = LoadedModel.open(original, [loaded.family])
        written = folder / "written"
        h, family = loaded.hyperparameters, loaded.family
        parameters = {name: loaded.names.load(loaded.store, name) for name, _ in loaded.dsl().parameters()}
        write_hf(written, family.hf_names(h).export(parameters), family.hf_config(h), dtype=dtype)
        before, after = _tensor_bytes(original), _tensor_bytes(written)
        assert before.keys() == after.keys(), f"names differ: {sorted(before.keys() ^ after.keys())}"
        different = [name for name in before if before[name] != after[name]]
        assert not different, f"tensors differ: {different}"
        again = transformers.AutoModelForCausalLM.from_pretrained(written, attn_implementation="eager", dtype=torch.float32)
        part = document_ranges(self.batch)[0]
        with torch.no_grad():
            expected = transformers.AutoModelForCausalLM.from_pretrained(
                original, attn_implementation="eager", dtype=torch.float32)(self._ids(part)).logits
            assert torch.equal(again(self._ids(part)).logits, expected), "the written config.json makes another model"
        assert LoadedModel.open(written, [family]).hyperparameters == h


def _batch_of_one(tokens: Sequence[int] | np.ndarray) -> Any:
    return _need("torch").from_numpy(np.array(tokens, np.int64))[None]


def _save(model: Any, folder: str | Path, config: Mapping[str, Any]) -> None:
    """Under the architecture of ``config``: `transformers` writes its class, which some families have from another one."""
    model.save_pretrained(folder)
    path = Path(folder) / "config.json"
    named = {key: config[key] for key in ("architectures",) if key in config}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))


def _tensor_bytes(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    tensors = {name: file.get(name) for name, file in open_folder(folder).items()}
    return {name: (t.dtype, tuple(t.shape), np.ascontiguousarray(t.data).tobytes()) for name, t in tensors.items()}
