"""The page of a run and that of an experiment, written from the records: what changed, why, what happened.

The same records give the same bytes: no current date, no path of this machine. Only `status` may change while the files
do not, as long as a run is in progress. Every number stands in the record, to all digits or rounded as ROUNDED says; a
difference stands beside the two numbers it is of, and what is computed of an epoch has all its digits below the table.
Two runs of one seed each show a difference and no verdict: judge says who may conclude what.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rung.compare.align import outcome
from rung.compare.epochs import Epoch, epochs, epochs_json
from rung.compare.factors import strictness
from rung.compare.lineage import (
    Link,
    chain,
    change_spans,
    find_parents,
    lines_of,
    link_spans,
    settings,
    text_of,
    unreadable,
    value_text,
    verdict_of,
    without_root,
)
from rung.compare.reading import (
    UNREADABLE,
    Curve,
    columns,
    evals,
    evals_of,
    list_of,
    mapping,
    part_of,
)
from rung.report.blocks import (
    TEXTS,
    Block,
    Bullets,
    Code,
    File,
    Heading,
    Page,
    Paragraph,
    Picture,
    Quote,
    Span,
    Spans,
    Table,
    bold,
    code,
    joined,
    link,
    struck,
)
from rung.report.plot import Line, Plot, running_mean, svg
from rung.runs.fields import groups_over_seeds
from rung.runs.files import to_json
from rung.runs.metrics import Faults, number_of
from rung.runs.query import Run
from rung.text import one_line
from rung.units import count, plural

# Every rounding on the page of a run besides `count` for targets a second; all other numbers have all their digits.
ROUNDED = {
    "loss": ".4f", "norm": ".3g", "lr": ".2e", "mfu": ".1f", "wait": ".1f", "difference": "+.6g", "of an epoch": ".6g",
}  # fmt: skip
# Besides those of epochs and codebooks, mean and standard deviation over seeds are the only figures that no record
# holds; they stand beside their runs.
MEAN = ".6g"
_STEP_NAMES = ("loss", "norm", "lr", "targets", "step_s", "wait_s", "mfu", "skipped")
_NUM_LINES = 10  # of the log
_MOST_EVALS = 60  # rows of the table of evals
_MOST_COLUMNS = 12
_MOST_EPOCHS = 40  # rows of the table of epochs
_MOST_EPOCHS_OF_MANY = 12  # of that of each run of an experiment
_MOST_EPOCH_EVALS = 6  # columns of both
_LOG_RATIO = 50  # from lowest to highest: more is not seen on a plain axis
_MOST_DOTS = 100  # evals of a curve that get a dot each
_MOST_TEXT_BYTES = 20_000  # of a sample that is text and stands on the page
OWN_LOOP = "own loop"  # the recipe of a script
_LEAST_SMOOTHED = 100  # steps
_MOST_CURVES = 6  # in one drawing: as many as there are colours


@dataclass
class ReportPage:
    page: Page
    epochs: list[Epoch] = field(default_factory=list)

    @property
    def drawings(self) -> dict[str, str]:
        return self.page.drawings

    @property
    def files(self) -> dict[str, str]:
        """What lies beside the page as Markdown: file name -> text."""
        return {**self.drawings, **({"epochs.json": epochs_json(self.epochs)} if self.epochs else {})}


def run_page(run: Run, folder: Path | None = None, has_files: bool = False) -> ReportPage:
    """The page of a run, for a file in `folder`, which is the run's own unless named; with `has_files` samples are in.

    A part of the record that cannot be read is reported in its place.
    """
    where = os.path.relpath(run.path, folder).replace(os.sep, "/") if folder is not None else "."
    where = "" if where == "." else f"{where}/"
    report = ReportPage(Page(one_line(run.id)))
    links = chain(run)
    # The answer first: what came of it, against what, what was changed, how it went, what it makes. Then the evidence.
    for section in (
        _head(links[-1]),
        _result(links[-1]),
        _samples(run, where, has_files),
        _findings(run),
        _changes(links[-1]),
        _against_parent(links[-1], has_heading=True),
        _curves(run),
        _epochs(run),
        _evals(run),
        _codebooks(run),
        _settings(links),
        _notes(run, Heading(2, ["notes"])),
        _log(run),
        _reproduce(links, where),
    ):
        try:
            report.page.blocks += section
        except UNREADABLE as error:
            report.page.blocks.append(Paragraph([unreadable(run, error)]))
    with contextlib.suppress(*UNREADABLE):  # reported in their place
        report.epochs += epochs(run)
    return report


def _head(found: Link) -> Iterator[Block]:
    run, document = found.run, found.run.document
    derived = part_of(run, "derived")
    planned = derived.get("num_steps")
    of_all = f" of {value_text(planned)}" if planned is not None else ""
    status = [run.status, "before its first step" if run.step is None else f"at step {run.step}{of_all}"]
    times = [f"{word} {value_text(document[key])}" for word, key in (("began", "created"), ("ended", "ended"))
             if document.get(key)]  # fmt: skip
    items: list[Spans] = [[bold("status"), ": ", ", ".join([*status, *times])]]
    if document.get("reason"):
        items.append([bold("reason"), ": ", one_line(text_of(document["reason"]))])

    what: list[Span | str] = ["recipe ", code(value_text(document.get("recipe")))]
    if document.get("preset"):
        what += [", preset ", code(value_text(document["preset"]))]
    what.append(f", seed {value_text(document.get('seed'))}")
    if derived.get("parameters") is not None:
        what.append(f", {value_text(derived['parameters'])} parameters")
    if derived.get("device"):
        what.append(f", {' '.join(value_text(derived[key]) for key in ('device', 'dtype') if derived.get(key))}")
    items.append([bold("what"), ": ", *what])

    if found.parent is not None:
        items.append([bold("current change"), ": ", *link_spans(found), " since ", code(found.parent.id)])
    else:
        items.append([bold("current change"), f": a first run{f' ({found.problem})' if found.problem else ''}"])
    if tags := list_of(document.get("tags")):
        items.append([bold("tags"), ": ", *joined([[code(one_line(str(tag)))] for tag in tags])])
    ab = part_of(run, "ab")
    if ab.get("id"):
        items.append([bold("ab"), f": {text_of(ab.get('arm'))} of {text_of(ab['id'])}, base {text_of(ab.get('base'))}"])
    yield Bullets(items)
    yield from _why(run)
    yield from _verdict(run)


def _why(run: Run) -> Iterator[Block]:
    if why := text_of(run.document.get("why")).strip():
        yield Paragraph([bold("why"), ":"])
        yield Quote(why)


def _verdict(run: Run) -> Iterator[Block]:
    """What a person concluded."""
    word, text = verdict_of(run)
    when = date(part_of(run, "verdict").get("unix_s"))
    if word or text:
        yield Paragraph([bold("verdict"), ": ", *([bold(word)] if word else []), *([f" ({when})"] if when else [])])
    if text.strip():
        yield Quote(text)


def _findings(run: Run) -> Iterator[Block]:
    """What the doctor says is at least worth a warning."""
    from rung.doctor.history import read
    from rung.doctor.report import report_of, sentence

    found = report_of(read(run)).at_least("warn")
    if found:
        yield Heading(2, ["findings"])
    for finding in found:
        since = f" Since step {finding.since}." if finding.since is not None else ""
        name = bold(f"{finding.rule} {finding.severity}")
        yield Paragraph([name, f" {finding.title}: {sentence(finding.what)}{since}"])
        items: list[Spans] = [[text] for text in finding.evidence]
        items += [["try: ", finding.remedy]] if finding.remedy else []
        if command := finding.command(run.id):
            items.append([code(command)])
        if items:
            yield Bullets(items)


def _changes(found: Link) -> Iterator[Block]:
    """All that differs from the parent, and whether it was one change."""
    comparison = found.comparison
    if found.parent is None or comparison is None:
        return
    yield Heading(2, [f"change since {one_line(found.parent.id)}"])
    yield Paragraph([without_root(found.run, strictness(comparison).words), "."])
    if found.problem:
        yield Paragraph([found.problem, "."])
    rows: list[list[Spans | str]] = []
    for d in comparison.differences:
        if d.weight == "note":
            continue
        values: list[Spans | str] = ["", ""]
        if d.has_values:
            values = [[code(value_text(d.before))], [code(value_text(d.after))]]
        source = f"set by {d.source_after}" if d.part == "config" and d.source_after else ""
        detail = without_root(found.run, "; ".join(filter(None, [d.detail, source])))
        rows.append([d.part, [code(d.name)], *values, d.weight, detail])
    if rows:
        yield Table(["part", "what", "before", "after", "weight", "in words"], rows)
    if comparison.same:
        yield Paragraph([f"The same in both: {', '.join(comparison.same)}."])
    if comparison.unknown:
        yield Paragraph([f"Not looked at: {without_root(found.run, ', '.join(comparison.unknown))}."])
    notes = [*comparison.notes, *comparison.code.notes]
    if notes:
        yield Bullets([[without_root(found.run, text)] for text in notes])


def _settings(links: Sequence[Link], title: str = "experimental settings") -> Iterator[Block]:
    """What was set along the chain: what still holds from its start, then each change; new in bold, superseded struck.

    What the start had set and a later run changed is shown by that change, from -> to.
    """
    found = settings(links)
    if not found:
        return
    yield Heading(2, [title])
    first = links[0]
    if first.problem and first.parent is None:
        yield Paragraph([f"Known from {one_line(first.run.id)} on: {first.problem}."])
    starts: dict[str, list[Spans]] = {}
    items: list[Spans] = []
    for one in found:
        d = one.difference
        if one.is_start and one.state != "holds":
            continue
        if one.is_start:
            source = "" if d.source_after.startswith("run ") else f", {d.source_after}"
            starts.setdefault(f"{one.run}{source}", []).append([code(d.name), " ", code(value_text(d.after))])
            continue
        spans = ["code of ", *change_spans(d)] if d.part == "code" else change_spans(d)
        if one.state == "new":
            items.append([bold(*spans)])
        elif one.state in ("reverted", "replaced"):
            items.append([struck(*spans), f" ({one.run}; {one.state} by {one.by})"])
        else:
            items.append([*spans, f" ({one.run})"])
    yield Bullets([*([f"{source}: ", *joined(parts)] for source, parts in starts.items()), *items])


def _log(run: Run) -> Iterator[Block]:
    """The last lines that a terminal showed; what was not recorded is left out."""
    faults = Faults()
    found = columns(run, _STEP_NAMES, faults)
    planned = part_of(run, "derived").get("num_steps")
    of_all = f"/{value_text(planned)}" if planned else ""
    lines = []
    for number, step in zip(found["loss"].rows[-_NUM_LINES:], found["loss"].steps[-_NUM_LINES:]):
        row: dict[str, float | None] = {}
        for name, curve in found.items():
            i = bisect_left(curve.rows, number)
            row[name] = curve.values[i] if i < len(curve.rows) and curve.rows[i] == number else None
        targets, seconds, waited, mfu = (row[name] for name in ("targets", "step_s", "wait_s", "mfu"))
        parts = [f"step {step}{of_all}"]
        for name, width in (("loss", 7), ("norm", 6), ("lr", 0)):
            if (value := row[name]) is not None:
                parts.append(f"{name} {_rounded(value, name):<{width}}")
        if row["skipped"]:
            parts.append("not applied")
        else:
            if targets is not None and seconds:
                parts.append(f"{count(targets / seconds)} targets/s")
            if mfu is not None:
                parts.append(f"mfu {_rounded(100 * mfu, 'mfu')} %")
            if waited is not None and seconds:
                parts.append(f"wait {_rounded(100 * waited / seconds, 'wait')} %")
        lines.append("  ".join(parts).rstrip())
    if lines:
        yield Heading(2, ["log"])
        yield Code("\n".join(lines))
    if faults.broken:
        yield Paragraph([f"{faults.broken} broken lines of metrics were left out."])


def _rounded(value: float, name: str) -> str:
    """A number as ROUNDED says; one that is not finite as it is."""
    return format(value, ROUNDED[name]) if math.isfinite(value) else value_text(float(value)).replace("Infinity", "inf")


def _result(found: Link) -> Iterator[Block]:
    """The best eval beside what a trivial model loses on the same set and the best of the parent; the loss."""
    run, best = found.run, found.run.best
    yield Heading(2, ["result"])
    baselines = mapping(mapping(run.data().get(str((best or {}).get("set")))).get("baselines"))
    if best is not None:
        yield Paragraph([bold("best"), f": {_best(run)}."])
        rows: list[list[Spans | str]] = [[[bold(run.id)], [bold(_best_loss(run))]]]
        parent = found.parent
        if parent is not None and (parent.best or {}).get("set") == best.get("set"):
            is_other = any(d.weight == "metric" for d in found.changes)
            rows.append([f"{parent.id}{', which counts something else' if is_other else ''}", _best_loss(parent)])
        rows += [[f"{name}, a trivial model", _loss(loss)] for name, loss in baselines.items()]
        if len(rows) > 1:
            yield Table(["", f"{value_text(best.get('set'))} loss"], rows, numeric=(1,))
    loss = columns(run, ("loss",))["loss"]
    lines = _smoothed("training", loss) + _eval_lines(run)
    if not lines:
        yield Paragraph(["No loss was recorded."])
        return
    ends = [min(min(line.x) for line in lines), max(max(line.x) for line in lines)]
    lines += [Line(name, ends, [float(at)] * 2) for name, at in baselines.items() if isinstance(at, int | float)]
    yield _drawn("loss", f"{run.id}: loss", lines)


def _smoothed(name: str, curve: Curve) -> list[Line]:
    """A curve of every step: as it was recorded, behind its running mean, of which a long one is drawn."""
    if len(curve.steps) < _LEAST_SMOOTHED:
        return [Line(name, curve.steps, curve.values)] if len(curve.steps) else []
    mean = running_mean(curve.values, len(curve.values) / 50)
    return [Line("", curve.steps, curve.values, is_faint=True), Line(name, curve.steps, mean)]


def _curves(run: Run) -> Iterator[Block]:
    """How it went: norm, learning rate, speed, memory, and the parts of the loss."""
    drawings: list[Block] = []
    names = ("norm", "norm_clipped", "lr", "targets", "step_s", "memory_mb", "rss_mb")
    norm, clipped, lr, targets, seconds, memory, rss = columns(run, names).values()
    lines = _smoothed("norm", norm)
    lines += _smoothed("after clipping", clipped) if clipped.values != norm.values else []
    if lines:
        drawings.append(_drawn("norm", f"{run.id}: gradient norm", lines))
    if len(lr.steps):
        drawings.append(_drawn("lr", f"{run.id}: learning rate", [Line("lr", lr.steps, lr.values)], is_log=False))
    took = dict(zip(seconds.rows, seconds.values))
    timed = [(step, count_ / took[row]) for row, step, count_ in zip(targets.rows, targets.steps, targets.values)
             if took.get(row)]  # fmt: skip
    if timed:
        speed = Curve([step for step, _ in timed], [rate for _, rate in timed])
        drawings.append(_drawn("speed", f"{run.id}: targets a second", _smoothed("targets/s", speed)))
    used = [Line(name, one.steps, one.values) for name, one in (("GPU", memory), ("process", rss)) if len(one.steps)]
    if used:
        drawings.append(_drawn("memory", f"{run.id}: memory in MB", used, is_log=False))
    of_evals = evals_of(run)
    first = next((name.removesuffix("/loss") for name in of_evals if name.endswith("/loss")), "")
    parts = columns(run, tuple(n.removeprefix(f"{first}/") for n in of_evals if n.startswith(f"{first}/")))
    shown = [name for name, curve in parts.items() if len(curve.steps) and name not in ("loss", *names)][:_MOST_CURVES]
    if shown:
        lines = [Line(n, c.steps, c.values, len(c.steps) <= _MOST_DOTS)
                 for n, c in ((n, of_evals[f"{first}/{n}"]) for n in shown)]  # fmt: skip
        drawings.append(_drawn("parts", f"{run.id}: parts of the loss on {first}", lines))
    if drawings:
        yield Heading(2, ["curves"])
        yield from drawings


def _best_loss(run: Run) -> str:
    return _loss((run.best or {}).get("loss"))


def _loss(value: Any) -> str:
    """For people, who compare; the table of evals has all digits."""
    loss = number_of(value)
    return "-" if loss is None else _rounded(loss, "loss")


def _best(run: Run) -> str:
    best, place = run.best or {}, ""
    with contextlib.suppress(*UNREADABLE):  # reported where the epochs are
        place = next((f", in epoch {one.epoch}" for one in epochs(run) if one.is_best), "")
    return f"loss {_best_loss(run)} on {value_text(best.get('set'))} at step {value_text(best.get('step'))}{place}"


def _epochs(run: Run, is_of_many: bool = False) -> Iterator[Block]:
    """A row per epoch, rounded, and the same as JSON with all digits; only the table where the page is of many runs."""
    found = epochs(run)
    if not found:
        return
    best = run.best or {}
    most = _MOST_EPOCHS_OF_MANY if is_of_many else _MOST_EPOCHS
    kept = [found[i] for i in _spread(len(found), most, (i for i, one in enumerate(found) if one.is_best))]
    names = [name for one in found for name in one.evals if not name.endswith(("/loss_se", "/targets"))]
    ordered = sorted(dict.fromkeys(names), key=lambda name: not name.endswith("/loss"))
    shown = ordered[:_MOST_EPOCH_EVALS]

    def cell(value: float | None, name: str = "of an epoch") -> str:
        return "-" if value is None else _rounded(value, name)

    rows: list[dict[str, Spans | str]] = []
    for one in kept:
        marks = ", ".join(["best"] * one.is_best + ["unfinished"] * (not one.is_complete))
        label = [bold(str(one.epoch)) if one.is_best else str(one.epoch), f" ({marks})" if marks else ""]
        of_evals: dict[str, Spans | str] = {}
        for name in shown:
            text = "" if one.eval_step is None else cell(one.evals.get(name))
            is_best = (one.eval_step, name) == (best.get("step"), f"{best.get('set')}/loss")
            of_evals[name] = [bold(text)] if is_best else text
        row: dict[str, Spans | str] = {"epoch": label, "train loss": cell(one.train_loss)}
        row["eval at"] = "no eval" if one.eval_step is None else str(one.eval_step)
        row |= {name: text for name, text in of_evals.items() if name.endswith("/loss")}
        row |= {"lr": cell(one.lr, "lr"), "norm p50": cell(one.norm_median, "norm")}
        row |= {"norm p90": cell(one.norm_p90, "norm"), "not finite": str(one.num_norms_not_finite)}
        row |= {"not applied": str(one.num_not_applied), "steps": f"{one.first_step} to {one.last_step}"}
        rows.append(row | of_evals)
    if not is_of_many:
        derived = part_of(run, "derived")
        steps = derived["epoch_rows"] / derived["rows_per_step"]
        yield Heading(3, ["epochs"])
        text = (
            f"An epoch is {value_text(derived['epoch_rows'])} rows, {steps:.1f} steps. The train loss is the mean over "
            "the targets of the steps that were applied; the norms are those of the same steps, without those that are "
            "not finite; the learning rate is that of the last step; the eval is the last one in the epoch."
        )
        yield Paragraph([text])
    head = list(map(one_line, rows[0]))
    yield Table(head, [list(row.values()) for row in rows], numeric=range(1, len(head)))
    left_out = [f"{len(found) - len(kept)} of {len(found)} epochs"] if len(kept) < len(found) else []
    left_out += [plural(len(ordered) - len(shown), "eval metric")] if len(shown) < len(ordered) else []
    if left_out:
        what, command = f"Left out: {' and '.join(left_out)}; all are in ", code(f"rung report {run.id}")
        yield Paragraph([what, code("epochs.json"), ", which ", command, " writes."])
    if not is_of_many:
        yield Code(epochs_json(kept), "json")


def _spread(num: int, most: int, always: Iterable[int]) -> list[int]:
    """Places of all rows of a table, or of some that are spread evenly, with the first, the last and some others."""
    every = 1 if num <= most else math.ceil(num / (most - 2))
    return sorted({*range(0, num, every), *always, num - 1})


def _eval_lines(run: Run, prefix: str = "") -> list[Line]:
    """The loss of each eval set."""
    losses = [(name.removesuffix("/loss"), curve) for name, curve in evals_of(run).items() if name.endswith("/loss")]
    return [Line(prefix + name, curve.steps, curve.values, len(curve.steps) <= _MOST_DOTS) for name, curve in losses]


def _drawn(name: str, title: str, lines: list[Line], is_log: bool | None = None) -> Picture:
    """A plot over steps; unless it is said, on a logarithmic axis where a plain one would not show all values."""
    if is_log is None:
        values = [y for line in lines for y in line.y if y is not None and math.isfinite(y)]
        is_log = bool(values) and min(values) > 0 and max(values) > _LOG_RATIO * min(values)
    return Picture(f"{name}.svg", title, svg(Plot(title, "step", lines, is_log)))


def _against_parent(link: Link, has_heading: bool = False) -> Iterator[Block]:
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


def _evals(run: Run) -> Iterator[Block]:
    """A row per eval, with all digits; the best in bold."""
    found = evals(run)
    if not found:
        return
    names = [name for row in found for name, value in row.items() if isinstance(value, int | float) and name != "step"]
    ordered = sorted(dict.fromkeys(names), key=lambda name: (name != "loss", name != "loss_se"))
    shown = ordered[:_MOST_COLUMNS]
    best = run.best or {}
    is_best = [(row["step"], row["set"]) == (best.get("step"), best.get("set")) for row in found]
    kept = _spread(len(found), _MOST_EVALS, (i for i, is_it in enumerate(is_best) if is_it))

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


def _codebooks(run: Run) -> Iterator[Block]:
    """Of a model that predicts several codes a step: the perplexity of each, the entropy of all, what was clipped.

    How rough the entropy is, and what a step is clipped to, are judged as by the doctor's A5 and O4.
    """
    import numpy as np

    from rung.runs.series import WINDOW, Series

    first = next((str(row["set"]) for row in evals(run)), "")
    parts = {n: curve for n, curve in evals_of(run).items() if n.startswith(f"{first}/codebook/")}
    if not parts:
        return
    yield Heading(3, ["codebooks"])
    by_name = {name.removeprefix(f"{first}/codebook/"): curve for name, curve in parts.items()}
    lines = [
        Line(name, curve.steps, [math.exp(min(value, 50.0)) for value in curve.values], len(curve.steps) <= _MOST_DOTS)
        for name, curve in by_name.items()
    ]
    yield _drawn("perplexity", f"{run.id}: perplexity of each codebook on {first}", lines, is_log=True)
    names = ("entropy", "logits/entropy", "norm", "norm_clipped", "skipped")
    each, looks, norm, clipped, skipped = columns(run, names).values()
    entropy, unit = (each, "steps") if each.steps else (looks, "looks")
    items: list[Spans] = []
    if len(entropy.steps) > 1:
        lines = [Line("entropy", entropy.steps, entropy.values, len(entropy.steps) <= _MOST_DOTS)]
        yield _drawn("entropy", f"{run.id}: output entropy in nats", lines, is_log=False)
        lately = Series(np.asarray(entropy.steps), np.asarray(entropy.values, np.float64)).finite
        lately = lately.between(int(entropy.steps[-1]) + 1 - 3 * WINDOW, int(entropy.steps[-1]) + 1)
        if len(lately) > 2:
            rough = _rounded(lately.jumps.sigma, "of an epoch")
            items.append([bold("roughness of the entropy"), f": {rough} nats, the spread of its jumps from one of the "
                          f"last {len(lately)} {unit} to the next"])  # fmt: skip
    after = dict(zip(clipped.rows, clipped.values))
    not_applied = {row for row, is_it in zip(skipped.rows, skipped.values) if is_it}
    pairs = [(value, after[row]) for row, value in zip(norm.rows, norm.values)
             if row in after and row not in not_applied and math.isfinite(value)]  # fmt: skip
    if pairs:
        num = sum(short < value * (1 - 1e-6) for value, short in pairs)  # float32: the last digit may differ
        items.append([bold("clipped"), f": {num} of {len(pairs)} applied steps, {num / len(pairs):.0%}"])
    if items:
        yield Bullets(items)


def _samples(run: Run, where: str, has_files: bool) -> Iterator[Block]:
    from rung.report.html import LARGEST_BYTES

    files = [path for path in run.samples() if not path.is_symlink()]
    latest = [path for path in files if path.parent == files[-1].parent] if files else []
    if not latest:
        return
    captions = {event.get("path"): text_of(event.get("caption")) for event in run.events("sample")}
    name = latest[0].parent.name
    yield Heading(2, [f"samples of step {int(name) if name.isdecimal() else one_line(name)}"])
    for path in latest:
        inside = path.relative_to(run.path).as_posix()
        is_text = path.suffix.lower().lstrip(".") in TEXTS
        most_bytes = _MOST_TEXT_BYTES if is_text else LARGEST_BYTES
        is_read = (has_files or is_text) and path.stat().st_size <= most_bytes
        yield File(where + inside, captions.get(inside) or "", path.read_bytes() if is_read else None)


def notes_of(run: Run) -> list[dict[str, Any]]:
    """The notes that stand, oldest first, with their text as text."""
    return [{**note, "text": text_of(note.get("text"))} for note in run.notes()]


def _notes(run: Run, *head: Block) -> Iterator[Block]:
    notes = notes_of(run)
    yield from head if notes else ()
    for note in notes:
        yield Paragraph([bold(date(note.get("unix_s")) or "undated"), ":"])
        yield Quote(note["text"])


def date(unix_s: Any) -> str:
    """To the second, in UTC."""
    try:
        return datetime.fromtimestamp(int(unix_s), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _reproduce(links: Sequence[Link], where: str) -> Iterator[Block]:
    """The code as it was kept, and what to type: in a clone of the repository, with none of the runs and no data.

    `python -m` takes the code of the current folder, where the command `rung` takes the one that is installed.
    """
    run = links[-1].run
    kept, name, document = part_of(run, "code"), run.id.replace("/", "-"), run.document
    lines, text = [], "The code was not kept"
    if kept.get("kind") == "git":
        head = value_text(kept.get("head") or kept.get("commit"))
        changed = value_text(kept.get("num_changed", len(list_of(kept.get("changed")))))
        state = f"with {changed} files changed" if kept.get("dirty") else "nothing changed"
        text = f"Code: {head}, {state}, kept as {value_text(kept.get('ref'))}"
        commit, ref = (shlex.quote(value_text(kept.get(key))) for key in ("commit", "ref"))
        lines = [f"git cat-file -e {commit} || git fetch origin {ref}", f"git worktree add ../{name} {commit}"]
        lines.append(f"cd ../{name}")
    elif kept.get("kind") == "tar":
        file = value_text(kept.get("file"))
        text = f"Code: {plural(int(kept.get('num_files') or 0), 'file')}, kept in {file}"
        lines = [f"mkdir {name}", f"tar xzf {shlex.quote(where + file)} -C {name}", f"cd {name}"]
    left_out = list_of(kept.get("left_out"))
    text += f"; left out: {', '.join(value_text(one) for one in left_out)}" if left_out else ""
    text += ". Data is prepared anew" if list_of(document.get("prepared")) else ""
    config, sources = run.config(), run.sources()
    if (start := str(config.get("init_from") or "")) and not start.startswith("scratch"):
        text += f". It begins with the weights of {one_line(start)}, which have to be there"
    yield Heading(2, ["to do it again"])
    yield Paragraph([f"{text}."])
    for words in list_of(document.get("prepared")):
        typed = [str(word) for word in list_of(words)]
        if typed[:2] == ["rung", "data"]:  # a page advises nothing else that a record, perhaps a stranger's, may hold
            lines.append(f"python -m {shlex.join(typed)}")

    program, *rest = [str(word) for word in list_of(document.get("command"))] or [""]
    if document.get("recipe") == OWN_LOOP or not sources:
        # The script where it lies in the kept folder; where that folder was is of no use elsewhere.
        path, root = program.replace("\\", "/"), f"{str(kept.get('root') or '').rstrip('/')}/"
        path = path.removeprefix(root) if path.startswith(root) else path
        path = path.rpartition("/")[2] if path.startswith("/") else path
        lines += [shlex.join([*(["python"] if path.endswith(".py") else []), path, *rest])] if program else []
    else:
        words = [f"preset={preset}"] if (preset := links[0].run.document.get("preset")) else []
        for key, source in sources.items():
            if source != "default" and not source.startswith(("preset ", "derived")):
                value: Any = config
                for part in key.split("."):
                    value = mapping(value).get(part)
                words.append(f"{key}={value if isinstance(value, str) else to_json(value).decode()}")
        lines.append(f"python -m rung train {shlex.join([str(document.get('recipe')), *words])}")
    yield Code("\n".join(lines), "bash")


def experiment_page(
    name: str, runs: Sequence[Run], problems: Sequence[str] = (), folder: Path | None = None
) -> ReportPage:
    """The page of an experiment: its runs in a table, as a tree, and one after the other.

    It is for a file in `folder`, which is the experiment's own unless named. Runs that differ only in their seed share
    one line; `problems`, of runs that cannot be read, are listed at the end.
    """
    links = find_parents(runs)
    report = ReportPage(Page(one_line(name)))
    blocks = report.page.blocks
    if not runs:
        blocks.append(Paragraph(["There are no runs yet."]))
    else:
        home = runs[0].path.parent
        where = "" if folder is None else f"{os.path.relpath(home, folder).replace(os.sep, '/')}/"
        rows: list[list[Spans | str]] = []
        for found in links:
            run = found.run
            change = link_spans(found) if found.parent is not None else ["-"]
            verdict = one_line(next(filter(None, verdict_of(run)), ""))
            parent = one_line(text_of(run.document.get("parent")))
            rows.append([[_linked(run, where)], parent, change, run.status, _best_loss(run), verdict])
        blocks.append(Table(["run", "parent", "change", "status", "best loss", "verdict"], rows, numeric=(4,)))
        lines: list[Line] = []
        for run in runs:
            with contextlib.suppress(*UNREADABLE):  # reported where the run is
                lines += _eval_lines(run, f"{run.id} ")[:1]
        if shown := lines[-_MOST_CURVES:]:
            title = f"{name}: eval loss" + (f", the last {len(shown)} runs" if len(lines) > len(shown) else "")
            blocks.append(_drawn("loss", title, shown))
        rates: list[Line] = []
        for run in runs[-_MOST_CURVES:]:
            with contextlib.suppress(*UNREADABLE):
                lr = columns(run, ("lr",))["lr"]
                rates += [Line(run.id, lr.steps, lr.values)] if len(lr.steps) else []
        if rates:
            title = f"{name}: learning rate" + (f", the last {len(rates)} runs" if len(runs) > _MOST_CURVES else "")
            blocks.append(_drawn("lr", title, rates, is_log=False))
        blocks += [*_over_seeds(runs), Heading(2, ["tree"]), Code("\n".join(lines_of(links)))]
        try:
            blocks += _settings(chain(runs[-1]), f"experimental settings of {one_line(runs[-1].id)}")
        except UNREADABLE as error:
            blocks.append(Paragraph([unreadable(runs[-1], error)]))
        for found in links:
            try:
                blocks += _run_in_experiment(found, where)
            except UNREADABLE as error:
                blocks.append(Paragraph([unreadable(found.run, error)]))
    if problems:
        root = f"{runs[0].path.parent.parent}{os.sep}" if runs else ""
        blocks += [Heading(2, ["not readable"]), Bullets([[text.replace(root, "")] for text in problems])]
    return report


def _linked(run: Run, where: str) -> Span:
    """With a way to its own page, if it has one."""
    if (run.path / "report.md").is_file():
        return link(run.id, f"{where}{run.path.name}/report.md")
    return Span(run.id)


def _over_seeds(runs: Sequence[Run]) -> Iterator[Block]:
    """Runs that differ by their seed alone; a record that cannot be read has no group."""
    readable = []
    for run in runs:
        with contextlib.suppress(*UNREADABLE):
            groups_over_seeds([run])
            if isinstance(run.config(), dict) and isinstance(run.data(), dict):
                readable.append(run)
    items: list[Spans] = []
    for group in groups_over_seeds(readable):
        if len({text_of(run.document.get("seed")) for run in group}) < 2:
            continue
        losses = [(run.best or {}).get("loss") for run in group]
        finite = [float(loss) for loss in losses if isinstance(loss, int | float) and math.isfinite(loss)]
        mean: Span | str = "none"
        if finite:
            sd = f" ± {statistics.stdev(finite):{MEAN}}" if len(finite) > 1 else ""
            mean = bold(f"{statistics.fmean(finite):{MEAN}}{sd} (n = {len(finite)})")
        lost = [f", {len(group) - len(finite)} without a finite loss"] if len(finite) < len(group) else []
        items.append([", ".join(run.id for run in group), ": best loss ", mean, *lost])
    if items:
        yield Heading(2, ["over seeds"])
        yield Bullets(items)


def _run_in_experiment(found: Link, where: str) -> Iterator[Block]:
    run = found.run
    yield Heading(2, ["RUN ", str(run.document.get("number", run.id))])
    at = "" if run.step is None else f" at step {run.step}"
    items: list[Spans] = [[bold("run"), ": ", _linked(run, where), f", {run.status}{at}"]]
    if found.parent is not None:
        items.append([bold("change"), ": ", *link_spans(found), " since ", code(found.parent.id)])
    if found.problem:
        items.append([found.problem])
    if run.best is not None:
        items.append([bold("result"), f": best {_best(run)}"])
    yield Bullets(items)
    yield from _why(run)
    for section in (_epochs(run, is_of_many=True), _against_parent(found)):
        try:
            yield from section
        except UNREADABLE as error:
            yield Paragraph([unreadable(run, error)])
    yield from _verdict(run)
    yield from _notes(run)
