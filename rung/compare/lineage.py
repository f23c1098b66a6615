"""Which run came from which, what each changed, and which of those changes still hold.

A parent is looked for by its id in the runs folder of its child. One that is gone, damaged, younger than its child or
part of a circle is told in words and ends the chain; nothing here is fatal. What differs is left to factors.

The surprising thing: a change of code holds for as long as the file differs from what it was before, so an edit that
was taken back by hand is struck through although nobody said so.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rung.compare.blocks import Span, code, joined
from rung.compare.code import CodeDiff, diff
from rung.compare.difference import ABSENT, Comparison, Difference
from rung.compare.reading import UNREADABLE
from rung.errors import RunError
from rung.runs.files import name_of, named, plain
from rung.runs.query import Run, list_runs
from rung.runs.record import read_document
from rung.text import one_line

_NUM_TOLD = 3  # changes in a line of the tree
_MOST_CHARS = 60  # of a value in a line
_LOOKED_IN = re.compile(r" \(looked in [^)]*\)")  # where code was sought, in the words of code.py
_WEIGHTY = ("factor", "hidden", "metric")


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
        from rung.compare.factors import compare

        if self.parent is None:
            return None
        try:
            return compare(self.parent, self.run, has_rows=self.has_rows)
        except UNREADABLE as error:
            self.problem = unreadable(self.run, error)
            return None

    @cached_property
    def changes(self) -> list[Difference]:
        found = [] if self.comparison is None else self.comparison.of(*_WEIGHTY)
        return [difference._replace(detail=without_root(self.run, difference.detail)) for difference in found]


@dataclass
class Setting:
    """One change of one run of a chain, and what became of it: new, holds, reverted or replaced (`by` whom)."""

    run: str
    difference: Difference
    state: str
    by: str = ""
    is_start: bool = False  # set where the chain begins, so there is nothing it was before


@dataclass
class Chain:
    """From the first known ancestor to the run itself; the last link is the run."""

    links: list[Link] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        return [link.run for link in self.links]


def without_root(run: Run, words: object) -> str:
    """What is said of files, without where on this machine they lie."""
    text, root = str(words), run.path.parent.parent
    if os.sep not in text:
        return text
    text = text.replace(f"{root.resolve()}{os.sep}", "").replace(f"{root}{os.sep}", "")
    return _LOOKED_IN.sub("", text)


def unreadable(run: Run, error: Exception) -> str:
    words = str(error) if isinstance(error, RunError) else f"an odd value ({type(error).__name__}: {error})"
    return f"Not all of the record can be read: {without_root(run, words)}"


def parent_id(run: Run) -> str:
    """The id of the parent, "" where there is none."""
    parent = run.document.get("parent")
    return parent if isinstance(parent, str) else ""


class AtHand:
    """Runs by place and by name: those that were opened already, and the rest of their folders where one is missing."""

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        self._opened = {run.path: run for run in runs}
        self._named: dict[Path, dict[str, Run]] = {}

    def find(self, root: Path, wanted: str) -> Run | None:
        """The run of this id; RunError where it is damaged."""
        path = root / wanted
        if path in self._opened:
            return self._opened[path]
        if not (path / "run.json").is_file():
            return self._by_name(root).get(wanted)
        return self._opened.setdefault(path, Run(path, read_document(path)))

    def _by_name(self, root: Path) -> dict[str, Run]:
        """A run that was moved, by `rung mv` or by hand, still says its old id."""
        if root not in self._named:
            named: dict[str, Run] = {}
            for run in list_runs(root, None, []):
                formerly = run.document.get("formerly")
                for name in (run.id, *(formerly if isinstance(formerly, list) else ())):
                    named.setdefault(str(name), self._opened.get(run.path, run))
            self._named[root] = named
        return self._named[root]


def find_parent(run: Run, at_hand: AtHand | None = None) -> Link:
    """The run with its parent, or with the reason why there is none at hand."""
    wanted = parent_id(run)
    if not wanted:
        return Link(run)
    try:
        found = (at_hand or AtHand()).find(run.path.parent.parent, wanted)
    except (RunError, OSError, ValueError, KeyError) as error:
        return Link(run, None, f"its parent {wanted} cannot be read: {without_root(run, error)}")
    if found is None:
        return Link(run, None, f"its parent {wanted} is not among the runs at hand")
    born, came = str(found.document.get("created") or ""), str(run.document.get("created") or "")
    if born and came and born > came:
        return Link(
            run, None, f"{found.id} began after {run.id}: another run that bears the name of its parent {wanted}"
        )
    renamed = "" if found.id == wanted else f"its parent {wanted} is now called {found.id}"
    return Link(run, found, renamed)


def find_parents(runs: Sequence[Run], has_rows: bool = True) -> list[Link]:
    """Each run with its parent; a run that is the parent of several is opened once."""
    at_hand = AtHand(runs)
    links = [find_parent(run, at_hand) for run in runs]
    for link in links:
        link.has_rows = has_rows
    return links


def chain(run: Run) -> Chain:
    at_hand = AtHand()
    links, seen = [find_parent(run, at_hand)], {run.path}
    while (parent := links[-1].parent) is not None:
        if parent.path in seen:
            links[-1] = Link(
                links[-1].run, None, f"its parent {parent.id} descends from it: the parents go in a circle"
            )
            break
        seen.add(parent.path)
        links.append(find_parent(parent, at_hand))
        links[-1].has_rows = False  # of the earlier changes only the settings are told
    return Chain(links[::-1])


def settings(found: Chain) -> list[Setting]:
    """What was set where the chain begins, and every change since, oldest first."""
    out = list(_start(found.links[0].run))
    newest = found.links[-1]
    since: dict[Path, CodeDiff] = {}  # from a parent to the newest run
    for link in found.links:
        for difference in link.changes:
            if not _is_setting(link, difference):
                continue
            state = "new" if link is newest else "holds"
            for earlier in [s for s in out if _is_same(s.difference, difference) and s.state == "holds"]:
                if difference.part == "code":
                    if _is_as_before(found, earlier, since):
                        earlier.state, earlier.by = "reverted", link.run.id
                else:
                    is_back = plain(earlier.difference.before) == plain(difference.after)
                    earlier.state, earlier.by = ("reverted" if is_back else "replaced"), link.run.id
            out.append(Setting(link.run.id, difference, state))
    return out


def _is_setting(link: Link, difference: Difference) -> bool:
    """Not a condition of the run, and not code of which nobody knows whether it changed."""
    if difference.part == "code":
        return link.comparison is not None and difference.name in {file.path for file in link.comparison.code.files}
    return difference.part in ("config", "data", "seed", "metric")


def _start(run: Run) -> Iterator[Setting]:
    """The keys that somebody chose for the first run."""
    try:
        tree, sources = run.config(), run.sources()
    except RunError:
        return
    for name, source in sources.items():
        if source == "default" or str(source).startswith("derived"):
            continue
        value: Any = tree
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        difference = Difference("config", name, None, value, "factor", "", ABSENT, str(source))
        yield Setting(run.id, difference, "holds", is_start=True)


def _is_same(one: Difference, other: Difference) -> bool:
    return (one.part, one.name) == (other.part, other.name)


def _is_as_before(found: Chain, setting: Setting, since: dict[Path, CodeDiff]) -> bool:
    """Whether the newest run has the file as it was before the change."""
    link = next(link for link in found.links if link.run.id == setting.run)
    if link.parent is None:
        return False
    if link.parent.path not in since:
        since[link.parent.path] = diff(link.parent, found.links[-1].run)
    change = since[link.parent.path]
    return not change.problem and setting.difference.name not in {file.path for file in change.files}


def change_spans(difference: Difference) -> list[Span | str]:
    """A difference as part of a line: `optimizer.grad_clip` `1.0` → `0.5`."""
    before, after = value_text(difference.before), value_text(difference.after)
    spans: list[Span | str] = [code(difference.name)]
    if difference.part == "code" or (difference.before is None and difference.after is None):
        return [*spans, f" {difference.detail}"] if difference.detail else spans
    if difference.part not in ("config", "seed"):
        spans = [f"{difference.part} ", code(difference.name)]
    before = "absent" if difference.source_before == ABSENT else before
    after = "absent" if difference.source_after == ABSENT else after
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
    files = [d for d in link.changes if d.part == "code"]
    words = [_short(d) for d in link.changes if d.part != "code"]
    if files:
        names = files[0].name if len(files) == 1 else f"{len(files)} files"
        words.append("code unknown" if files[0].name == "code" else f"code: {one_line(names)}")
    more = [f"{len(words) - _NUM_TOLD} more"] if len(words) > _NUM_TOLD else []
    return ", ".join([*words[:_NUM_TOLD], *more]) or "no change"


def _short(difference: Difference) -> str:
    name = one_line(difference.name.rpartition(".")[2] if difference.part == "config" else difference.name)
    if difference.part not in ("config", "seed", "budget"):
        return f"{difference.part} {name}" if name != difference.part else name
    before, after = (_cut(value_text(value)) for value in (difference.before, difference.after))
    return f"{name} {before} → {after}"


def value_text(value: Any) -> str:
    """A value as the record has it, on one line, with all its digits."""
    if isinstance(value, float) and not math.isfinite(value):
        return name_of(value)
    if isinstance(value, dict | list):
        from rung.runs.files import to_json

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
    loss = (run.best or {}).get("loss")
    return value_text(loss) if isinstance(loss, int | float) and not isinstance(loss, bool) else "-"


@dataclass
class Node:
    """A place in the tree; `link` is None for a parent that is not among the runs."""

    name: str
    link: Link | None = None
    children: list[Node] = field(default_factory=list)
    note: str = ""


def tree(links: Sequence[Link]) -> list[Node]:
    """The roots, in the order of the runs; each run once, also where parents go in a circle."""
    # By place, not by id: a folder that was copied bears the id of its original.
    nodes = {link.run.path.resolve(): Node(link.run.id, link) for link in links}
    absent: dict[str, Node] = {}
    roots: list[Node] = []
    for path, node in nodes.items():
        assert node.link is not None
        parent, wanted = node.link.parent, parent_id(node.link.run)
        above = nodes.get(parent.path.resolve()) if parent is not None else None
        if not wanted or (parent is not None and parent.path.resolve() == path):
            roots.append(node)
        elif above is not None:
            above.children.append(node)
        else:
            name = parent.id if parent is not None else f"[{one_line(wanted)}]"
            if name not in absent:
                absent[name] = Node(name)
                roots.append(absent[name])
            absent[name].children.append(node)
    _cut_circles(roots, list(nodes.values()))
    return roots


def _cut_circles(roots: list[Node], nodes: Sequence[Node]) -> None:
    """Makes a root of one run of each circle, which no root leads to."""
    reached = {id(node) for _, node in _walk(roots)}
    for node in nodes:
        if id(node) in reached:
            continue
        for other in nodes:
            other.children = [child for child in other.children if child is not node]
        node.note = "its parents go in a circle"
        roots.append(node)
        reached |= {id(below) for _, below in _walk([node])}


def _walk(roots: Sequence[Node]) -> Iterator[tuple[str, Node]]:
    """Each node with the strokes before its name; as deep as a chain of runs may be."""
    stack = [("", "", root) for root in reversed(roots)]
    while stack:
        first, rest, node = stack.pop()
        yield first, node
        last = len(node.children) - 1
        for i in range(last, -1, -1):
            strokes = ("└ ", "  ") if i == last else ("├ ", "│ ")
            stack.append((rest + strokes[0], rest + strokes[1], node.children[i]))


def tree_lines(runs: Sequence[Run]) -> list[str]:
    """id, status, best loss, change against the parent and verdict, a line each; a parent that is gone in brackets.

    Reads no rows, so that a thousand runs are listed in seconds.
    """
    for run in runs:
        with contextlib.suppress(*UNREADABLE):  # told where it is compared
            run.config(keep=True)
    return lines_of(find_parents(runs, has_rows=False))


def lines_of(links: Sequence[Link]) -> list[str]:
    rows = [_cells(strokes, node) for strokes, node in _walk(tree(links))]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    lines = ["  ".join(f"{cell:{'>' if i == 2 else '<'}{widths[i]}}" for i, cell in enumerate(row)) for row in rows]
    return [line.rstrip() for line in lines]


def _cells(strokes: str, node: Node) -> list[str]:
    if node.link is None:
        return [f"{strokes}{node.name}", "", "", ""]
    word, text = verdict_of(node.link.run)
    verdict = one_line(word) or _cut(one_line(text))
    words = [node.note, short_change(node.link), f"({verdict})" if verdict else ""]
    run, told = node.link.run, "  ".join(filter(None, words))
    return [f"{strokes}{node.name}", one_line(run.status), _loss(run), told]


def _loss(run: Run) -> str:
    loss = (run.best or {}).get("loss")
    if not isinstance(loss, int | float):
        return "-"
    return f"{loss:.4f}" if math.isfinite(loss) else name_of(float(loss))
