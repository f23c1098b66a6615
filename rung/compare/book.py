"""The page of an experiment: its runs in a table, as a tree and one after the other, as people write them by hand.

Written from the records of the runs; the same records give the same bytes. Runs that differ by their seed alone are one
line, with mean and standard deviation. What stands on the page of a single run is left to page.

The surprising thing: a run that cannot be read is told at the end and costs no other run its place.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rung.compare.blocks import Block, Bullets, Code, Heading, Page, Paragraph, Span, Spans, Table, bold, code, link
from rung.compare.lineage import (
    Link,
    best_text,
    find_parents,
    lines_of,
    link_spans,
    text_of,
    unreadable,
    value_text,
    verdict_of,
)
from rung.compare.page import Written, note_blocks, notes_of, verdict_blocks, why_blocks
from rung.compare.plot import Line, Plot
from rung.compare.reading import UNREADABLE
from rung.compare.result import against, drawn, eval_lines, is_wide
from rung.runs.fields import groups_over_seeds
from rung.runs.query import Run
from rung.text import one_line

_MOST_CURVES = 6  # in one drawing: as many as there are colours
# Mean and standard deviation over seeds are the only figures here that no record holds; they stand beside their runs.
MEAN = ".6g"


def experiment_page(
    name: str, runs: Sequence[Run], problems: Sequence[str] = (), folder: Path | None = None
) -> Written:
    """The page of an experiment for a file in `folder`, which is the experiment's own unless named."""
    links = find_parents(runs)
    written = Written(Page(one_line(name)))
    blocks = written.page.blocks
    if not runs:
        blocks.append(Paragraph(["There are no runs yet."]))
    else:
        home = runs[0].path.parent
        where = "" if folder is None else f"{os.path.relpath(home, folder).replace(os.sep, '/')}/"
        blocks += [_summary(links, where), *_curves(written, name, runs), *_seeds(runs)]
        blocks += [Heading(2, ["tree"]), Code("\n".join(lines_of(links)))]
        for found in links:
            try:
                blocks += _run(found, where)
            except UNREADABLE as error:
                blocks.append(Paragraph([unreadable(found.run, error)]))
    if problems:
        root = f"{runs[0].path.parent.parent}{os.sep}" if runs else ""
        blocks += [Heading(2, ["not readable"]), Bullets([[text.replace(root, "")] for text in problems])]
    return written


def _summary(links: Sequence[Link], where: str) -> Table:
    rows: list[list[Spans | str]] = []
    for found in links:
        run = found.run
        word, text = verdict_of(run)
        rows.append(
            [
                [_linked(run, where)],
                one_line(text_of(run.document.get("parent"))),
                link_spans(found) if found.parent is not None else ["-"],
                run.status,
                best_text(run),
                one_line(word or text),
            ]
        )
    return Table(["run", "parent", "change", "status", "best loss", "verdict"], rows, numeric=(4,))


def _linked(run: Run, where: str) -> Span:
    """With a way to its own page, if it has one."""
    if (run.path / "report.md").is_file():
        return link(run.id, f"{where}{run.path.name}/report.md")
    return Span(run.id)


def _curves(written: Written, name: str, runs: Sequence[Run]) -> Iterator[Block]:
    """The first eval set of the latest runs."""
    lines: list[Line] = []
    for run in runs:
        with contextlib.suppress(*UNREADABLE):  # told where the run is
            lines += eval_lines(run, f"{run.id} ")[:1]
    shown = lines[-_MOST_CURVES:]
    if shown:
        title = f"{name}: eval loss" + (f", the last {len(shown)} runs" if len(lines) > len(shown) else "")
        yield drawn(written.drawings, "loss", Plot(title, "step", shown, is_wide(shown)))


def _seeds(runs: Sequence[Run]) -> Iterator[Block]:
    """Runs that differ by their seed alone; a record that cannot be read has no group."""
    readable = [run for run in runs if _is_readable(run)]
    groups = [group for group in groups_over_seeds(readable) if len({_seed(run) for run in group}) > 1]
    if not groups:
        return
    yield Heading(2, ["over seeds"])
    items: list[Spans] = []
    for group in groups:
        losses = [(run.best or {}).get("loss") for run in group]
        finite = [float(loss) for loss in losses if isinstance(loss, int | float) and math.isfinite(loss)]
        spans: list[Span | str] = [", ".join(run.id for run in group), ": best loss "]
        spans.append(_mean(finite) if finite else "none")
        if len(finite) < len(group):
            spans.append(f", {len(group) - len(finite)} without a finite loss")
        items.append(spans)
    yield Bullets(items)


def _is_readable(run: Run) -> bool:
    try:
        groups_over_seeds([run])
        return isinstance(run.config(), dict) and isinstance(run.data(), dict)
    except UNREADABLE:
        return False


def _seed(run: Run) -> str:
    return text_of(run.document.get("seed"))


def _mean(values: Sequence[float]) -> Span:
    sd = f" ± {statistics.stdev(values):{MEAN}}" if len(values) > 1 else ""
    return bold(f"{statistics.fmean(values):{MEAN}}{sd} (n = {len(values)})")


def _run(found: Link, where: str) -> Iterator[Block]:
    """RUN 3, as a person would tell it."""
    run = found.run
    yield Heading(2, ["RUN ", str(run.document.get("number", run.id))])
    items: list[Spans] = [[bold("run"), ": ", _linked(run, where), f", {run.status}{_at(run)}"]]
    if found.parent is not None:
        items.append([bold("change"), ": ", *link_spans(found), " since ", code(found.parent.id)])
    if found.problem:
        items.append([found.problem])
    best = run.best
    if best is not None:
        words = f"best loss {best_text(run)} on {value_text(best.get('set'))} at step {value_text(best.get('step'))}"
        items.append([bold("result"), ": ", words])
    yield Bullets(items)
    yield from why_blocks(run.document)
    try:
        yield from against(found)
    except UNREADABLE as error:
        yield Paragraph([unreadable(run, error)])
    yield from verdict_blocks(run)
    yield from note_blocks(notes_of(run))


def _at(run: Run) -> str:
    return "" if run.step is None else f" at step {run.step}"
