"""Graph -> Program: buffer planning, emission, the program file and its text form, and `explain`."""

from .emit import EmitOptions, Emitter, emit, emit_each
from .program import Arena, Entry, Instruction, Program, Storage, TensorEntry

__all__ = [
    "Arena", "EmitOptions", "Emitter", "Entry", "Instruction", "Program", "Storage", "TensorEntry", "emit",
    "emit_each",
]
