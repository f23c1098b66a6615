"""Which run came from which, what each changed, and which of those changes still hold.

A parent is looked up by its uid in the runs folder of its child (an older run.json has only its id). One that is gone,
damaged, another run of the same name or part of a cycle is reported and ends the chain; nothing here is fatal. An edit
of a file that was undone by hand counts as undone.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rung.compare.code import CodeDiff, diff
from rung.compare.factors import ABSENT, Comparison, Difference, compare
from rung.compare.reading import UNREADABLE, number_of
from rung.errors import RunError
from rung.report.blocks import Span, code, joined
from rung.runs.files import name_of, named, plain, to_json
from rung.runs.query import Run, is_same_run, open_run
from rung.text import error_text, one_line

_NUM_SHOWN = 3  # changes in a line of the tree
_MOST_CHARS = 60  # of a value in a line
_LOOKED_IN = re.compile(r" \(looked in [^)]*\)")  # where code was sought, as code.py says it


@dataclass
class Link:
    """A run and the one it came from. `problem` says why they cannot be compared, or why there is no parent."""

    run: Run
    parent: Run | None = None
    problem: str = ""
    has_rows: bool = True  # whether the rows of both are compared as well

    @cached_property
    def comparison(self) -> Comparison | None:
        """With the parent; None without one, or where a file of either is damaged, which `problem` then says."""
        if self.parent is None:
            return None
        try:
            return compare(self.parent, self.run, has_rows=self.has_rows)
        except UNREADABLE as error:
            self.problem = unreadable(self.run, error)
            return None

    @cached_property
    def changes(self) -> list[Difference]:
        found = [] if self.comparison is None else self.comparison.of("factor", "hidden", "metric")
        return [difference._replace(detail=without_root(self.run, difference.detail)) for difference in found]


@dataclass
class Setting:
    """One change of one run of a chain, and what became of it: new, holds, reverted or replaced (`by` which run)."""

    run: str
    difference: Difference
    state: str
    by: str = ""
    is_start: bool = False  # set where the chain begins, so there is nothing it was before


def without_root(run: Run, message: object) -> str:
    """A message about files, without where on this machine they lie."""
    text, root = str(message), run.path.parent.parent
    if os.sep not in text:
        return text
    text = text.replace(f"{root.resolve()}{os.sep}", "").replace(f"{root}{os.sep}", "")
    return _LOOKED_IN.sub("", text)


def unreadable(run: Run, error: Exception) -> str:
    reason = str(error) if isinstance(error, RunError) else f"an unexpected value ({error_text(error)})"
    return f"Not all of the record can be read: {without_root(run, reason)}"


def find_parent(run: Run, opened: dict[Path, Run] | None = None) -> Link:
    """The run with its parent, or with the reason why there is none; runs in `opened` are not opened again."""
    wanted, opened = run.document.get("parent"), {} if opened is None else opened
    if not isinstance(wanted, str) or not wanted:
        return Link(run)
    root = run.path.parent.parent
    path = root / wanted
    try:
        if path not in opened and (path / "run.json").is_file():
            opened[path] = open_run(wanted, root)
    except (RunError, OSError, ValueError, KeyError) as error:
        return Link(run, None, f"its parent {wanted} cannot be read: {without_root(run, error)}")
    found = opened.get(path)
    if found is None:
        return Link(run, None, f"its parent {wanted} is not among the runs here")
    uid = run.document.get("parent_uid")
    born, came = str(found.document.get("created") or ""), str(run.document.get("created") or "")
    if not is_same_run(found, uid):
        return Link(run, None, f"its parent {wanted} is not among the runs here; another run has that name here")
    if not uid and born and came and born > came:  # all that an older run.json lets us check
        return Link(run, None, f"{found.id} began after {run.id}: another run that has the name of its parent")
    return Link(run, found)


def find_parents(runs: Sequence[Run], has_rows: bool = True) -> list[Link]:
    """Each run with its parent; a run that is the parent of several is opened once."""
    opened = {run.path: run for run in runs}
    links = [find_parent(run, opened) for run in runs]
    for link in links:
        link.has_rows = has_rows
    return links


def chain(run: Run) -> list[Link]:
    """From the first known ancestor to the run itself."""
    opened: dict[Path, Run] = {}
    links, seen = [find_parent(run, opened)], {run.path}
    while (parent := links[-1].parent) is not None:
        if parent.path in seen:
            problem = f"its parent {parent.id} descends from it: the parents form a cycle"
            links[-1] = Link(links[-1].run, None, problem)
            break
        seen.add(parent.path)
        links.append(find_parent(parent, opened))
        links[-1].has_rows = False  # of the earlier changes only the settings are shown
    return links[::-1]


def settings(links: Sequence[Link]) -> list[Setting]:
    """What was set where the chain begins, and every change since, oldest first."""
    out: list[Setting] = []
    first, newest = links[0].run, links[-1].run
    with contextlib.suppress(RunError):
        tree = first.config()
        for name, source in first.sources().items():
            if source == "default" or str(source).startswith("derived"):
                continue  # nobody chose it
            value: Any = tree
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            difference = Difference("config", name, None, value, "factor", "", ABSENT, str(source))
            out.append(Setting(first.id, difference, "holds", is_start=True))

    parents = {link.run.id: link.parent for link in links}
    since: dict[Path, CodeDiff] = {}  # from a parent to the newest run

    def is_undone(setting: Setting) -> bool:
        """Whether the newest run has the file as it was before the change."""
        parent = parents[setting.run]
        if parent is None:
            return False
        if parent.path not in since:
            since[parent.path] = diff(parent, newest)
        change = since[parent.path]
        return not change.problem and setting.difference.name not in {file.path for file in change.files}

    for link in links:
        files = {file.path for file in link.comparison.code.files} if link.comparison is not None else set()
        for difference in link.changes:
            part, name = difference.part, difference.name
            # Not a condition of the run, and not code of which nobody knows whether it changed.
            if name not in files if part == "code" else part not in ("config", "data", "seed", "metric"):
                continue
            for earlier in out:
                if earlier.state != "holds" or (earlier.difference.part, earlier.difference.name) != (part, name):
                    continue
                if part != "code":
                    is_back = plain(earlier.difference.before) == plain(difference.after)
                    earlier.state, earlier.by = ("reverted" if is_back else "replaced"), link.run.id
                elif is_undone(earlier):
                    earlier.state, earlier.by = "reverted", link.run.id
            out.append(Setting(link.run.id, difference, "new" if link is links[-1] else "holds"))
    return out


def change_spans(difference: Difference) -> list[Span | str]:
    """A difference as part of a line: `optimizer.grad_clip` `1.0` → `0.5`."""
    spans: list[Span | str] = [code(difference.name)]
    if not difference.has_values:
        return [*spans, f" {difference.detail}"] if difference.detail else spans
    if difference.part not in ("config", "seed"):
        spans = [f"{difference.part} ", code(difference.name)]
    before = "absent" if difference.source_before == ABSENT else value_text(difference.before)
    after = "absent" if difference.source_after == ABSENT else value_text(difference.after)
    spans += [" ", code(before), " → ", code(after)]
    return [*spans, f" ({difference.detail})"] if difference.detail else spans


def link_spans(link: Link) -> list[Span | str]:
    """All that changed against the parent, in one line; files of code by their number if there are several."""
    if link.comparison is None:
        return [f"not known: {one_line(link.problem)}"]
    files = [d for d in link.changes if d.part == "code"]
    parts = [change_spans(d) for d in link.changes if d.part != "code"]
    if files:
        parts.append(["code of ", *change_spans(files[0])] if len(files) == 1 else [f"code of {len(files)} files"])
    return joined(parts) or ["none"]


def short_change(link: Link) -> str:
    """The change against the parent in a few words; "" where there is no parent or nothing changed."""
    if link.parent is None:
        return ""
    if link.comparison is None:
        return f"not compared: {one_line(link.problem)}"
    changes = []
    for d in (d for d in link.changes if d.part != "code"):
        name = one_line(d.name.rpartition(".")[2] if d.part == "config" else d.name)
        if d.part in ("config", "seed", "budget"):
            changes.append(f"{name} {_cut(value_text(d.before))} → {_cut(value_text(d.after))}")
        else:
            changes.append(f"{d.part} {name}" if name != d.part else name)
    files = [d.name for d in link.changes if d.part == "code"]
    if files:
        names = files[0] if len(files) == 1 else f"{len(files)} files"
        changes.append("code unknown" if files[0] == "code" else f"code: {one_line(names)}")
    more = [f"{len(changes) - _NUM_SHOWN} more"] if len(changes) > _NUM_SHOWN else []
    return ", ".join([*changes[:_NUM_SHOWN], *more]) or "no change"


def value_text(value: Any) -> str:
    """A value as the record has it, on one line, with all its digits."""
    if isinstance(value, float) and not math.isfinite(value):
        return name_of(value)
    if isinstance(value, dict | list):
        return to_json(named(value)).decode()
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else one_line(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 1]}…"


def verdict_of(run: Run) -> tuple[str, str]:
    """Word and text; older runs hold a plain text and no word."""
    verdict = run.document.get("verdict")
    if isinstance(verdict, Mapping):
        return text_of(verdict.get("word")), text_of(verdict.get("text"))
    return "", text_of(verdict)


def text_of(value: Any) -> str:
    """Text of a user out of the record, where "NaN" has become a number and nothing may be anything."""
    if isinstance(value, float) and not math.isfinite(value):
        return name_of(value)
    return "" if value is None else str(value)


def best_text(run: Run) -> str:
    """The best loss with all its digits; "-" where there is none."""
    loss = number_of((run.best or {}).get("loss"))
    return "-" if loss is None else value_text(loss)


def tree_lines(runs: Sequence[Run]) -> list[str]:
    """The tree of many runs; reads no rows, so that a thousand runs are listed in seconds."""
    for run in runs:
        with contextlib.suppress(*UNREADABLE):  # reported where it is compared
            run.config(keep=True)
    return lines_of(find_parents(runs, has_rows=False))


def lines_of(links: Sequence[Link]) -> list[str]:
    """The tree: id, status, best loss, change against the parent and verdict, a line each.

    Roots are in the order of the runs; a parent that is gone is in brackets. Each run is there once, also where parents
    go in a circle.
    """
    # By place, not by id: a folder that was copied bears the id of its original. A parent that is gone has only a name.
    by_path = {link.run.path.resolve(): link for link in links}
    roots: list[Path | str] = []
    children: dict[Path | str, list[Path | str]] = {}
    for path, link in by_path.items():
        parent, wanted = link.parent, link.run.document.get("parent")
        above: Path | str | None = None if parent is None else parent.path.resolve()
        if not isinstance(wanted, str) or not wanted or above == path:
            roots.append(path)
            continue
        if above is None or above not in by_path:
            above = f"[{one_line(wanted)}]" if parent is None else parent.id
            if above not in children:
                roots.append(above)
        children.setdefault(above, []).append(path)

    def walk(*roots: Path | str) -> Iterator[tuple[str, Path | str]]:
        """Each place with the strokes before its name; as deep as a chain of runs may be."""
        stack = [("", "", root) for root in reversed(roots)]
        while stack:
            first, rest, place = stack.pop()
            yield first, place
            below = children.get(place, [])
            for i, child in reversed(list(enumerate(below, 1))):
                strokes = ("└ ", "  ") if i == len(below) else ("├ ", "│ ")
                stack.append((rest + strokes[0], rest + strokes[1], child))

    # No root leads to a circle: one run of each becomes a root.
    reached = {place for _, place in walk(*roots)}
    in_circle = set()
    for path in by_path:
        if path not in reached:
            for below in children.values():
                below[:] = [child for child in below if child != path]
            in_circle.add(path)
            roots.append(path)
            reached |= {place for _, place in walk(path)}

    rows = []
    for strokes, place in walk(*roots):
        if isinstance(place, str):
            rows.append([f"{strokes}{place}", "", "", ""])
            continue
        run = by_path[place].run
        word, text = verdict_of(run)
        verdict = one_line(word) or _cut(one_line(text))
        note = "its parents form a cycle" if place in in_circle else ""
        changes = [note, short_change(by_path[place]), f"({verdict})" if verdict else ""]
        loss = (run.best or {}).get("loss")
        best = "-"
        if isinstance(loss, int | float):
            best = f"{loss:.4f}" if math.isfinite(loss) else name_of(float(loss))
        rows.append([f"{strokes}{run.id}", one_line(run.status), best, "  ".join(filter(None, changes))])
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    lines = ["  ".join(f"{cell:{'>' if i == 2 else '<'}{widths[i]}}" for i, cell in enumerate(row)) for row in rows]
    return [line.rstrip() for line in lines]
