"""The page of a run, written from its record: what changed, why, what happened, what it sounds like.

The same record gives the same bytes: no date of today, no path of this machine. Every number stands in the record, or
is rounded, counted or subtracted as result says. How a page looks is left to blocks and html, what differs to factors,
what is sick to the doctor.

The surprising thing: `status` is the one line that may change while the files do not, as long as the run is going on.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rung.compare.blocks import (
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
    struck,
)
from rung.compare.difference import Difference, part_of
from rung.compare.lineage import (
    Chain,
    Link,
    Setting,
    chain,
    change_spans,
    link_spans,
    settings,
    text_of,
    unreadable,
    value_text,
    verdict_of,
    without_root,
)
from rung.compare.reading import UNREADABLE, list_of, segments_of
from rung.compare.result import against, curves, evals, log
from rung.runs.query import Run
from rung.text import one_line

_MOST_TEXT_BYTES = 20_000  # of a sample that is text and stands on the page


@dataclass
class Written:
    """A page, and the drawings that its Markdown points to: file name -> SVG."""

    page: Page
    drawings: dict[str, str] = field(default_factory=dict)


def run_page(run: Run, folder: Path | None = None, has_files: bool = False) -> Written:
    """The page of a run, for a file in `folder`, which is the run's own unless named; with `has_files` samples are in.

    A part of the record that cannot be read is told in its place.
    """
    where = os.path.relpath(run.path, folder).replace(os.sep, "/") if folder is not None else "."
    written = Written(Page(one_line(run.id)))
    about = _About(run, chain(run), "" if where == "." else f"{where}/", has_files)
    for section in (
        lambda: _head(about),
        lambda: _findings(about),
        lambda: _changes(about.link),
        lambda: _settings(about.chain),
        lambda: log(run),
        lambda: curves(run, written.drawings),
        lambda: _against(about.link),
        lambda: evals(run),
        lambda: _samples(about),
        lambda: _notes(run),
        lambda: _again(about),
    ):
        try:
            written.page.blocks += section()
        except UNREADABLE as error:
            written.page.blocks.append(Paragraph([unreadable(run, error)]))
    return written


@dataclass
class _About:
    """What a section needs to know."""

    run: Run
    chain: Chain
    where: str  # of the run's files, as seen from the page
    has_files: bool

    @property
    def link(self) -> Link:
        return self.chain.links[-1]


def _head(about: _About) -> Iterator[Block]:
    run, document = about.run, about.run.document
    derived = part_of(run, "derived")
    planned = derived.get("num_steps")
    of_all = f" of {value_text(planned)}" if planned is not None else ""
    status = [run.status, "before its first step" if run.step is None else f"at step {run.step}{of_all}"]
    times = [f"{word} {value_text(document[key])}" for word, key in (("began", "created"), ("ended", "ended"))
             if document.get(key)]  # fmt: skip
    items: list[Spans] = [[bold("status"), ": ", ", ".join([*status, *times])]]
    if document.get("reason"):
        items.append([bold("reason"), ": ", one_line(text_of(document["reason"]))])
    items.append([bold("what"), ": ", *_what(document, derived)])
    items.append([bold("current change"), ": ", *_change(about.link)])
    if tags := list_of(document.get("tags")):
        items.append([bold("tags"), ": ", *joined([[code(one_line(str(tag)))] for tag in tags])])
    ab = part_of(run, "ab")
    if ab.get("id"):
        items.append([bold("ab"), f": {text_of(ab.get('arm'))} of {text_of(ab['id'])}, base {text_of(ab.get('base'))}"])
    yield Bullets(items)
    yield from why_blocks(document)
    yield from verdict_blocks(run)


def _what(document: Mapping[str, Any], derived: Mapping[str, Any]) -> Iterator[Span | str]:
    yield "recipe "
    yield code(value_text(document.get("recipe")))
    if document.get("preset"):
        yield ", preset "
        yield code(value_text(document["preset"]))
    yield f", seed {value_text(document.get('seed'))}"
    if derived.get("parameters") is not None:
        yield f", {value_text(derived['parameters'])} parameters"
    if derived.get("device"):
        yield f", {' '.join(value_text(derived[key]) for key in ('device', 'dtype') if derived.get(key))}"


def _change(found: Link) -> Spans:
    """The change against the parent, in one line."""
    if found.parent is None:
        return [f"a first run{f' ({found.problem})' if found.problem else ''}"]
    return [*link_spans(found), " since ", code(found.parent.id)]


def why_blocks(document: Mapping[str, Any]) -> Iterator[Block]:
    if why := text_of(document.get("why")).strip():
        yield Paragraph([bold("why"), ":"])
        yield Quote(why)


def verdict_blocks(run: Run) -> Iterator[Block]:
    """What a person concluded."""
    word, text = verdict_of(run)
    verdict = run.document.get("verdict")
    when = date(verdict.get("unix_s")) if isinstance(verdict, Mapping) else ""
    if word or text:
        yield Paragraph([bold("verdict"), ": ", *([bold(word)] if word else []), *([f" ({when})"] if when else [])])
    if text.strip():
        yield Quote(text)


def _findings(about: _About) -> Iterator[Block]:
    """What the doctor says is at least worth a warning."""
    from rung.doctor.history import read
    from rung.doctor.report import report_of, sentence

    report = report_of(read(about.run))
    found = report.at_least("warn")
    if not found:
        return
    yield Heading(2, ["findings"])
    for finding in found:
        since = f" Since step {finding.since}." if finding.since is not None else ""
        name = bold(f"{finding.rule} {finding.severity}")
        yield Paragraph([name, f" {finding.title}: {sentence(finding.what)}{since}"])
        items: list[Spans] = [[text] for text in finding.evidence]
        items += [["try: ", finding.remedy]] if finding.remedy else []
        if command := finding.command(about.run.id):
            items.append([code(command)])
        if items:
            yield Bullets(items)


def _changes(found: Link) -> Iterator[Block]:
    """All that differs from the parent, and whether it was one change."""
    from rung.compare.factors import strictness

    if found.parent is None or found.comparison is None:
        return
    comparison = found.comparison
    shown = [d for d in comparison.differences if d.weight != "note"]
    yield Heading(2, [f"change since {one_line(found.parent.id)}"])
    yield Paragraph([without_root(found.run, strictness(comparison).words), "."])
    if found.problem:
        yield Paragraph([found.problem, "."])
    rows = [_change_row(found.run, d) for d in shown]
    if rows:
        yield Table(["part", "what", "before", "after", "weight", "in words"], rows)
    if comparison.same:
        yield Paragraph([f"The same in both: {', '.join(comparison.same)}."])
    told = [without_root(found.run, text) for text in [*comparison.notes, *comparison.code.notes]]
    if told:
        yield Bullets([[text] for text in told])


def _change_row(run: Run, d: Difference) -> list[Spans | str]:
    is_told = d.part == "code" or (d.before is None and d.after is None)
    values: list[Spans | str] = ["", ""] if is_told else [[code(value_text(d.before))], [code(value_text(d.after))]]
    source = f"set by {d.source_after}" if d.part == "config" and d.source_after else ""
    words = without_root(run, "; ".join(filter(None, [d.detail, source])))
    return [d.part, [code(d.name)], *values, d.weight, words]


def _settings(found: Chain) -> Iterator[Block]:
    kept = settings(found)
    if not kept:
        return
    yield Heading(2, ["experimental settings"])
    first = found.links[0]
    if first.problem and first.parent is None:
        yield Paragraph([f"Known from {one_line(first.run.id)} on: {first.problem}."])
    yield Bullets([_setting(one) for one in kept])


def _against(found: Link) -> Iterator[Block]:
    if found.parent is not None:
        yield Heading(3, [f"against {one_line(found.parent.id)}"])
        yield from against(found)


def _setting(setting: Setting) -> Spans:
    d = setting.difference
    spans = [code(d.name), " ", code(value_text(d.after))] if setting.is_start else change_spans(d)
    if d.part == "code":
        spans = ["code of ", *spans]
    told = (
        f" ({setting.run}{f', {d.source_after}' if setting.is_start and not d.source_after.startswith('run ') else ''})"
    )
    if setting.state == "new":
        return [bold(*spans)]
    if setting.state in ("reverted", "replaced"):
        return [struck(*spans), f"{told[:-1]}; {setting.state} by {setting.by})"]
    return [*spans, told]


def _samples(about: _About) -> Iterator[Block]:
    from rung.compare.html import LARGEST_BYTES

    files = [path for path in about.run.samples() if not path.is_symlink()]
    latest = [path for path in files if path.parent == files[-1].parent] if files else []
    if not latest:
        return
    captions = {event.get("path"): text_of(event.get("caption")) for event in about.run.events("sample")}
    yield Heading(
        2, [f"samples of step {int(name) if (name := latest[0].parent.name).isdecimal() else one_line(name)}"]
    )
    for path in latest:
        inside = path.relative_to(about.run.path).as_posix()
        is_text = path.suffix.lower().lstrip(".") in TEXTS
        is_read = (about.has_files or is_text) and path.stat().st_size <= (
            _MOST_TEXT_BYTES if is_text else LARGEST_BYTES
        )
        yield File(about.where + inside, captions.get(inside) or "", path.read_bytes() if is_read else None)


def notes_of(run: Run) -> list[dict[str, Any]]:
    """The notes that stand, oldest first, with their text as text."""
    return [{**note, "text": text_of(note.get("text"))} for note in run.notes()]


def _notes(run: Run) -> Iterator[Block]:
    notes = notes_of(run)
    if notes:
        yield Heading(2, ["notes"])
        yield from note_blocks(notes)


def note_blocks(notes: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    for note in notes:
        yield Paragraph([bold(date(note.get("unix_s")) or "undated"), ":"])
        yield Quote(note["text"])


def date(unix_s: Any) -> str:
    """To the second, in UTC."""
    try:
        return datetime.fromtimestamp(int(unix_s), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _again(about: _About) -> Iterator[Block]:
    """The code as it was kept, and what to type."""
    kept, document = part_of(about.run, "code"), about.run.document
    name = about.run.id.replace("/", "-")
    lines, words = [], "The code was not kept"
    if kept.get("kind") == "git":
        head = value_text(kept.get("head") or kept.get("commit"))
        changed = value_text(kept.get("num_changed", len(list_of(kept.get("changed")))))
        state = f"with {changed} files changed" if kept.get("dirty") else "nothing changed"
        words = f"Code: {head}, {state}, kept as {value_text(kept.get('ref'))}"
        lines = [f"git worktree add ../{name} {value_text(kept.get('commit'))}", f"cd ../{name}"]
    elif kept.get("kind") == "tar":
        file = value_text(kept.get("file"))
        words = f"Code: {value_text(kept.get('num_files'))} files, kept in {file}"
        lines = [f"mkdir {name}", f"tar xzf {shlex.quote(about.where + file)} -C {name}", f"cd {name}"]
    left_out = list_of(kept.get("left_out"))
    words += f"; left out: {', '.join(value_text(one) for one in left_out)}" if left_out else ""
    yield Heading(2, ["to do it again"])
    yield Paragraph([f"{words}."])
    segments = [part.get("command") for part in segments_of(about.run)]
    commands = [tuple(map(str, one)) for one in [document.get("command"), *segments] if isinstance(one, list) and one]
    for program, *rest in dict.fromkeys(commands):
        # Where the program lay is of no use elsewhere.
        lines.append(shlex.join([program.replace("\\", "/").rpartition("/")[2], *rest]))
    yield Code("\n".join(lines), "bash")
