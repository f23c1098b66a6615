"""If this fails, the exam of the doctor no longer runs, or takes a sick program for its healthy twin."""

from __future__ import annotations

from tests.exam.exam import examine
from tests.exam.programs import Shape, classes


def test_a_sick_program_and_its_twin() -> None:
    one = classes()["crash"]
    shape = next(shape for shape in one.shapes if shape.name.startswith("gru/"))
    sick, twin = examine(one, shape, True), examine(one, shape, False)
    assert (sick.answer, twin.answer) == ("named", "quiet"), (sick, twin)


def test_every_change_finds_its_place() -> None:
    found = classes()
    assert len(found) >= 14
    for one in found.values():
        assert len(one.shapes) == 4
        assert sum(shape.twin for shape in one.shapes) == 2
        for shape in one.shapes:
            if isinstance(shape, Shape):
                for is_sick in (True, False):
                    compile(shape.source(is_sick), shape.name, "exec")
