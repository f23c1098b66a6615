"""What happened in a run, as blocks of a page: its log, its curves, its evals, and how it did against its parent.

Every number stands in the record, to all digits or rounded as ROUNDED says; a difference stands beside the two numbers
it is of. Who may conclude what is left to judge: two runs of one seed each show a difference here, and no verdict.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rung.compare.align import outcome
from rung.compare.lineage import Link, value_text
from rung.compare.reading import columns, evals, evals_of, part_of
from rung.report.blocks import Block, Bullets, Code, Heading, Paragraph, Picture, Spans, Table, bold, code
from rung.report.plot import Line, Plot, svg
from rung.runs.metrics import Faults
from rung.runs.query import Run
from rung.text import one_line
from rung.units import count

# Every rounding on a page besides `count` for targets a second; all other numbers have all their digits.
ROUNDED = {"loss": ".4f", "norm": ".3g", "lr": ".2e", "mfu": ".1f", "wait": ".1f", "difference": "+.6g"}
_STEP_NAMES = ("loss", "norm", "lr", "targets", "step_s", "wait_s", "mfu", "skipped")
_NUM_LINES = 10  # of the log
_MOST_EVALS = 60  # rows of the table of evals
_MOST_COLUMNS = 12
_LOG_RATIO = 50  # from lowest to highest: more is not seen on a plain axis
_MOST_DOTS = 100  # evals of a curve that get a dot each


def log_blocks(run: Run) -> Iterator[Block]:
    """The last lines that a terminal showed."""
    faults = Faults()
    found = columns(run, _STEP_NAMES, faults)
    planned = part_of(run, "derived").get("num_steps")
    lines = []
    for row, step in zip(found["loss"].rows[-_NUM_LINES:], found["loss"].steps[-_NUM_LINES:]):
        values: dict[str, float | None] = {}
        for name, curve in found.items():
            i = bisect_left(curve.rows, row)
            values[name] = curve.values[i] if i < len(curve.rows) and curve.rows[i] == row else None
        lines.append(_step_line(step, values, planned))
    if lines:
        yield Heading(2, ["log"])
        yield Code("\n".join(lines))
    if faults.broken:
        yield Paragraph([f"{faults.broken} broken lines of metrics were left out."])


def _step_line(step: float, row: Mapping[str, Any], planned: Any) -> str:
    """A row of training as one line; what was not recorded is left out."""
    parts = [f"step {step}{f'/{value_text(planned)}' if planned else ''}"]
    for name, width in (("loss", 7), ("norm", 6), ("lr", 0)):
        if row[name] is not None:
            parts.append(f"{name} {_rounded(row[name], name):<{width}}")
    if row["skipped"]:
        return "  ".join([*parts, "not applied"])
    targets, seconds, waited = row["targets"], row["step_s"], row["wait_s"]
    if targets is not None and seconds:
        parts.append(f"{count(targets / seconds)} targets/s")
    if row["mfu"] is not None:
        parts.append(f"mfu {_rounded(100 * row['mfu'], 'mfu')} %")
    if waited is not None and seconds:
        parts.append(f"wait {_rounded(100 * waited / seconds, 'wait')} %")
    return "  ".join(parts).rstrip()


def _rounded(value: float, name: str) -> str:
    """A number as ROUNDED says; one that is not finite as it is."""
    return format(value, ROUNDED[name]) if math.isfinite(value) else value_text(float(value)).replace("Infinity", "inf")


def curve_blocks(run: Run) -> Iterator[Block]:
    """Loss and learning rate."""
    yield Heading(2, ["result"])
    found = {name: Line(name, c.steps, c.values) for name, c in columns(run, ("loss", "lr")).items()}
    lines = [replace(found["loss"], name="training")] if len(found["loss"].x) else []
    lines += eval_lines(run)
    if lines:
        yield drawn("loss", f"{run.id}: loss", lines)
    if len(found["lr"].x):
        yield drawn("lr", f"{run.id}: learning rate", [found["lr"]], is_log=False)
    if not lines:
        yield Paragraph(["No loss was recorded."])


def eval_lines(run: Run, prefix: str = "") -> list[Line]:
    """The loss of each eval set."""
    losses = [(name.removesuffix("/loss"), curve) for name, curve in evals_of(run).items() if name.endswith("/loss")]
    return [Line(prefix + name, curve.steps, curve.values, len(curve.steps) <= _MOST_DOTS) for name, curve in losses]


def drawn(name: str, title: str, lines: list[Line], is_log: bool | None = None) -> Picture:
    """A plot over steps; unless it is said, on a logarithmic axis where a plain one would not show all values."""
    if is_log is None:
        values = [y for line in lines for y in line.y if y is not None and math.isfinite(y)]
        is_log = bool(values) and min(values) > 0 and max(values) > _LOG_RATIO * min(values)
    return Picture(f"{name}.svg", title, svg(Plot(title, "step", lines, is_log)))


def parent_blocks(link: Link, has_heading: bool = False) -> Iterator[Block]:
    """How the run did beside its parent."""
    if link.parent is None:
        return
    if has_heading:
        yield Heading(3, [f"against {one_line(link.parent.id)}"])
    result = outcome(link.parent, link.run)
    is_other = any(d.weight == "metric" for d in link.changes)
    if is_other:
        yield Paragraph([f"{result.metric} counts something else in the two runs: the figures cannot be compared."])
    rows: list[list[Spans | str]] = []

    def add(name: str, a: float, b: float) -> None:
        is_known = math.isfinite(a) and math.isfinite(b) and not is_other
        rows.append([name, value_text(a), value_text(b), _rounded(b - a, "difference") if is_known else "-"])

    best, last = (result.a.best, result.b.best), (result.a.final, result.b.final)
    for name, (a, b) in {"best and last": last}.items() if best == last else {"best": best, "last": last}.items():
        if a is not None and b is not None:
            steps = dict.fromkeys([_whole(a.step), _whole(b.step)])
            add(f"{name}, at step {' and '.join(steps)}", a.value, b.value)
    if result.at_steps and len({end.step for end in last if end is not None}) > 1:
        shared = result.at_steps[-1]
        add(f"at step {_whole(shared.at)}", shared.a, shared.b)
    if result.at_targets and result.a.targets != result.b.targets:
        shared = result.at_targets[-1]
        add(f"at {_whole(shared.at)} targets", shared.a, shared.b)
    rates = (result.a.targets_per_s, result.b.targets_per_s)
    if rates[0] is not None and rates[1] is not None:
        rows.append(["targets/s, median", *(value_text(rate) for rate in rates), ""])
    if rows:
        ids = [one_line(link.parent.id), one_line(link.run.id)]
        yield Table([one_line(result.metric), *ids, "difference"], rows, numeric=(1, 2, 3))
    if result.problems:
        yield Bullets([[problem] for problem in result.problems])


def _whole(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else value_text(value)


def eval_blocks(run: Run) -> Iterator[Block]:
    """A row per eval, with all digits; the best in bold."""
    found = evals(run)
    if not found:
        return
    names = [name for row in found for name, value in row.items() if isinstance(value, int | float) and name != "step"]
    ordered = sorted(dict.fromkeys(names), key=lambda name: (name != "loss", name != "loss_se"))
    shown = ordered[:_MOST_COLUMNS]
    best = run.best or {}
    is_best = [(row["step"], row["set"]) == (best.get("step"), best.get("set")) for row in found]
    # All rows, or some that are spread evenly, with the first, the last and the best.
    every = 1 if len(found) <= _MOST_EVALS else math.ceil(len(found) / (_MOST_EVALS - 2))
    kept = sorted({*range(0, len(found), every), *(i for i, is_it in enumerate(is_best) if is_it), len(found) - 1})

    rows: list[list[Spans | str]] = []
    for i in kept:
        cells: list[Spans | str] = [str(found[i]["step"]), one_line(str(found[i]["set"]))]
        for name in shown:
            text = value_text(found[i][name]) if found[i].get(name) is not None else ""
            cells.append([bold(text)] if is_best[i] and name == "loss" else text)
        rows.append(cells)
    yield Heading(3, ["evals"])
    yield Table(["step", "set", *map(one_line, shown)], rows, numeric=(0, *range(2, 2 + len(shown))))
    left_out = [f"{len(kept)} of {len(found)} evals are shown"] if len(kept) < len(found) else []
    left_out += [f"{len(shown)} of {len(ordered)} values of each are shown"] if len(shown) < len(ordered) else []
    if left_out:
        yield Paragraph([f"{'; '.join(left_out)}: all are in ", code("events.ndjson"), "."])
