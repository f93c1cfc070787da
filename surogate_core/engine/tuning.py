"""What kernels decided by measuring, kept between runs: the algorithm of each matrix product on each kind of device.

A kernel that measures when it is prepared says what it chose as a short text (``tuning`` of `Session.explain`). The text
is kept in a file a device, and handed to the same instruction of a later program as its attribute "tuning", so that a run
starts without measuring and does the same arithmetic as the one before it. A text of another library or device is not
taken by the kernel, which measures anew.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from ..errors import EngineError
from ..files import write_text
from ..program.program import Instruction, Program
from .session import Session, device_info

ATTRIBUTE = "tuning"
FOLDER = Path("~/.cache/surogate/tuning")
_taken: dict[Path, dict[str, str]] = {}
"""By file: what this process goes by, so that its runs do the same arithmetic whatever others, which measure meanwhile, write."""


class Tuning:
    """The choices known for one device: those that this process went by before, then those of its file. A file that cannot be
    read counts as empty and is written anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken = _taken.setdefault(path, {})
        self.known = _stored(path) | self.taken

    @classmethod
    def of_device(cls, backend: str, device: int = 0) -> Tuning:
        """Raises EngineError where there is no such device."""
        name = device_info(backend, device)["name"]
        return cls(FOLDER.expanduser() / f"{backend}-{re.sub('[^A-Za-z0-9]+', '-', name)}.json")

    def apply(self, program: Program) -> Program:
        """``program`` with what is known about its instructions; those that say it themselves are left alone."""
        instructions = [self._with_choice(program, instruction) for instruction in program.instructions]
        return replace(program, instructions=instructions)

    def _with_choice(self, program: Program, instruction: Instruction) -> Instruction:
        if any(name == ATTRIBUTE for name, _ in instruction.attrs):
            return instruction
        key = _key(program, instruction)
        text = self.known.get(key)
        if text is None:
            return instruction
        self.taken[key] = text
        return _chosen(instruction, text)

    def learn(self, program: Program) -> bool:
        """Takes over what is written down in ``program``, before what was known. True where that is news."""
        found = {
            _key(program, instruction): str(value)
            for instruction in program.instructions for name, value in instruction.attrs if name == ATTRIBUTE
        }
        news = any(self.known.get(key) != text for key, text in found.items())
        self.known |= found
        self.taken |= found
        return news

    def save(self) -> None:
        """Replaces the file, with what others have written to it since; where that cannot be done, later runs measure again."""
        try:
            text = json.dumps(_stored(self.path) | self.known, indent=0, sort_keys=True)
            write_text(self.path, text, EngineError)
        except EngineError:
            pass  # a home that cannot be written costs the next run's measuring, and nothing else


def _stored(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    items = known.items() if isinstance(known, dict) else ()
    return {key: text for key, text in items if isinstance(key, str) and isinstance(text, str)}


def with_choices(program: Program, session: Session) -> Program:
    """``program`` with what the kernels of its ``session`` chose written down."""
    instructions = [
        _chosen(instruction, row[ATTRIBUTE]) if row[ATTRIBUTE] else instruction
        for instruction, row in zip(program.instructions, session.explain(), strict=True)
    ]
    return replace(program, instructions=instructions)


def _chosen(instruction: Instruction, text: str) -> Instruction:
    attrs = [(name, value) for name, value in instruction.attrs if name != ATTRIBUTE]
    return replace(instruction, attrs=tuple(sorted((*attrs, (ATTRIBUTE, text)))))


def _key(program: Program, instruction: Instruction) -> str:
    """What a kernel's choice may depend on: op, attributes, operands' types and strides, and which share a place."""
    operands: list[str] = []
    places: dict[tuple[str, int], int] = {}
    for name in (*instruction.inputs, *instruction.outputs):
        if name is None:
            operands.append("-")
            continue
        t = program.tensor(name)
        place = places.setdefault((t.storage, t.byte_offset), len(places))
        operands.append(f"{place}:{t.dtype}{list(t.shape)}/{list(t.strides)}")
    attrs = " ".join(f"{name}={value}" for name, value in instruction.attrs if name != ATTRIBUTE)
    return f"{instruction.op}({' '.join(operands)}) {attrs}"
