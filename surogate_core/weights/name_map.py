"""The declarative map between a family's parameters and the tensors of a file, run both ways.

A family writes one ``NameMap`` for each kind of file. A rule's patterns hold placeholders that stand for a number::

    NameMap([
        Rule("embed.weight", "token_embd.weight"),
        Rule("layers.{layer}.attn.q.weight", "blk.{layer}.attn_q.weight", PermuteRope(num_heads, head_dim)),
        Rule("layers.{layer}.attn.q.bias", "blk.{layer}.attn_q.bias", PermuteRope(num_heads, head_dim), optional=True),
        Rule(("layers.{layer}.mlp.gate.weight", "layers.{layer}.mlp.up.weight"), "blk.{layer}.ffn_up.weight",
             Split(0, (n, n))),
        Rule("layers.{layer}.experts.up.weight", "model.layers.{layer}.experts.{expert}.up.weight", Stack(num_experts)),
        Rule("lm_head.weight", "output.weight"),
    ], tied={"lm_head.weight": "embed.weight"})

Importing reads the rules from right to left, exporting from left to right, so an export is the inverse of the import.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..errors import WeightError
from .tensor import AnyTensor, LazyTensor, StoredTensor, realized
from .transforms import Identity, Split, Transform

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class Store(Protocol):
    """What an import needs of its source; ``WeightStore`` is one."""

    def __contains__(self, name: object) -> bool: ...

    def get(self, name: str) -> StoredTensor: ...

    def names(self) -> list[str]: ...

    def missing(self, name: str) -> str: ...


def with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """The name with what it begins with exchanged: the first key of ``prefixes`` that it begins with, for its value."""
    found = next((each for each in prefixes if name.startswith(each)), None)
    return name if found is None else prefixes[found] + name.removeprefix(found)


@dataclass(frozen=True)
class Rule:
    """Parameters ``params`` come from file tensors ``files`` through ``transform``; patterns, one or several of each.

    A placeholder that only the file's pattern has counts through the tensors that ``transform`` stacks. An ``optional``
    parameter may be absent from the file (a bias); whether the model then has it is the family's to decide.
    """

    params: str | tuple[str, ...]
    files: str | tuple[str, ...]
    transform: Transform = field(default_factory=Identity)
    optional: bool = False

    def __post_init__(self) -> None:
        for name in ("params", "files"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        own = set(_PLACEHOLDER.findall(self.params[0]))
        if any(set(_PLACEHOLDER.findall(pattern)) != own for pattern in self.params):
            raise WeightError(f"rule for {self.params}: all its parameters must have the same placeholders")
        extra = {name for pattern in self.files for name in _PLACEHOLDER.findall(pattern)} - own
        counted = bool(extra)
        if len(extra) > 1 or (counted and len(self.files) > 1) or not own <= set(_PLACEHOLDER.findall(self.files[0])):
            raise WeightError(f"rule for {self.params}: the placeholders of {self.files} do not fit")
        object.__setattr__(self, "_counter", extra.pop() if counted else None)
        if self.transform.num_params != len(self.params) or (
            not counted and self.transform.num_files != len(self.files)
        ):
            raise WeightError(
                f"rule for {self.params}: {self.transform} makes {self.transform.num_params} parameters of "
                f"{self.transform.num_files} tensors, but {len(self.params)} and {len(self.files)} are named"
            )

    def file_names(self, bindings: Mapping[str, str]) -> list[str]:
        """Names of the file tensors for one set of numbers."""
        if self._counter is None:
            return [pattern.format(**bindings) for pattern in self.files]
        pattern = self.files[0]
        return [pattern.format(**bindings, **{self._counter: i}) for i in range(self.transform.num_files)]

    def param_names(self, bindings: Mapping[str, str]) -> list[str]:
        return [pattern.format(**bindings) for pattern in self.params]


def _compiled(pattern: str) -> re.Pattern[str]:
    parts = _PLACEHOLDER.split(pattern)
    return re.compile(
        "".join(f"(?P<{part}>0|[1-9][0-9]*)" if i % 2 else re.escape(part) for i, part in enumerate(parts))
    )


class NameMap:
    """Rules, and the parameters that repeat another when a file lacks them (``tied``)."""

    def __init__(self, rules: Sequence[Rule], tied: Mapping[str, str] | None = None) -> None:
        self.rules = tuple(rules)
        self.tied = dict(tied or {})
        self._params = [(_compiled(pattern), rule, i) for rule in self.rules for i, pattern in enumerate(rule.params)]
        self._files = [(_compiled(pattern), rule) for rule in self.rules for pattern in rule.files]
        patterns = [pattern for rule in self.rules for pattern in rule.params]
        twice = [pattern for pattern in patterns if patterns.count(pattern) > 1]
        if twice:
            raise WeightError(f"parameter {twice[0]!r} has two rules in the name map; keep one")

    def file_names(self, param: str) -> list[str]:
        """The file tensors that make up a parameter."""
        rule, _, bindings = self._find(param)
        return rule.file_names(bindings)

    def param_names(self, file_name: str) -> list[str]:
        """The parameters that a file tensor supplies; [] when no rule knows it."""
        for pattern, rule in self._files:
            match = pattern.fullmatch(file_name)
            if match:
                bindings = {name: value for name, value in match.groupdict().items() if name != rule._counter}
                return rule.param_names(bindings)
        return []

    def transform_of(self, param: str) -> Transform:
        return self._find(param)[0].transform

    def has(self, store: Store, param: str) -> bool:
        """Whether the store can supply the parameter, by itself or through the one it is tied to."""
        if all(name in store for name in self.file_names(param)):
            return True
        return param in self.tied and self.has(store, self.tied[param])

    def resolve(self, store: Store, params: Iterable[str]) -> list[str]:
        """Those of ``params`` that can be loaded; raises one WeightError for all that are missing and not optional."""
        found, lost = [], []
        for param in params:
            if self.has(store, param):
                found.append(param)
            elif not self._find(param)[0].optional:
                lost.append(next(name for name in self.file_names(param) if name not in store))
        if lost:
            more = f"; and {len(lost) - 1} more: {', '.join(lost[1:4])}" if len(lost) > 1 else ""
            raise WeightError(store.missing(lost[0]) + more)
        return found

    def unused(self, store: Store, params: Iterable[str]) -> list[str]:
        """File tensors that none of ``params`` comes from."""
        used = {name for param in params for name in self.file_names(param)}
        return [name for name in store.names() if name not in used]

    def load(self, store: Store, param: str, shape: Sequence[int] | None = None) -> StoredTensor:
        """A parameter from a store, in the file's format; raises WeightError when it is absent or not of ``shape``."""
        rule, index, bindings = self._find(param)
        names = rule.file_names(bindings)
        lost = [name for name in names if name not in store]
        if lost and param in self.tied:
            tensor = self.load(store, self.tied[param])
        elif lost:
            raise WeightError(store.missing(lost[0]))
        else:
            tensor = _loaded(rule.transform, [store.get(name) for name in names], index)
        if shape is not None and tensor.shape != tuple(shape):
            raise WeightError(
                f"tensor {names[0]!r}: the file gives {param!r} the shape {list(tensor.shape)}, but its configuration asks "
                f"for {list(shape)}; weights and configuration do not belong together"
            )
        return tensor.renamed(param)

    def export(self, params: Mapping[str, AnyTensor]) -> dict[str, AnyTensor]:
        """File tensors for the parameters, each made when it is read.

        A tied parameter that is the same object as the one it repeats is left out, as files leave it out. Raises
        WeightError when a parameter has no rule, or when one that the same file tensor needs is not given.
        """
        tensors: dict[str, AnyTensor] = {}
        done: set[str] = set()
        for param, tensor in params.items():
            if param in done or (param in self.tied and params.get(self.tied[param]) is tensor):
                continue
            rule, _, bindings = self._find(param)
            group = rule.param_names(bindings)
            lost = [name for name in group if name not in params]
            if lost:
                raise WeightError(
                    f"cannot write {rule.file_names(bindings)[0]!r}: it also holds {lost[0]!r}, which is not given"
                )
            done.update(group)
            tensors.update(_exported(rule, rule.file_names(bindings), [params[name] for name in group]))
        return tensors

    def _find(self, param: str) -> tuple[Rule, int, dict[str, str]]:
        for pattern, rule, index in self._params:
            match = pattern.fullmatch(param)
            if match:
                return rule, index, match.groupdict()
        known = [pattern for rule in self.rules for pattern in rule.params]
        near = difflib.get_close_matches(re.sub(r"\d+", "{layer}", param), known, n=3)
        raise WeightError(f"no rule for parameter {param!r}; nearest rules: {', '.join(near or known[:3])}")


def _loaded(transform: Transform, tensors: list[StoredTensor], index: int) -> StoredTensor:
    return transform.load_one(tensors, index) if isinstance(transform, Split) else transform.load(tensors)[index]


def _exported(rule: Rule, names: list[str], params: list[AnyTensor]) -> dict[str, AnyTensor]:
    if isinstance(rule.transform, Identity):
        param = params[0]
        if isinstance(param, StoredTensor):
            return {names[0]: param.renamed(names[0])}
        return {names[0]: LazyTensor(names[0], param.dtype, param.shape, param.read)}
    types = rule.transform.export_types([(param.dtype, param.shape) for param in params])
    pieces = _Pieces(rule.transform, params)
    return {
        name: LazyTensor(name, dtype, shape, lambda i=i: pieces.take(i))
        for i, (name, (dtype, shape)) in enumerate(zip(names, types, strict=True))
    }


class _Pieces:
    """The tensors one export gives together: made when the first is read, and let go when each has been."""

    def __init__(self, transform: Transform, params: list[AnyTensor]) -> None:
        self._transform, self._params = transform, params
        self._held: dict[int, StoredTensor] = {}

    def take(self, index: int) -> np.ndarray:
        if index not in self._held:
            self._held = dict(enumerate(self._transform.export([realized(param) for param in self._params])))
        return self._held.pop(index).data
