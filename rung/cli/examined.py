"""What `rung eval --split` finds: kept as files, shown as a table.

    <split>-<step>.json           all figures; the sweep's report reads them
    <split>-<step>.csv            loss by position, of the whole set and of each group
    <split>-<step>.svg            the same as a curve
    <split>-<step>.windows.jsonl  the rows that were evaluated, one a line

A model of others has its name in place of the step.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from torch import nn

from rung.cli.progress import reporter
from rung.cli.table import print_table
from rung.errors import UserError
from rung.files import write_whole
from rung.text import one_line

if TYPE_CHECKING:
    from rung.engine.build import Setup
    from rung.recipe import Stream

SCHEMA = 1
MOST_CURVES = 6  # of groups in the drawing; all of them are in the CSV


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and where what is found goes."""

    run: str | None  # its id
    path: Path | None  # of the run
    step: int | None
    weights: str  # in words: "checkpoint 400", "folder pythia-70m"
    out: Path

    @property
    def label(self) -> str:
        """What tells it apart in the names of files."""
        if self.step is not None:
            return str(self.step)
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.weights.removeprefix("folder ")).strip(".-") or "folder"

    def check_rows(self, split: str, streams: Mapping[str, Stream]) -> None:
        """Refuses to put figures of other rows in place of what is kept: a report would take them for the run's own."""
        file = self.out / f"{split}-{self.label}.json"
        try:
            sets = json.loads(file.read_bytes())["sets"]
            kept = {name: values.get("fingerprint") for name, values in sets.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        if kept != {name: stream.fingerprint for name, stream in streams.items()}:
            raise UserError(f"{file} is of other rows than these keys give; keep these too with --out FOLDER")


@dataclass(frozen=True)
class Examined:
    subject: Subject
    split: str
    sets: dict[str, dict[str, Any]]
    windows: list[dict[str, Any]]
    baselines: dict[str, dict[str, float]]

    @classmethod
    def of(
        cls, setup: Setup, model: nn.Module, streams: Mapping[str, Stream], subject: Subject, split: str
    ) -> Examined:
        from rung.engine.examine import can_examine, examine

        if not can_examine(setup.recipe):
            if model is not setup.state.model:
                raise UserError(f"{type(setup.recipe).__name__} cannot evaluate the weights of others")
            plain = {name: dict(values) for name, values in setup.evaluator.run(model, streams).items()}
            return cls(subject, split, plain, [], {name: dict(s.baselines) for name, s in streams.items()})
        report, close = reporter()
        sets: dict[str, dict[str, Any]] = {}
        windows: list[dict[str, Any]] = []
        try:
            for name, stream in streams.items():
                sets[name] = examine(setup, model, name, stream, report)
                rows = [{"set": name, **place} for place in stream.places(np.arange(stream.num_rows))]
                sets[name]["windows_hash"] = _hash(rows)
                sets[name]["fingerprint"] = stream.fingerprint
                if model is setup.state.model:  # the loss knows no other
                    sets[name]["parts"] = _parts(setup.evaluator.run(model, {name: stream})[name])
                windows += rows
        finally:
            close()
        return cls(subject, split, sets, windows, {name: dict(s.baselines) for name, s in streams.items()})

    def document(self) -> dict[str, Any]:
        subject = self.subject
        return {
            "schema": SCHEMA,
            "run": subject.run,
            "split": self.split,
            "step": subject.step,
            "weights": subject.weights,
            "sets": {name: {**values, "baselines": self.baselines[name]} for name, values in self.sets.items()},
        }


def _parts(values: Mapping[str, float]) -> dict[str, float]:
    """The parts of the loss and what the recipe measures besides it."""
    return {name: value for name, value in values.items() if name not in ("loss", "loss_se", "targets")}


def write_examined(found: Examined) -> None:
    subject = found.subject
    stem = f"{found.split}-{subject.label}"
    try:
        subject.out.mkdir(parents=True, exist_ok=True)
        if found.windows:
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.windows)
            write_whole(subject.out / f"{stem}.windows.jsonl", lines.encode())
        if curves := _curves(found):
            write_whole(subject.out / f"{stem}.csv", _csv(curves).encode())
            write_whole(subject.out / f"{stem}.svg", _drawing(found, curves).encode())
        write_whole(subject.out / f"{stem}.json", (json.dumps(found.document(), indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"cannot write {subject.out}: {error.strerror}; choose another place with --out") from error
    if subject.path is not None and subject.out == subject.path / "evals":
        from rung.runs.record import append_event

        append_event(
            subject.path, "examined", file=f"evals/{stem}.json", split=found.split, at=subject.step,
            weights=subject.weights,
        )  # fmt: skip


def print_examined(found: Examined, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found.document(), indent=1))
        return
    subject = found.subject
    click.echo(f"{subject.run or 'no run'}, {one_line(subject.weights)}, split {found.split}")
    for name, values in found.sets.items():
        _print_set(name, values, found.baselines[name])
    click.echo(f"in {subject.out / f'{found.split}-{subject.label}.json'}")


def _print_set(name: str, values: Mapping[str, Any], baselines: Mapping[str, float]) -> None:
    head = ["", "loss", "s.e.", "perplexity", "targets", "rows"]
    rows = [[name, *_row(values)], *([one_line(group), *_row(one)] for group, one in values.get("groups", {}).items())]
    mean = values.get("mean_of_groups")
    if mean and mean["loss"] is not None:
        rows.append(["mean of groups", _number(mean["loss"]), _number(mean["se"]), "", "", ""])
    print_table(head, rows, numeric=range(1, 6))
    if parts := values.get("parts"):
        click.echo(f"  {', '.join(f'{name} {value:.4f}' for name, value in parts.items())}")
    positions = values.get("positions", {}).get("loss", [])
    known = [(place, loss) for place, loss in enumerate(positions, start=1) if loss is not None]
    if known:
        chosen = sorted({1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, known[-1][0]} & {place for place, _ in known})
        told = ", ".join(f"{place}: {positions[place - 1]:.3f}" for place in chosen)
        click.echo(f"  loss of the n-th prediction of a row: {told}")
    if control := values.get("control"):
        labels, shuffled = control["labels"], control["shuffled"]
        if control["deals"]:
            click.echo(
                f"  groups lie {labels['spread']:.4f} nats apart (largest {labels['largest_z']:.1f} s.e.); with labels "
                f"at random {shuffled['spread']:.4f} ({shuffled['largest_z']:.1f}), and as clearly as this in "
                f"{control['as_far']} of {control['deals']} deals"
            )
    for what, value in baselines.items():
        click.echo(f"  {what} {value:.4f} (a baseline of this set)")


def _row(values: Mapping[str, Any]) -> list[str]:
    perplexity, rows = values.get("perplexity"), values.get("rows")
    return [
        _number(values["loss"]),
        _number(values.get("se", values.get("loss_se"))),
        "" if perplexity is None else f"{perplexity:.2f}",
        f"{values['targets']:.0f}",
        "" if rows is None else str(rows),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _curves(found: Examined) -> dict[str, Mapping[str, Any]]:
    """Loss by position: of each set, and of each group in it."""
    curves: dict[str, Mapping[str, Any]] = {}
    for name, values in found.sets.items():
        if "positions" in values:
            curves[name] = values["positions"]
            curves |= {f"{name}/{group}": one["positions"] for group, one in values.get("groups", {}).items()}
    return curves


def _csv(curves: Mapping[str, Mapping[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["set", "position", "loss", "se", "targets"])
    for name, curve in curves.items():
        for place, row in enumerate(zip(curve["loss"], curve["se"], curve["targets"], strict=True), start=1):
            table.writerow([name, place, *("" if value is None else value for value in row)])
    return text.getvalue()


def _drawing(found: Examined, curves: Mapping[str, Mapping[str, Any]]) -> str:
    from rung.compare.plot import Line, Plot, svg

    names = [name for name in curves if name in found.sets]
    groups = [name for name in curves if name not in found.sets]
    shown = [*names, *groups] if len(groups) < MOST_CURVES else names
    lines = [Line(name, list(range(1, len(curves[name]["loss"]) + 1)), curves[name]["loss"]) for name in shown]
    title = f"Loss by position, {found.subject.run or found.subject.weights}, {found.split}"
    return svg(Plot(title, "n-th prediction of a row", lines))


def _hash(rows: list[dict[str, Any]]) -> str:
    return hashlib.blake2b(json.dumps(rows, sort_keys=True).encode(), digest_size=8).hexdigest()
