"""`surogate explain`: the plan of a run in words: passes, memory by part, kernels, fast paths and why each is on or off."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .. import engine
from ..engine import cuda
from ..model.binding import IN_PLACE
from ..weights.formats import FORMATS
from .machine import describe_machine
from .memory import by_part, logits_bytes
from .prepare import Prepared, checkpoint_bytes
from .report import mib


def describe(prepared: Prepared, verbose: bool = True) -> str:
    """Text; allocates nothing. ``verbose`` adds the layer bodies and the kernel of every op."""
    plan, config = prepared.plan, prepared.config
    planned = plan.planned
    threads = prepared.threads or engine.default_threads()
    lines = [
        f"backend    {describe_machine(config, threads, prepared.backend_reason)}",
        f"model      {prepared.model.family.name}: {prepared.model.hyperparameters}",
        f"passes     {' -> '.join(plan.graph.history)}",
        f"program    {len(plan.program.instructions)} instructions; entries "
        + ", ".join(f"{e.name} ({e.count})" for e in plan.program.entries),
        f"steps      {prepared.total_steps}, {config.effective_batch_size} sequences of {config.sequence_len} tokens each",
        "",
        "memory",
        *_memory(prepared),
        "",
        "fast paths",
        *(f"  {'on ' if on else 'off'}  {name}: {why}" for name, on, why in fast_paths(prepared, planned)),
    ]
    if verbose:
        lines += ["", "kernels", *_kernels(planned), "", "layer bodies", *_bodies(prepared)]
    return "\n".join(lines)


def _memory(prepared: Prepared) -> list[str]:
    plan = prepared.plan
    before, after = plan.saved_bytes
    rows = by_part(plan)
    total = sum(size for _, size in rows)
    rows.append(("peak of the program", total))
    lines = [f"  {name:<24}{mib(size):>14}" for name, size in rows]
    lines.append(f"  {'of it logits':<24}{mib(logits_bytes(plan)):>14}")
    lines.append(f"  {'of it saved activations':<24}{mib(after):>14}   ({mib(before)} without recomputation)")
    if prepared.evaluations:
        lines.append(f"  {'evaluation beside it':<24}{mib(prepared.evaluation_bytes):>14}")
    budget = prepared.budget
    lines.append(f"  {'budget':<24}{'none' if budget is None else mib(budget):>14}")
    lines.append(f"  {'checkpoint on disk':<24}{mib(checkpoint_bytes(prepared)):>14}")
    return lines


def fast_paths(prepared: Prepared, planned: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """(name, on, why) of everything that makes a run faster when it can be used."""
    graph, config = prepared.plan.graph, prepared.config
    ops = {i["op"] for i in planned["instructions"]}
    fused = not any(n.op == "add" for r in graph.ordered_regions() for n in r.nodes())
    whole = prepared.plan.saved_bytes[1] == prepared.plan.saved_bytes[0]
    copied = _copied(prepared)
    paths = [
        ("loss with its gradient in one sweep", "linear_cross_entropy_grad" in ops and "linear_cross_entropy" not in ops,
         "logits are never held whole, and are computed once a step"),
        ("projections joined", *_joined(prepared)),
        ("adapters inside products", *_inside(prepared)),
        ("low-rank gradients in one reading", *_low_rank(prepared)),
        ("sums inside products", fused,
         "residual and gradient sums are addends of the products that make them" if fused
         else "some sums have no product to join"),
        ("nothing recomputed", whole,
         "all saved activations fit memory_budget" if whole else "memory_budget is smaller than what would be saved"),
        ("packing", config.sample_packing,
         f"bins are {prepared.loader.packing_efficiency:.0%} full" if config.sample_packing else "sample_packing is false"),
        ("weights read in place", not copied, copied or "no frozen matrix is kept in another format than its file's"),
        ("quantised weights prefetched", *_prefetched(prepared, planned)),
    ]
    return paths + _kernel_paths(planned, config.backend)


def _joined(prepared: Prepared) -> tuple[bool, str]:
    """Whether products that read one input are one, and which or why not."""
    graph, backend = prepared.plan.graph, prepared.config.backend
    joined = [value for region in graph.layer_regions() for value in region.joined.values() if len(value.shape) > 1]
    if joined:
        names = ", ".join(dict.fromkeys(value.name.removesuffix(".weight") for value in joined))
        return True, f"{names}: each is one product, and its parts are columns of the result"
    if not prepared.plan.joins_projections:
        return False, f"backend {backend} reads each weight where its file is mapped, so they stay apart"
    return False, "what reads one input is stored in different formats, or read by ops that take no columns of a matrix"


def _prefetched(prepared: Prepared, planned: dict[str, Any]) -> tuple[bool, str]:
    """Whether blocks are decoded on a stream of their own, and how often or why not."""
    decoded = [i for i in planned["instructions"] if i["op"] == "dequantize"]
    if decoded:
        return True, (f"{len(decoded)} times a micro-step one is decoded to {prepared.recipe.compute} while the "
                      "product before runs; two are in memory at a time")
    if not any(FORMATS[tensor.dtype].is_block for tensor in prepared.plan.program.tensors if tensor.dtype in FORMATS):
        return False, "no weight is quantised"
    return False, f"backend {prepared.config.backend} decodes blocks inside its products"


def _inside(prepared: Prepared) -> tuple[bool, str]:
    """Whether low-rank branches are terms of the products that they are added to, and of which or why not."""
    plan, adapter = prepared.plan, prepared.adapter
    if adapter is None:
        return False, "no adapters are trained"
    if plan.widened:
        names = ", ".join(name.removesuffix(".wide")
                          for name in dict.fromkeys(n for r in plan.graph.layer_regions() for n in r.widened))
        return True, f"{names}: their results are not read and written once more"
    if not any(name.startswith("widen_products") for name in plan.graph.history):
        return False, f"backend {prepared.config.backend} reads each weight where its file is mapped, so they stay apart"
    if adapter.dropout > 0:
        return False, "they have dropout, which the base's inputs have not"
    compute = prepared.recipe.compute
    if any(prepared.weights.dtype(name, tuple(value.shape)) != compute
           for name, value, layer in plan.graph.instances()
           if layer is not None and not value.trainable and len(value.shape) > 1):
        return False, f"frozen weights are not stored in what products read, {compute}"
    return False, "the sizes and ranks of none add up to multiples of 8, or an op beside it takes no columns of a matrix"


def _low_rank(prepared: Prepared) -> tuple[bool, str]:
    """Whether one op makes both gradients of adapters' second halves, and of how many or why not."""
    if prepared.adapter is None:
        return False, "no adapters are trained"
    calls = [i for i in prepared.plan.program.instructions if i.op == "low_rank_grad"]
    if calls:
        count = sum(name is not None for call in calls for name in call.outputs[1:])
        return True, f"of {count} adapters in {len(calls)} calls: the gradients of B and of what it multiplies read dy once"
    return False, f"backend {prepared.config.backend} makes the two gradients of an adapter's B branch one after the other"


def _copied(prepared: Prepared) -> str:
    """Which frozen matrices are not read where their file is mapped; "" when all are."""
    if prepared.adapter is None:
        return f"all weights are trained: masters are kept in {prepared.config.master_dtype}"
    dtypes: Counter[str] = Counter()
    for name, value, _ in prepared.plan.graph.instances():
        if not value.trainable and len(value.shape) > 1:
            dtypes[prepared.weights.stored(name, tuple(value.shape)).dtype] += 1
    copied = {d: n for d, n in dtypes.items() if d not in IN_PLACE and d != prepared.recipe.compute}
    return ", ".join(f"{n} {d} matrices are copied as {prepared.recipe.compute}" for d, n in copied.items())


def _kernel_paths(planned: dict[str, Any], backend: str) -> list[tuple[str, bool, str]]:
    """Each kind of kernel of the backend: in how many instructions it runs, or why in none."""
    used = Counter(i["kernel"] for i in planned["instructions"])
    taken = {(i["kernel"], i["op"]) for i in planned["instructions"]}
    outranked = {(name, i["op"]) for i in planned["instructions"] for name, _, score in i["candidates"] if score > 0} - taken
    features = engine.cpu_features()
    paths = []
    if backend == "cuda" and cuda.without_cudnn() is not None:
        paths.append(("attention through cuDNN", False, str(cuda.without_cudnn())))
    for name in sorted({k["name"] for k in engine.kernels() if k["backend"] == backend}):
        lacking = [feature for feature, has in features.items() if feature.startswith(name.split("_")[0]) and not has]
        ops = sorted(op for kernel, op in outranked if kernel == name)
        if used.get(name):
            # On a device a name is a way to compute, which several ops have; on a CPU what a processor has.
            others = f"; faster kernels take {', '.join(ops)}" if ops and backend == "cuda" else ""
            paths.append((f"{name} kernels", True, f"{used[name]} instructions{others}"))
        elif ops:
            paths.append((f"{name} kernels", False, "faster kernels take all these calls"))
        elif lacking:
            paths.append((f"{name} kernels", False, f"this processor lacks {', '.join(lacking)}"))
        else:
            paths.append((f"{name} kernels", False, "they take none of this program's calls"))
    return paths


def _kernels(planned: dict[str, Any]) -> list[str]:
    counts = Counter((i["op"], i["kernel"]) for i in planned["instructions"])
    return [f"  {op:<28}{kernel:<14}{count:>6} x" for (op, kernel), count in sorted(counts.items())]


def _bodies(prepared: Prepared) -> list[str]:
    graph = prepared.plan.graph
    lines = []
    for region in graph.layer_regions():
        lines.append(f"  {region.name} x {graph.layers.count(region.name)}, forward")
        lines += [f"    {node!r}" for node in region.forward]
        lines.append(f"  {region.name}, backward")
        lines += [f"    {node!r}" for node in region.backward]
    return lines
