"""What happened in a run, as blocks of a page: its log, its curves, its evals, and how it did against its parent.

Every number stands in the record, to all digits or rounded as ROUNDED says; a difference stands beside the two numbers
it is of. Who may conclude what is left to judge: two runs of one seed each show a difference here, and no verdict.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rung.compare.align import Outcome, evals_of, outcome
from rung.compare.blocks import Block, Bullets, Code, Heading, Paragraph, Picture, Spans, Table, bold, code
from rung.compare.difference import part_of
from rung.compare.lineage import Link, value_text
from rung.compare.plot import Line, Plot, svg
from rung.compare.reading import Column, columns
from rung.compare.reading import evals as recorded_evals
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


def log(run: Run) -> Iterator[Block]:
    """The last lines that a terminal showed."""
    faults = Faults()
    found = columns(run, _STEP_NAMES, faults)
    planned = part_of(run, "derived").get("num_steps")
    lines = []
    for place, step in zip(found["loss"].places[-_NUM_LINES:], found["loss"].steps[-_NUM_LINES:]):
        row = {name: _at(column, place) for name, column in found.items()}
        lines.append(step_line({"step": step, **row}, planned))
    if lines:
        yield Heading(2, ["log"])
        yield Code("\n".join(lines))
    if faults.broken:
        yield Paragraph([f"{faults.broken} broken lines of metrics were left out."])


def _at(column: Column, place: int) -> float | None:
    """The number of a row, None where it has none."""
    i = bisect_left(column.places, place)
    return column.values[i] if i < len(column.places) and column.places[i] == place else None


def step_line(row: Mapping[str, Any], planned: Any) -> str:
    """A row of training as one line; what was not recorded is left out."""
    parts = [f"step {row['step']}{f'/{value_text(planned)}' if planned else ''}"]
    for name, width in (("loss", 7), ("norm", 6), ("lr", 0)):
        if row[name] is not None:
            parts.append(f"{name} {rounded(row[name], name):<{width}}")
    if row["skipped"]:
        return "  ".join([*parts, "not applied"])
    targets, seconds, waited = row["targets"], row["step_s"], row["wait_s"]
    if targets is not None and seconds:
        parts.append(f"{count(targets / seconds)} targets/s")
    if row["mfu"] is not None:
        parts.append(f"mfu {rounded(100 * row['mfu'], 'mfu')} %")
    if waited is not None and seconds:
        parts.append(f"wait {rounded(100 * waited / seconds, 'wait')} %")
    return "  ".join(parts).rstrip()


def rounded(value: float, name: str) -> str:
    """A number as ROUNDED says; one that is not finite as it is."""
    return format(value, ROUNDED[name]) if math.isfinite(value) else value_text(float(value)).replace("Infinity", "inf")


def curves(run: Run, drawings: dict[str, str]) -> Iterator[Block]:
    """Loss and learning rate; the files are put into `drawings`."""
    yield Heading(2, ["result"])
    found = {name: Line(name, c.steps, c.values) for name, c in columns(run, ("loss", "lr")).items()}
    lines = [replace(found["loss"], name="training")] if len(found["loss"].x) else []
    lines += eval_lines(run)
    if lines:
        yield drawn(drawings, "loss", Plot(f"{run.id}: loss", "step", lines, is_wide(lines)))
    if len(found["lr"].x):
        yield drawn(drawings, "lr", Plot(f"{run.id}: learning rate", "step", [found["lr"]]))
    if not lines:
        yield Paragraph(["No loss was recorded."])


def eval_lines(run: Run, prefix: str = "") -> list[Line]:
    """The loss of each eval set."""
    losses = [(name.removesuffix("/loss"), curve) for name, curve in evals_of(run).items() if name.endswith("/loss")]
    return [Line(prefix + name, curve.x, curve.values, len(curve.x) <= _MOST_DOTS) for name, curve in losses]


def is_wide(lines: Sequence[Line]) -> bool:
    """Whether values reach so far apart that only a logarithmic axis shows them."""
    values = [y for line in lines for y in line.y if y is not None and math.isfinite(y)]
    return bool(values) and min(values) > 0 and max(values) > _LOG_RATIO * min(values)


def drawn(drawings: dict[str, str], name: str, plot: Plot) -> Picture:
    drawings[f"{name}.svg"] = svg(plot)
    return Picture(f"{name}.svg", plot.title, drawings[f"{name}.svg"])


def against(found: Link) -> Iterator[Block]:
    """What became of the run beside what became of its parent."""
    if found.parent is None:
        return
    result = outcome(found.parent, found.run)
    is_other = any(d.weight == "metric" for d in found.changes)
    if is_other:
        yield Paragraph([f"{result.metric} counts something else in the two runs: the figures cannot be compared."])
    rows = list(_outcome_rows(result, is_other))
    if rows:
        ids = [one_line(found.parent.id), one_line(found.run.id)]
        yield Table([one_line(result.metric), *ids, "difference"], rows, numeric=(1, 2, 3))
    if result.problems:
        yield Bullets([[problem] for problem in result.problems])


def _outcome_rows(result: Outcome, is_other: bool) -> Iterator[list[Spans | str]]:
    best, last = (result.a.best, result.b.best), (result.a.final, result.b.final)
    for name, (a, b) in {"best and last": last}.items() if best == last else {"best": best, "last": last}.items():
        if a is not None and b is not None:
            steps = dict.fromkeys([_whole(a.step), _whole(b.step)])
            yield [f"{name}, at step {' and '.join(steps)}", *_pair(a.value, b.value, is_other)]
    if result.at_steps and len({end.step for end in last if end is not None}) > 1:
        shared = result.at_steps[-1]
        yield [f"at step {_whole(shared.at)}", *_pair(shared.a, shared.b, is_other)]
    if result.at_targets and result.a.targets != result.b.targets:
        shared = result.at_targets[-1]
        yield [f"at {_whole(shared.at)} targets", *_pair(shared.a, shared.b, is_other)]
    rates = (result.a.targets_per_s, result.b.targets_per_s)
    if rates[0] is not None and rates[1] is not None:
        yield ["targets/s, median", *(value_text(rate) for rate in rates), ""]


def _pair(a: float, b: float, is_other: bool) -> list[Spans | str]:
    is_known = math.isfinite(a) and math.isfinite(b) and not is_other
    return [value_text(a), value_text(b), rounded(b - a, "difference") if is_known else "-"]


def _whole(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else value_text(value)


def evals(run: Run) -> Iterator[Block]:
    """A row per eval, with all digits; the best in bold."""
    found = recorded_evals(run)
    if not found:
        return
    names = [name for row in found for name, value in row.items() if isinstance(value, int | float) and name != "step"]
    ordered = sorted(dict.fromkeys(names), key=lambda name: (name != "loss", name != "loss_se"))
    shown = ordered[:_MOST_COLUMNS]
    kept = _kept(len(found), [i for i, row in enumerate(found) if _is_best(run, row)])
    yield Heading(3, ["evals"])
    rows = [_eval_row(found[i], shown, _is_best(run, found[i])) for i in kept]
    yield Table(["step", "set", *map(one_line, shown)], rows, numeric=(0, *range(2, 2 + len(shown))))
    left_out = [f"{len(kept)} of {len(found)} evals are shown"] if len(kept) < len(found) else []
    left_out += [f"{len(shown)} of {len(ordered)} values of each are shown"] if len(shown) < len(ordered) else []
    if left_out:
        yield Paragraph([f"{'; '.join(left_out)}: all are in ", code("events.ndjson"), "."])


def _eval_row(row: Mapping[str, Any], names: Sequence[str], is_best: bool) -> list[Spans | str]:
    cells: list[Spans | str] = [str(row["step"]), one_line(str(row["set"]))]
    for name in names:
        text = value_text(row[name]) if row.get(name) is not None else ""
        cells.append([bold(text)] if is_best and name == "loss" else text)
    return cells


def _is_best(run: Run, row: Mapping[str, Any]) -> bool:
    best = run.best or {}
    return (row["step"], row["set"]) == (best.get("step"), best.get("set"))


def _kept(num: int, always: Sequence[int]) -> list[int]:
    """Rows to show: all, or some that are spread evenly, with the first, the last and the best."""
    if num <= _MOST_EVALS:
        return list(range(num))
    every = math.ceil(num / (_MOST_EVALS - 2))
    return sorted({*range(0, num, every), *always, num - 1})
