"""The page of a run and that of an experiment, written from the records: what changed, why, what happened.

The same records give the same bytes: no current date, no path of this machine. Only `status` may change while the files
do not, as long as a run is in progress. Numbers come from the record, or are rounded, counted or subtracted by result.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import statistics
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rung.compare.factors import strictness
from rung.compare.lineage import (
    Link,
    best_text,
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
from rung.compare.reading import UNREADABLE, list_of, part_of, segments_of
from rung.compare.result import curve_blocks, drawn, eval_blocks, eval_lines, log_blocks, parent_blocks
from rung.report.blocks import (
    TEXTS,
    Block,
    Bullets,
    Code,
    File,
    Heading,
    Page,
    Paragraph,
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
from rung.report.plot import Line
from rung.runs.fields import groups_over_seeds
from rung.runs.query import Run
from rung.text import one_line

_MOST_TEXT_BYTES = 20_000  # of a sample that is text and stands on the page
_MOST_CURVES = 6  # in one drawing: as many as there are colours
# Mean and standard deviation over seeds are the only figures here that no record holds; they stand beside their runs.
MEAN = ".6g"


class ReportPage(NamedTuple):
    page: Page

    @property
    def drawings(self) -> dict[str, str]:
        return self.page.drawings


def run_page(run: Run, folder: Path | None = None, has_files: bool = False) -> ReportPage:
    """The page of a run, for a file in `folder`, which is the run's own unless named; with `has_files` samples are in.

    A part of the record that cannot be read is reported in its place.
    """
    where = os.path.relpath(run.path, folder).replace(os.sep, "/") if folder is not None else "."
    where = "" if where == "." else f"{where}/"
    report = ReportPage(Page(one_line(run.id)))
    links = chain(run)
    for section in (
        lambda: _head(links[-1]),
        lambda: _findings(run),
        lambda: _changes(links[-1]),
        lambda: _settings(links),
        lambda: log_blocks(run),
        lambda: curve_blocks(run),
        lambda: parent_blocks(links[-1], has_heading=True),
        lambda: eval_blocks(run),
        lambda: _samples(run, where, has_files),
        lambda: _notes(run, Heading(2, ["notes"])),
        lambda: _reproduce(run, where),
    ):
        try:
            report.page.blocks += section()
        except UNREADABLE as error:
            report.page.blocks.append(Paragraph([unreadable(run, error)]))
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
    notes = [*comparison.notes, *comparison.code.notes]
    if notes:
        yield Bullets([[without_root(found.run, text)] for text in notes])


def _settings(links: Sequence[Link]) -> Iterator[Block]:
    """What was set along the chain: new in bold, what no longer holds struck out."""
    found = settings(links)
    if not found:
        return
    yield Heading(2, ["experimental settings"])
    first = links[0]
    if first.problem and first.parent is None:
        yield Paragraph([f"Known from {one_line(first.run.id)} on: {first.problem}."])
    items: list[Spans] = []
    for one in found:
        d = one.difference
        spans = [code(d.name), " ", code(value_text(d.after))] if one.is_start else change_spans(d)
        if d.part == "code":
            spans = ["code of ", *spans]
        source = f", {d.source_after}" if one.is_start and not d.source_after.startswith("run ") else ""
        if one.state == "new":
            items.append([bold(*spans)])
        elif one.state in ("reverted", "replaced"):
            items.append([struck(*spans), f" ({one.run}{source}; {one.state} by {one.by})"])
        else:
            items.append([*spans, f" ({one.run}{source})"])
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


def _reproduce(run: Run, where: str) -> Iterator[Block]:
    """The code as it was kept, and what to type."""
    kept, name = part_of(run, "code"), run.id.replace("/", "-")
    lines, text = [], "The code was not kept"
    if kept.get("kind") == "git":
        head = value_text(kept.get("head") or kept.get("commit"))
        changed = value_text(kept.get("num_changed", len(list_of(kept.get("changed")))))
        state = f"with {changed} files changed" if kept.get("dirty") else "nothing changed"
        text = f"Code: {head}, {state}, kept as {value_text(kept.get('ref'))}"
        lines = [f"git worktree add ../{name} {value_text(kept.get('commit'))}", f"cd ../{name}"]
    elif kept.get("kind") == "tar":
        file = value_text(kept.get("file"))
        text = f"Code: {value_text(kept.get('num_files'))} files, kept in {file}"
        lines = [f"mkdir {name}", f"tar xzf {shlex.quote(where + file)} -C {name}", f"cd {name}"]
    left_out = list_of(kept.get("left_out"))
    text += f"; left out: {', '.join(value_text(one) for one in left_out)}" if left_out else ""
    yield Heading(2, ["to do it again"])
    yield Paragraph([f"{text}."])
    given = [run.document.get("command"), *(part.get("command") for part in segments_of(run))]
    for program, *rest in dict.fromkeys(tuple(map(str, one)) for one in given if isinstance(one, list) and one):
        # Where the program lay is of no use elsewhere.
        lines.append(shlex.join([program.replace("\\", "/").rpartition("/")[2], *rest]))
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
        blocks.append(_summary(links, where))
        lines: list[Line] = []
        for run in runs:
            with contextlib.suppress(*UNREADABLE):  # reported where the run is
                lines += eval_lines(run, f"{run.id} ")[:1]
        if shown := lines[-_MOST_CURVES:]:
            title = f"{name}: eval loss" + (f", the last {len(shown)} runs" if len(lines) > len(shown) else "")
            blocks.append(drawn("loss", title, shown))
        blocks += [*_over_seeds(runs), Heading(2, ["tree"]), Code("\n".join(lines_of(links)))]
        for found in links:
            try:
                blocks += _run_in_experiment(found, where)
            except UNREADABLE as error:
                blocks.append(Paragraph([unreadable(found.run, error)]))
    if problems:
        root = f"{runs[0].path.parent.parent}{os.sep}" if runs else ""
        blocks += [Heading(2, ["not readable"]), Bullets([[text.replace(root, "")] for text in problems])]
    return report


def _summary(links: Sequence[Link], where: str) -> Table:
    rows: list[list[Spans | str]] = []
    for found in links:
        run = found.run
        change = link_spans(found) if found.parent is not None else ["-"]
        verdict = one_line(next(filter(None, verdict_of(run)), ""))
        parent = one_line(text_of(run.document.get("parent")))
        rows.append([[_linked(run, where)], parent, change, run.status, best_text(run), verdict])
    return Table(["run", "parent", "change", "status", "best loss", "verdict"], rows, numeric=(4,))


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
    run, best = found.run, found.run.best
    yield Heading(2, ["RUN ", str(run.document.get("number", run.id))])
    at = "" if run.step is None else f" at step {run.step}"
    items: list[Spans] = [[bold("run"), ": ", _linked(run, where), f", {run.status}{at}"]]
    if found.parent is not None:
        items.append([bold("change"), ": ", *link_spans(found), " since ", code(found.parent.id)])
    if found.problem:
        items.append([found.problem])
    if best is not None:
        text = f"best loss {best_text(run)} on {value_text(best.get('set'))} at step {value_text(best.get('step'))}"
        items.append([bold("result"), ": ", text])
    yield Bullets(items)
    yield from _why(run)
    try:
        yield from parent_blocks(found)
    except UNREADABLE as error:
        yield Paragraph([unreadable(run, error)])
    yield from _verdict(run)
    yield from _notes(run)
