"""What an evaluation finds, and the files that keep it where a split is examined closely.

    <split>-<step>.json           all figures; the sweep's report reads them
    <split>-<step>.csv            loss by position, of the whole set and of each group
    <split>-<step>.svg            the same as a curve
    <split>-<step>.windows.jsonl  the rows that were evaluated, one a line

External weights have their name in place of the step.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung import parse
from rung.errors import UserError
from rung.files import write_whole
from rung.runs.record import EVAL_SCHEMA

if TYPE_CHECKING:
    from torch import nn

    from rung.engine.build import Setup
    from rung.recipe import Report, Stream
    from rung.runs.query import Run

MOST_CURVES = 6  # of groups in the drawing; all of them are in the CSV


@dataclass(frozen=True, repr=False)
class Evaluation(Mapping[str, Mapping[str, Any]]):
    """Eval set -> figures: loss, targets, parts and metrics, baselines; closer ones where a split was examined."""

    sets: dict[str, dict[str, Any]]
    run: Run | None  # None for a config or external weights without a run
    step: int | None  # of the save
    weights: str  # "checkpoint 400", "folder pythia-70m"
    split: str = "validation"
    windows: list[dict[str, Any]] = field(default_factory=list)  # the rows that were examined
    file: Path | None = None  # where it is kept

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self.sets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sets)

    def __len__(self) -> int:
        return len(self.sets)

    def __repr__(self) -> str:
        losses = ", ".join(f"{name} loss {values['loss']:.4f}" for name, values in self.sets.items())
        return f"<Evaluation of {self.run.id + ', ' if self.run else ''}{self.weights}: {losses}>"

    def _repr_html_(self) -> str:
        from rung.report.blocks import Table
        from rung.report.html import fragment
        from rung.report.table import value_text

        plain = {n: {k: v for k, v in s.items() if isinstance(v, int | float)} for n, s in self.sets.items()}
        head = list(dict.fromkeys(name for values in plain.values() for name in values))
        rows = [[name, *(value_text(values.get(key)) for key in head)] for name, values in plain.items()]
        return fragment(Table(["set", *head], rows, range(1, len(head) + 1)))

    def document(self) -> dict[str, Any]:
        """What the JSON file holds."""
        return {
            "schema": EVAL_SCHEMA,
            "run": None if self.run is None else self.run.id,
            "split": self.split,
            "step": self.step,
            "weights": self.weights,
            "sets": self.sets,
        }


def evaluate_sets(setup: Setup, model: nn.Module, streams: Mapping[str, Stream]) -> dict[str, dict[str, Any]]:
    """Exact averages over each set, with the training loss."""
    results = setup.evaluator.run(model, streams)
    return {name: {**values, "baselines": dict(streams[name].baselines)} for name, values in results.items()}


def examine_sets(
    setup: Setup, model: nn.Module, streams: Mapping[str, Stream], report: Report
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Loss by group and by position, each with its standard error; and the rows that were evaluated."""
    import numpy as np

    from rung.engine.examine import examine

    sets: dict[str, dict[str, Any]] = {}
    windows: list[dict[str, Any]] = []
    for name, stream in streams.items():
        found = examine(setup, model, name, stream, report)
        if found is None:  # the loss tells sums alone
            if model is not setup.state.model:
                raise UserError(f"{type(setup.recipe).__name__} cannot evaluate external weights", code="not-supported")
            return evaluate_sets(setup, model, streams), []
        sets[name] = found
        rows = [{"set": name, **place} for place in stream.places(np.arange(stream.num_rows))]
        dumped = json.dumps(rows, sort_keys=True).encode()
        found["windows_hash"] = hashlib.blake2b(dumped, digest_size=8).hexdigest()
        found["fingerprint"] = stream.fingerprint
        found["baselines"] = dict(stream.baselines)
        windows += rows
    return sets, windows


def file_of(out: Path, split: str, step: int | None, weights: str) -> Path:
    """Where the figures of a split are kept."""
    label = str(step)
    if step is None:
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", weights.removeprefix("folder ")).strip(".-") or "folder"
    return out / f"{split}-{label}.json"


def refuse_other_rows(file: Path, streams: Mapping[str, Stream]) -> None:
    """Raises UserError before other rows' figures replace the kept ones: a report would take them for the run's own."""
    try:
        sets = parse.loose_json(parse.read_bytes(file))["sets"]
        kept = {name: values.get("fingerprint") for name, values in sets.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if kept != {name: stream.fingerprint for name, stream in streams.items()}:
        raise UserError(
            f"{file} is of other rows than these keys give; keep these too with --out FOLDER", code="eval-exists"
        )


def write(found: Evaluation) -> None:
    """Writes all files, the figures last, and an event where they lie in the run's folder."""
    assert found.file is not None
    out, stem = found.file.parent, found.file.name.removesuffix(".json")
    curves: dict[str, Mapping[str, Any]] = {}  # loss by position: of each set, of its groups and parts
    for name, values in found.sets.items():
        if "positions" in values:
            curves[name] = values["positions"]
            inner = {**values.get("groups", {}), **values.get("target_parts", {})}
            curves |= {f"{name}/{part}": one["positions"] for part, one in inner.items()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        if found.windows:
            windows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.windows)
            write_whole(out / f"{stem}.windows.jsonl", windows.encode())
        if curves:
            text = io.StringIO()
            table = csv.writer(text, lineterminator="\n")
            table.writerow(["set", "position", "loss", "se", "targets"])
            for name, curve in curves.items():
                for place, row in enumerate(zip(curve["loss"], curve["se"], curve["targets"], strict=True), start=1):
                    table.writerow([name, place, *("" if value is None else value for value in row)])
            write_whole(out / f"{stem}.csv", text.getvalue().encode())

            from rung.report.plot import Line, Plot, svg

            groups = [name for name in curves if name not in found.sets]
            shown = [*(name for name in curves if name in found.sets), *(groups if len(groups) < MOST_CURVES else [])]
            lines = [Line(name, list(range(1, len(curves[name]["loss"]) + 1)), curves[name]["loss"]) for name in shown]
            title = f"Loss by position, {found.weights if found.run is None else found.run.id}, {found.split}"
            write_whole(out / f"{stem}.svg", svg(Plot(title, "n-th prediction of a row", lines)).encode())
        write_whole(found.file, (json.dumps(found.document(), indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror}; choose another place with --out", code="cannot-write"
        ) from error
    if found.run is not None and out == found.run.path / "evals":
        from rung.runs.record import append_event

        append_event(
            found.run.path, "examined", file=f"evals/{stem}.json", split=found.split, at=found.step,
            weights=found.weights,
        )  # fmt: skip
