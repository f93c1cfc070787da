"""The program's text form: what tests keep as goldens and people read. Lossless: `parse(dump(p)) == p`."""

from __future__ import annotations

import json
import re

from .program import Arena, Entry, Instruction, Program, Storage, TensorEntry, dense_strides

_QUOTED = r'"(?:[^"\\]|\\.)*"'


def dump(program: Program) -> str:
    """One line a record. Strides are written only where a tensor is not dense; floats in hexadecimal keep every bit."""
    lines = [f"program {program.fingerprint.hex()}"]
    lines += [f"arena {a.name} bytes={a.bytes} align={a.alignment}" for a in program.arenas]
    for s in program.storages:
        where = "external" if s.arena is None else f"{s.arena}+{s.offset}"
        lines.append(f"storage {s.name} {where} bytes={s.bytes} flags={s.flags}")
    for t in program.tensors:
        strides = "" if t.strides == dense_strides(t.shape) else f" strides={_dims(t.strides)}"
        lines.append(f"tensor {t.name} {t.storage}+{t.byte_offset} {t.dtype}{_dims(t.shape)}{strides}")
    # Entries stand before their first instruction where that keeps their order; those after one that cannot, at the end.
    pending = list(program.entries)
    for index, ins in enumerate(program.instructions):
        while pending and pending[0].first == index:
            entry = pending.pop(0)
            lines.append(f"entry {entry.name} count={entry.count}")
        lines.append(_instruction(ins))
    lines += [f"entry {e.name} count={e.count} first={e.first}" for e in pending]
    return "\n".join(lines) + "\n"


def _dims(dims: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"


def _instruction(ins: Instruction) -> str:
    def operands(names):
        return " ".join("-" if n is None else n for n in names)

    attrs = "".join(f" {name}={_attr(value)}" for name, value in ins.attrs)
    extra = (f" kernel:{ins.kernel}" if ins.kernel else "") + (f" stream:{ins.stream}" if ins.stream else "")
    extra += f" waits:{','.join(map(str, ins.waits))}" if ins.waits else ""
    return f"  {ins.op} ({operands(ins.inputs)}) -> ({operands(ins.outputs)}){attrs}{extra}"


def _attr(value: int | float | str) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return value.hex() if isinstance(value, float) else str(int(value))


def parse(text: str) -> Program:
    """ValueError with the line number where the text is not a dump."""
    program = Program()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            _parse_line(program, line)
        except (ValueError, AttributeError, LookupError) as error:
            raise ValueError(f"line {number}: {line.strip()!r} is not part of a program ({error})") from error
    return program


def _parse_line(program: Program, line: str) -> None:
    if line.startswith("  "):
        program.instructions.append(_parse_instruction(line.strip()))
        return
    kind, rest = line.split(" ", 1)
    words = rest.split(" ")
    options = dict(w.split("=", 1) for w in words if "=" in w)
    if kind == "program":
        program.fingerprint = bytes.fromhex(rest)
    elif kind == "arena":
        program.arenas.append(Arena(words[0], int(options["bytes"]), int(options["align"])))
    elif kind == "storage":
        arena, offset = (None, 0) if words[1] == "external" else words[1].rsplit("+", 1)
        program.storages.append(Storage(words[0], arena, int(offset), int(options["bytes"]), int(options["flags"])))
    elif kind == "tensor":
        storage, offset = words[1].rsplit("+", 1)
        dtype, shape = re.fullmatch(r"(\w+)\[(.*)\]", words[2]).groups()
        dims = _parse_dims(shape)
        strides = _parse_dims(options["strides"][1:-1]) if "strides" in options else dense_strides(dims)
        program.tensors.append(TensorEntry(words[0], storage, int(offset), dtype, dims, strides))
    elif kind == "entry":
        first = int(options.get("first", len(program.instructions)))
        program.entries.append(Entry(words[0], first, int(options["count"])))
    else:
        raise ValueError(f"unknown record {kind!r}")


def _parse_dims(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in text.split(",") if d)


def _parse_instruction(line: str) -> Instruction:
    op, inputs, outputs, rest = re.fullmatch(r"(\S+) \((.*?)\) -> \((.*?)\)(.*)", line).groups()
    attrs = []
    for name, value in re.findall(rf" (\w+)=({_QUOTED}|\S+)", rest):
        attrs.append((name, _parse_attr(value)))
    tail = dict(re.findall(r" (kernel|stream|waits):(\S+)", re.sub(_QUOTED, "", rest)))
    waits = tuple(int(w) for w in tail["waits"].split(",")) if "waits" in tail else ()
    return Instruction(op, _names(inputs), _names(outputs), tuple(attrs), tail.get("kernel", ""),
                       int(tail.get("stream", 0)), waits)


def _names(text: str) -> tuple[str | None, ...]:
    return tuple(None if n == "-" else n for n in text.split(" ") if n)


def _parse_attr(text: str) -> int | float | str:
    if text.startswith('"'):
        return json.loads(text)
    return float.fromhex(text) if "x" in text or text in ("inf", "-inf", "nan") else int(text)


__all__ = ["dump", "parse"]
