"""One row of a batch, position by position: what goes in, what is to come out, and whether it counts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rung.data.prefetch import Micro
from rung.doctor.preflight.batches import is_place
from rung.engine.lens import Lens

SHOWN = 24  # positions at either end; between them only those around a change


def listing(micro: Micro, lens: Lens, counted: Sequence[Tensor | None]) -> str:
    """Empty where no loss function with classes was seen."""
    num_rows = len(micro.ids)
    for judged, counts in zip(lens.judged, counted):
        is_plain = judged.ignore_index is not None and not judged.targets.is_floating_point()
        if counts is None or not is_plain or counts.shape != judged.targets.shape or counts.numel() % num_rows:
            continue
        targets, marks = (t.reshape(num_rows, -1)[0].tolist() for t in (judged.targets, counts))
        inputs = next((ids[0].tolist() for lookup in lens.lookups if (ids := _by_row(lookup.ids, num_rows)) is not None
                       and ids.shape[1] == len(targets)), [None] * len(targets))  # fmt: skip
        first = f"row {micro.ids[0]} of train: {sum(marks)} of {len(marks)} positions count"
        return "\n".join([first, "position  input  target", *_lines(inputs, targets, marks)])
    return ""


def _by_row(ids: Tensor, num_rows: int) -> Tensor | None:
    """(rows, positions); None for what is not per row, such as positions themselves."""
    if ids.numel() % num_rows or is_place(ids, num_rows):
        return None
    return ids.reshape(num_rows, -1)


def _lines(inputs: Sequence[int | None], targets: Sequence[int], marks: Sequence[bool]) -> list[str]:
    lines: list[str] = []
    hidden_from: int | None = None
    last = len(marks) - 1
    for at, mark in enumerate(marks):
        near = marks[max(0, at - 2) : at + 3]
        if at < SHOWN or at > last - SHOWN or len(set(near)) > 1:
            if hidden_from is not None:
                lines.append(f"{hidden_from} to {at - 1}  {_word(marks[at - 1])}")
                hidden_from = None
            entered = "-" if inputs[at] is None else inputs[at]
            lines.append(f"{at:>8}  {entered:>5}  {targets[at]:>6}  {_word(mark)}")
        elif hidden_from is None:
            hidden_from = at
    return lines


def _word(mark: bool) -> str:
    return "counted" if mark else "not counted"
