"""Training beside peers on one device, in turns: tokens/s of each, medians over the rounds, and ours over theirs.

    python benchmarks/peers_cuda.py llama-3.1-8b                               # LoRA of rank 16
    python benchmarks/peers_cuda.py llama-3.1-8b --checkpointing --memory-budget 20GiB
    python benchmarks/peers_cuda.py llama-3.1-8b --full --apart                # one process at a time: all memory
    python benchmarks/peers_cuda.py tiny --device cpu --sequence-len 64 --rounds 2 --steps 1

A contender is a process that prepares, warms up, and then waits (peers all at once, after ours): at its turn it runs
one step unmeasured and some measured ones by the clock. With --apart it is started for every turn and gone before the
next. A step is accumulation x (forward and backward of a micro-batch), clipping to norm 1, AdamW. Random weights of a
preset's shape, random tokens, all of them targets.

    ours           what `surogate bench train` runs; by default recipe pure_bf16, as peers' residual stream is bf16
                   too; with --full masters and states in bf16, rounded stochastically
    compile        transformers and PEFT, each decoder layer compiled, the head's loss compiled chunk by chunk
                   (`head_loss`); LoRA: fp32 adapters under bf16 autocast; --full: all in bf16, torch's fused AdamW
    compile-8bit   --full only: the same with AdamW of bitsandbytes, which keeps its states in 8 bits
    liger          as compile, with Liger's loss in place of `head_loss`
    unsloth        Unsloth's model and adapters

Peers that cannot be imported are named in a row of their own. Beside transformers, peft and accelerate of the versions
that they want: `pip install liger-kernel unsloth` (which brings unsloth_zoo, trl and bitsandbytes).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PEERS = {
    "compile": ("transformers",), "compile-8bit": ("transformers", "bitsandbytes"),
    "liger": ("transformers", "liger_kernel"), "unsloth": ("unsloth",),
}
"""What each needs to import, beside PEFT for LoRA."""
MARK = "@@ "
"""Begins the lines that a contender answers with: libraries print to standard output too."""


def main() -> None:
    args = parse()
    if args.contender:
        return contend(args)
    contenders = [Contender("ours", args.limit)]
    for name in args.peer or PEERS:
        why = why_not(name, args.full)
        if why:
            emit({"bench": "peers-absent", "peer": name, "why": why})
        else:
            contenders.append(Contender(name, args.limit))
    if not args.apart:
        contenders[0].launch()  # alone: it counts what it takes of the device
        contenders[0].wait_until_warm()
        for contender in contenders[1:]:
            contender.launch()
        for contender in contenders[1:]:
            contender.wait_until_warm()
    for number in range(args.rounds):
        turn = number % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            contender.take_turn(number, args.steps, args.apart)
    for contender in contenders:
        contender.stop()
    report(args, contenders)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a preset of `surogate bench train`")
    parser.add_argument("--full", action="store_true", help="train every weight instead of adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequence-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--recipe", default="pure_bf16", help="ours")
    parser.add_argument("--memory-budget", help="ours: what it may take, such as 20GiB")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="ours: a key of its run")
    parser.add_argument("--checkpointing", action="store_true", help="peers: recompute each layer in the backward pass")
    parser.add_argument("--peer", action="append", choices=sorted(PEERS), help="only these; default: all there are")
    parser.add_argument("--chunk", type=int, default=2048, help="compile: tokens whose logits exist at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured in a turn")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="start a contender for its turn, and end it after")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds that a contender may take to answer")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    return parser.parse_args()


def emit(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def why_not(peer: str, full: bool) -> str:
    """Why a peer does not take part; "" where it does."""
    if peer == "compile-8bit" and not full:
        return "only with --full: adapters have few states"
    needed = PEERS[peer] if full else (*PEERS[peer], "peft")
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


# -- the side that gives turns ----------------------------------------------------------------------------------------


@dataclass
class Contender:
    """A process of this script. What goes wrong in it is kept in ``error``, and ends its part in the comparison."""

    name: str
    limit: float
    process: subprocess.Popen | None = None
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def launch(self) -> None:
        self.launched = time.perf_counter()
        offline = {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--contender", self.name], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, env={**os.environ, **offline},
        )

    def wait_until_warm(self) -> None:
        self.facts = self._answer() or {}
        if self.facts:
            seconds = round(time.perf_counter() - self.launched, 1)
            emit({"bench": "peers-ready", "contender": self.name, "seconds": seconds, **self.facts})

    def take_turn(self, number: int, steps: int, apart: bool) -> None:
        if apart and not self.error:
            self.launch()
            self.wait_until_warm()
        if self.error:
            return
        try:
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and the missing answer says so
        answer = self._answer()
        if answer:
            self.turns.append(answer)
            emit({"bench": "peers-turn", "round": number, "contender": self.name, **answer})
        if apart:
            self.stop()

    def stop(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self._wait(30.0)
            self.process = None

    def _answer(self) -> dict[str, Any] | None:
        """The next marked line; None, with ``error`` set, where none comes in time."""
        timer = threading.Timer(self.limit, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                if line.startswith(MARK):
                    return json.loads(line[len(MARK):])
        finally:
            timer.cancel()
        self._wait(30.0)
        self.log.seek(0)
        tail = self.log.read().decode(errors="replace").strip().splitlines()[-6:]
        ended = f"ended with {self.process.returncode} (killed after {self.limit:.0f} s if -9)"
        self.error = f"{ended}: {' | '.join(tail)}"[:800]
        emit({"bench": "peers-failed", "contender": self.name, "error": self.error})
        return None

    def _wait(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def report(args: argparse.Namespace, contenders: list[Contender]) -> None:
    medians = {}
    for contender in contenders:
        if contender.turns:
            values = [(key, value) for turn in contender.turns for key, value in turn.items()]
            numbers = {key for key, value in values if isinstance(value, float) and key != "loss"}
            medians[contender.name] = {
                key: round(statistics.median(turn[key] for turn in contender.turns if key in turn), 3)
                for key in sorted(numbers)
            }
    rates = {name: each["tokens_per_second"] for name, each in medians.items()}
    ours = rates.get("ours")
    emit({
        "bench": "peers", "model": args.model, "method": "full" if args.full else f"lora r{args.rank}",
        "sequence_len": args.sequence_len, "batch": args.batch, "accumulation": args.accumulation,
        "checkpointing": args.checkpointing, "memory_budget": args.memory_budget, "recipe": args.recipe,
        "rounds": {contender.name: len(contender.turns) for contender in contenders}, "medians": medians,
        "ours_over": {name: round(ours / rate, 3) for name, rate in rates.items() if ours and name != "ours"},
        "failed": {contender.name: contender.error for contender in contenders if contender.error},
    })


# -- a contender ------------------------------------------------------------------------------------------------------


def contend(args: argparse.Namespace) -> None:
    """Prepares, then answers each number of steps that it reads with a measurement."""
    make = {"ours": ours, "unsloth": functools.partial(peer, made=unsloth_model)}.get(args.contender, peer)
    run, facts = make(args)

    def answer(row: dict[str, Any]) -> None:
        print(MARK + json.dumps(row), flush=True)

    answer(facts())
    for line in sys.stdin:
        run(1)
        started = time.perf_counter()
        loss = run(int(line))
        seconds = (time.perf_counter() - started) / int(line)
        tokens = args.accumulation * args.batch * args.sequence_len
        answer({"tokens_per_second": round(tokens / seconds, 1), "step_ms": round(seconds * 1e3, 2), "loss": loss,
                **facts()})


Run = Callable[[int], float]
"""Runs that many steps and waits for them; returns the last loss."""
Facts = Callable[[], dict[str, Any]]


def ours(args: argparse.Namespace) -> tuple[Run, Facts]:
    from surogate_core import engine
    from surogate_core.bench.workload import from_preset, open_workload

    kept: dict[str, Any] = {"lora_rank": args.rank}
    if args.full:
        kept = {"lora": False, "master_dtype": "bf16", "optimizer_state_dtype": "bf16"}
    if args.memory_budget:
        kept["memory_budget"] = args.memory_budget
    keys = {"sequence_len": args.sequence_len, "per_device_train_batch_size": args.batch, "learning_rate": 1e-4,
            "gradient_accumulation_steps": args.accumulation, "recipe": args.recipe, "backend": args.device, **kept}
    before = engine.device_info(args.device)["free_bytes"] if args.device != "cpu" else 0
    prepared = from_preset(args.model, keys, args.set)
    workload = open_workload(args.model, prepared)
    session, loader, done = workload.session, prepared.loader, 0

    def run(steps: int) -> float:
        nonlocal done
        step, loss = loader.next_step(), 0.0
        for index in range(done, done + steps):
            session.start(step, index, 1e-4)
            step, loss = loader.next_step(), session.loss()
        session.session.synchronize()
        done += steps
        return loss

    run(args.warmup)
    planned = session.session.memory()
    program = sum(planned["arenas"].values()) + planned["workspace"] + sum(planned["external"].values())
    taken = before - engine.device_info(args.device)["free_bytes"] if args.device != "cpu" else program

    def facts() -> dict[str, Any]:
        return {"program_gib": round(program / 2**30, 2), "taken_gib": round(taken / 2**30, 2),
                "recomputed": prepared.plan.saved_bytes[1] < prepared.plan.saved_bytes[0]}

    return run, facts


def peer(args: argparse.Namespace, made: Callable[..., Any] | None = None) -> tuple[Run, Facts]:
    """``made``: what makes the model, `compiled_model` where nothing is given."""
    if args.contender == "unsloth":
        import unsloth  # noqa: F401  asks to be imported before what it patches
    import torch

    model, loss_of = (made or compiled_model)(args)
    cuda = args.device == "cuda"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _optimizer(args, trained)
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=not args.full)
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    shape = (4, args.accumulation, args.batch, args.sequence_len)
    data = torch.randint(0, vocabulary, shape, generator=generator).to(args.device)
    done, updates = 0, []

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True) if cuda else None
        if event is not None:
            event.record()
        return event

    def run(steps: int) -> float:
        nonlocal done
        updates.clear()
        for index in range(done, done + steps):
            total = 0.0
            for tokens in data[index % len(data)]:
                with autocast:
                    loss = loss_of(tokens) / args.accumulation
                loss.backward()
                total += loss.detach()
            begun = mark()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            updates.append((begun, mark()))
        done += steps
        return float(total)  # which waits for the device

    def facts() -> dict[str, Any]:
        counters = torch._dynamo.utils.counters["stats"]
        row: dict[str, Any] = {"compiled_graphs": counters["unique_graphs"], "torch": torch.__version__}
        if cuda:
            torch.cuda.synchronize()
            row |= {"allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                    "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
                    "update_ms": round(statistics.median(a.elapsed_time(b) for a, b in updates), 2)}
        return row

    run(args.warmup)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    return run, facts


def _optimizer(args: argparse.Namespace, trained: list[Any]) -> Any:
    if args.contender == "compile-8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(trained, lr=1e-4, weight_decay=0.01)
    import torch

    return torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.01, fused=args.device == "cuda")


def random_model(args: argparse.Namespace) -> Any:
    """transformers' model of the preset, made on the device in bf16."""
    import torch
    import transformers

    from surogate_core.bench.presets import architecture

    preset = architecture(args.model)
    settings = {key: value for key, value in preset.items() if key not in ("architectures", "model_type")}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(preset["model_type"], **settings)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.use_cache = False
    return model


def compiled_model(args: argparse.Namespace) -> tuple[Any, Callable[[Any], Any]]:
    """The model, and what gives the loss of a micro-batch i64[batch, sequence_len]."""
    import torch

    # Layers share code and differ in their index, which may cost a graph each.
    torch._dynamo.config.recompile_limit = 256
    model = random_model(args)
    decoder, head = model.model, model.lm_head
    if args.contender == "liger":
        import liger_kernel.transformers

        apply = getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{model.config.model_type}")
        others = {name: False for name, each in inspect.signature(apply).parameters.items() if each.default is True}
        apply(**others | {"fused_linear_cross_entropy": True}, model=model)  # the rest is the compiler's
    layers = list(decoder.layers)
    if not args.full:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=args.rank, lora_dropout=0.0, bias="none",
                                                 target_modules=LINEARS, task_type="CAUSAL_LM"))
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if not args.full:
            model.enable_input_require_grads()
    model.train()
    for layer in layers:
        layer.compile()

    def loss_of(tokens: Any) -> Any:
        if args.contender == "liger":
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss
        hidden = decoder(input_ids=tokens, use_cache=False).last_hidden_state
        targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        return head_loss(hidden.flatten(0, 1), head.weight, targets.flatten(), args.chunk)

    return model, loss_of


def unsloth_model(args: argparse.Namespace) -> tuple[Any, Callable[[Any], Any]]:
    """Unsloth reads a checkpoint: one is written to a temporary folder, as random as the others' weights."""
    import torch
    from unsloth import FastLanguageModel

    from surogate_core.testing.tiny import write_byte_tokenizer

    recomputed = "unsloth" if args.checkpointing else False
    with tempfile.TemporaryDirectory() as folder:
        random_model(args).save_pretrained(folder)
        torch.cuda.empty_cache()
        # A padding token of its own: where it is the end's, Unsloth adds one.
        write_byte_tokenizer(folder, ["<|end|>", "<|pad|>"], eos_token="<|end|>", pad_token="<|pad|>")
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=args.sequence_len, dtype=torch.bfloat16, load_in_4bit=False,
            full_finetuning=args.full, use_gradient_checkpointing=recomputed,
        )
        if not args.full:
            model = FastLanguageModel.get_peft_model(
                model, r=args.rank, lora_alpha=args.rank, lora_dropout=0, bias="none", target_modules=LINEARS,
                use_gradient_checkpointing=recomputed, random_state=1, max_seq_length=args.sequence_len,
            )
    FastLanguageModel.for_training(model, use_gradient_checkpointing=recomputed)
    return model, lambda tokens: model(input_ids=tokens, labels=tokens).loss


# -- the loss of `compile` --------------------------------------------------------------------------------------------


def head_loss(x: Any, weight: Any, targets: Any, chunk: int) -> Any:
    """Mean cross-entropy of bf16 x[tokens, features] @ weight[vocabulary, features].T, as a torch scalar. Negative
    targets count for nothing. Gradients are made in the forward pass, ``chunk`` tokens at a time, so that logits are
    made once and never held whole; what lies between the products is compiled."""
    return _head_function().apply(x, weight, targets, chunk)


@functools.cache
def _head_function() -> Any:
    import torch

    @torch.compile(dynamic=False)
    def loss_and_gradient(x: Any, weight: Any, targets: Any, scale: Any) -> tuple[Any, Any]:
        logits = torch.nn.functional.linear(x, weight).float()
        highest = torch.logsumexp(logits, -1, keepdim=True)
        counted, index = (targets >= 0)[:, None], targets.clamp(min=0)[:, None]
        loss = torch.where(counted, highest - logits.gather(1, index), 0.0).sum()
        words = torch.arange(logits.shape[1], device=x.device)[None]
        gradient = torch.exp(logits - highest) - (words == index).float()
        return loss, (torch.where(counted, gradient, 0.0) * scale).to(x.dtype)

    class HeadLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, targets: Any, chunk: int) -> Any:
            x, ctx.dx, ctx.dweight = x.detach(), torch.empty_like(x), None
            scale, loss = 1.0 / (targets >= 0).sum(), torch.zeros((), device=x.device)
            for first in range(0, len(x), chunk):
                rows = slice(first, first + chunk)
                part, dlogits = loss_and_gradient(x[rows], weight.detach(), targets[rows], scale)
                loss += part
                torch.mm(dlogits, weight.detach(), out=ctx.dx[rows])
                if ctx.needs_input_grad[1]:
                    if ctx.dweight is None:
                        ctx.dweight = dlogits.t() @ x[rows]
                    else:
                        ctx.dweight.addmm_(dlogits.t(), x[rows])
            return loss * scale

        @staticmethod
        def backward(ctx: Any, dloss: Any) -> tuple[Any, ...]:
            dweight = None if ctx.dweight is None else ctx.dweight.mul_(dloss)
            return ctx.dx.mul_(dloss), dweight, None, None

    return HeadLoss


if __name__ == "__main__":
    main()
