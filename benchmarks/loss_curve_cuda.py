"""Whether training follows PyTorch's course: the loss of each step of full fine-tuning on real text, beside torch's.

    python benchmarks/loss_curve_cuda.py
    python benchmarks/loss_curve_cuda.py --device cpu --steps 12 --sequence-len 64 --sequences 4 --micro-batch 2 \
        --layers 2 --hidden 64 --intermediate 128 --heads 4 --kv-heads 2

A Llama of 76 million random parameters, saved by transformers and opened by both, reads bytes of this project's
documentation and of Python's standard library: the same sequences in the same order, AdamW, clipping to norm 1, one
schedule. A line of JSON a run has the largest and the mean difference to torch in fp32 (TF32 off) over the last steps.
Ours is within noise where its mean is at most twice that of torch in the same formats: bf16 autocast beside recipe
bf16, weights and AdamW's states in bf16 beside pure_bf16 with the same (ours round stochastically, torch to nearest).
Then ours against itself: the same bits again, kernel by kernel, with activations recomputed, and resumed from a
checkpoint of the middle.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surogate_core.data import TokenDataset  # noqa: E402
from surogate_core.data.loader import IGNORED, Loader, Step  # noqa: E402
from surogate_core.model import FrozenWeights, LoadedModel, TrainPlan, training_program  # noqa: E402
from surogate_core.passes.precision import RECIPES  # noqa: E402
from surogate_core.plugins import get_manager  # noqa: E402
from surogate_core.train import checkpoint as checkpoints  # noqa: E402
from surogate_core.train.optimizers import AdamW  # noqa: E402
from surogate_core.train.schedule import Schedule  # noqa: E402
from surogate_core.train.session import TrainSession  # noqa: E402

WEIGHT_DECAY = 0.01
TORCH = {
    "torch-fp32": "fp32", "torch-bf16": "autocast", "torch-bf16-again": "autocast", "torch-bf16-weights": "weights",
}
"""Runs of torch: name -> precision, see `torch_course`."""
NOISE = 2.0
"""Times torch's own bf16 difference that ours may be."""


@dataclass
class Course:
    """Of one run: loss and gradient norm of every step, and for ours a digest of what was trained."""

    losses: np.ndarray
    norms: np.ndarray
    seconds: float
    digest: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def same_bits(self, other: Course, first: int = 0) -> bool:
        """From step ``first`` of the other on."""
        return (self.losses.tobytes() == other.losses[first:].tobytes()
                and self.norms.tobytes() == other.norms[first:].tobytes() and self.digest == other.digest)


def main() -> None:
    args = parse()
    steps, schedule = list(text_steps(args)), rates(args)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        emit({"bench": "loss-curve-setting", "parameters": write_model(args, folder / "model"), **vars(args)})
        courses = {name: torch_course(args, folder / "model", steps, schedule, how) for name, how in TORCH.items()}
        ours = Ours(args, folder / "model", steps, schedule)
        courses["ours-bf16"] = ours.course("bf16", save_at=args.steps // 2, folder=folder / "checkpoints")
        courses["ours-pure-bf16"] = ours.course("pure_bf16", narrow=True)
        report(args, courses)
        check_bits(ours, courses, folder / "checkpoints")
    if args.curves:
        Path(args.curves).write_text(json.dumps({name: course.losses.tolist() for name, course in courses.items()}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compared", type=int, default=100, help="the last so many steps are compared")
    parser.add_argument("--sequence-len", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=16, help="of a step")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences at once; torch takes a whole step")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--schedule", default="cosine", choices=("cosine", "constant"))
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curves", help="file for all losses of all runs, as JSON")
    return parser.parse_args()


def emit(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


# -- what both train ---------------------------------------------------------------------------------------------------


def text_steps(args: argparse.Namespace) -> Iterator[Step]:
    """Sequences of bytes, all but the first of each a target, drawn from the text without replacement."""
    length, wanted = args.sequence_len, args.steps * args.sequences
    text = b"".join(path.read_bytes() for path in text_files())
    pieces = len(text) // length
    if pieces < wanted:
        raise SystemExit(f"the text has {pieces:,} sequences of {length} bytes, {wanted:,} are needed: fewer --steps")
    if args.sequences % args.micro_batch:
        raise SystemExit(f"--sequences {args.sequences} is no multiple of --micro-batch {args.micro_batch}")
    chosen = np.random.default_rng(args.seed).permutation(pieces)[:wanted]
    tokens = np.frombuffer(text, np.uint8)[:pieces * length].reshape(pieces, length)[chosen].astype(np.int32)
    names = [f"text:{piece}" for piece in chosen]
    offsets = np.arange(wanted + 1) * length
    data = TokenDataset(tokens.reshape(-1), np.ones(tokens.size, np.float32), offsets, names, ["text"] * wanted)
    loader = Loader(data, sequence_len=length, per_device_train_batch_size=args.micro_batch,
                    gradient_accumulation_steps=args.sequences // args.micro_batch, sample_packing=False, shuffle=False)
    return loader.epoch()


def text_files() -> list[Path]:
    """Documentation first, then modules of the standard library; the same on every machine with the same Python."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    modules = (path for path in library.rglob("*.py") if not left_out & set(path.relative_to(library).parts))
    return [*sorted((ROOT / "docs").rglob("*.md")), *sorted(modules)]


def rates(args: argparse.Namespace) -> list[float]:
    schedule = Schedule(args.schedule, args.learning_rate, args.steps, min(args.warmup, args.steps // 4), 0.1)
    return [schedule.rate(index) for index in range(args.steps)]


def write_model(args: argparse.Namespace, folder: Path) -> int:
    """A random Llama for bytes, in fp32; returns how many parameters it has."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=args.hidden, intermediate_size=args.intermediate, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, max_position_embeddings=args.sequence_len,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
    torch.manual_seed(args.seed)
    model = transformers.LlamaForCausalLM(config)
    model.float().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


# -- torch -------------------------------------------------------------------------------------------------------------


def torch_course(args: argparse.Namespace, folder: Path, steps: list[Step], schedule: list[float], how: str) -> Course:
    """``how``: "fp32"; "autocast", bf16 products over fp32 weights; or "weights", all in bf16, AdamW's states too."""
    import torch
    import transformers

    torch.set_float32_matmul_precision("highest")
    dtype = torch.bfloat16 if how == "weights" else torch.float32
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.to(args.device).train()
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
              {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=schedule[0], fused=args.device == "cuda")
    tokens, targets = (
        torch.from_numpy(_rows(args, steps, name)).to(args.device, torch.int64) for name in ("tokens", "targets")
    )
    losses, norms, started = [], [], time.perf_counter()
    for index, rate in enumerate(schedule):
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(args.device, torch.bfloat16) if how == "autocast" else contextlib.nullcontext():
            logits = model(input_ids=tokens[index], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets[index].flatten(), ignore_index=IGNORED)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    losses, norms = (torch.stack(values).double().cpu().numpy() for values in (losses, norms))
    return Course(losses, norms, time.perf_counter() - started)


def _rows(args: argparse.Namespace, steps: list[Step], name: str) -> np.ndarray:
    """An input of all batches as i32[steps, sequences, sequence_len]."""
    rows = [np.concatenate([getattr(batch, name) for batch in step]) for step in steps]
    return np.stack(rows).reshape(len(steps), args.sequences, args.sequence_len)


# -- ours --------------------------------------------------------------------------------------------------------------


class Ours:
    """Runs of our own on the same model, steps and rates."""

    def __init__(self, args: argparse.Namespace, folder: Path, steps: list[Step], schedule: list[float]) -> None:
        self.args, self.steps, self.schedule = args, steps, schedule
        manager = get_manager()
        manager.load_kernels()
        self.model = LoadedModel.open(folder, manager.families.values())

    def course(
        self, recipe: str, *, narrow: bool = False, graphs: bool = True, recomputed: bool = False,
        save_at: int | None = None, resume: bool = False, folder: Path | None = None,
    ) -> Course:
        """``narrow``: masters and optimizer states in bf16, rounded stochastically. ``recomputed``: within a budget
        that leaves three quarters of what is saved. ``save_at`` writes a checkpoint to ``folder`` before that step;
        ``resume`` begins there."""
        rounding = "stochastic" if narrow else "nearest"
        optimizer = AdamW(weight_decay=WEIGHT_DECAY, rounding=rounding, seed=self.args.seed)
        weights = FrozenWeights(self.model, RECIPES[recipe].compute, self.args.device)
        plan = self._plan(recipe, weights, optimizer, narrow, None)
        whole = plan.saved_bytes[1]
        if recomputed:
            plan = self._plan(recipe, weights, optimizer, narrow, plan.resident_bytes - whole // 4)
        session = TrainSession(plan, self.model, weights, optimizer, self.args.seed, graphs=graphs)
        first = 0
        if resume:
            found = checkpoints.list_checkpoints(folder)[-1]
            checkpoints.load(found, session)
            first = found.step
        started, results = time.perf_counter(), []
        for index in range(first, len(self.steps)):
            if index == save_at:
                checkpoints.save(folder, index, session, {}, None)
            results.append(session.step(self.steps[index], index, self.schedule[index]))
        seconds = time.perf_counter() - started
        losses, norms = (np.array(values) for values in zip(*results))
        facts = {"first_step": first, "saved_bytes": [whole, plan.saved_bytes[1]],
                 "graphs": not session.session.why_not_recorded("micro_step")}
        return Course(losses, norms, seconds, digest(session), facts)

    def _plan(
        self, recipe: str, weights: FrozenWeights, optimizer: AdamW, narrow: bool, memory_budget: int | None
    ) -> TrainPlan:
        args, kept = self.args, "bf16" if narrow else "f32"
        bindings = {"T": args.micro_batch * args.sequence_len, "D": args.micro_batch + 1}
        return training_program(
            self.model, RECIPES[recipe], weights, bindings, max_positions=args.sequence_len, adapter=None,
            optimizer=optimizer, memory_budget=memory_budget, backend=args.device,
            join_projections=args.device != "cpu", master=kept, states=kept,
        )


def digest(session: TrainSession) -> str:
    """Of everything that a checkpoint would hold."""
    found = hashlib.blake2b(digest_size=16)
    for state in session.states:
        for parameter in session.layout.parameters.values():
            found.update(np.ascontiguousarray(session.state(state, parameter)))
    return found.hexdigest()


# -- compared ----------------------------------------------------------------------------------------------------------


def report(args: argparse.Namespace, courses: dict[str, Course]) -> None:
    """A row a run, how far apart two runs of torch are, and the verdict on each of ours."""
    exact = courses["torch-fp32"].losses
    last = slice(max(0, args.steps - args.compared), args.steps)

    def difference(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
        apart = np.abs(one - other)[last]
        return {"largest_difference": round(float(apart.max()), 6), "mean_difference": round(float(apart.mean()), 6)}

    for name, course in courses.items():
        shown = course.losses[np.linspace(0, args.steps - 1, 6).astype(int)]
        emit({"bench": "loss-curve", "run": name, **difference(course.losses, exact), "loss": shown.round(4).tolist(),
              "mean_loss_of_last": round(float(course.losses[last].mean()), 5), "seconds": round(course.seconds, 2),
              **course.facts})
    emit({"bench": "loss-curve-spread", "of": "two runs of torch-bf16",
          **difference(courses["torch-bf16"].losses, courses["torch-bf16-again"].losses)})
    means = {name: float(np.abs(course.losses - exact)[last].mean()) for name, course in courses.items()}
    for name, like in (("ours-bf16", "torch-bf16"), ("ours-pure-bf16", "torch-bf16-weights")):
        ratios = {other: means[name] / means[other] for other in ("torch-bf16", "torch-bf16-weights") if means[other]}
        emit({"bench": "loss-curve-verdict", "run": name, "like": like,
              "within_noise": means[name] <= NOISE * means[like],
              "mean_difference_over": {other: round(ratio, 3) for other, ratio in ratios.items()}})


def check_bits(ours: Ours, courses: dict[str, Course], folder: Path) -> None:
    """Ours against itself, a row a way of running."""
    ways: dict[str, dict[str, Any]] = {
        "again": {}, "without graphs": {"graphs": False}, "recomputed": {"recomputed": True},
        "resumed": {"resume": True, "folder": folder}, "again, pure_bf16": {"recipe": "pure_bf16", "narrow": True},
    }
    for name, how in ways.items():
        recipe = how.pop("recipe", "bf16")
        reference = courses["ours-bf16" if recipe == "bf16" else "ours-pure-bf16"]
        course = ours.course(recipe, **how)
        first = course.facts["first_step"]
        odd = np.flatnonzero(course.losses != reference.losses[first:])
        emit({"bench": "loss-curve-bits", "way": name, "equal": course.same_bits(reference, first),
              "first_other_loss": int(odd[0]) + first if odd.size else None,
              "same_parameters": course.digest == reference.digest, "seconds": round(course.seconds, 2),
              **course.facts})


if __name__ == "__main__":
    main()
