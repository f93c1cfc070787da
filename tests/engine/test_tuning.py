"""What kernels chose by measuring: written down in programs, kept in a file, and handed to the same instruction again."""

from __future__ import annotations

import pytest

from surogate_core.engine import Session, Tuning, with_choices
from surogate_core.program.format import from_bytes
from surogate_core.program.program import Arena, Entry, Instruction, Program, Storage, TensorEntry


def program(op: str = "fake_tuned", width: int = 4, **attrs: int) -> Program:
    """y = op(x), twice: a kernel that chooses, and one that has nothing to choose."""
    return Program(
        arenas=[Arena("main", 512, 256)],
        storages=[Storage("x", "main", 0, 4 * width, 2), Storage("y", "main", 256, 4 * width)],
        tensors=[TensorEntry(name, name, 0, "f32", (width,), (1,)) for name in ("x", "y")],
        instructions=[Instruction(op, ("x",), ("y",), tuple(sorted(attrs.items()))), Instruction("fake_scratch", ("x",), ("y",))],
        entries=[Entry("step", 0, 2)],
    )


def choices(of: Program) -> list[object]:
    return [dict(instruction.attrs).get("tuning") for instruction in of.instructions]


def test_choices_come_from_the_kernels_and_survive_the_file(device, tmp_path):
    chosen = with_choices(program(), Session(program().to_bytes(), backend="fake"))
    assert choices(chosen) == ["tile 3", None]
    assert choices(from_bytes(chosen.to_bytes())) == ["tile 3", None]
    tuning = Tuning(tmp_path / "deep" / "fake.json")
    assert tuning.learn(chosen) and not tuning.learn(chosen)
    tuning.save()
    again = Tuning(tmp_path / "deep" / "fake.json")
    assert choices(again.apply(program())) == ["tile 3", None]
    Session(again.apply(program()).to_bytes(), backend="fake").run("step")


@pytest.mark.parametrize("other", [program(width=8), program("fake_add"), program(stride=2)], ids=["shape", "op", "attribute"])
def test_another_instruction_has_no_part_in_it(device, tmp_path, other):
    tuning = Tuning(tmp_path / "fake.json")
    tuning.learn(with_choices(program(), Session(program().to_bytes(), backend="fake")))
    assert choices(tuning.apply(other)) == [None, None]


def test_what_an_instruction_says_itself_stays(tmp_path):
    tuning = Tuning(tmp_path / "fake.json")
    tuning.learn(program(tuning="tile 1"))
    assert choices(tuning.apply(program())) == ["tile 1", None]
    assert choices(tuning.apply(program(tuning="tile 2"))) == ["tile 2", None]


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"a": 3, "b": "kept"}'])
def test_a_file_that_makes_no_sense_counts_as_empty(tmp_path, text):
    path = tmp_path / "fake.json"
    path.write_text(text)
    assert Tuning(path).known == ({"b": "kept"} if "kept" in text else {})
    tuning = Tuning(path)
    tuning.learn(program(tuning="tile 1"))
    tuning.save()
    assert choices(Tuning(path).apply(program())) == ["tile 1", None]


def test_others_that_measure_meanwhile_change_nothing_for_this_process_and_are_not_lost(tmp_path):
    path = tmp_path / "fake.json"
    tuning = Tuning(path)
    tuning.learn(program(tuning="tile 1"))
    path.write_text('{"another": "kept"}')
    tuning.save()
    assert Tuning(path).known["another"] == "kept"
    written = path.read_text()
    path.write_text(written.replace("tile 1", "tile 2"))
    assert choices(Tuning(path).apply(program())) == ["tile 1", None]
