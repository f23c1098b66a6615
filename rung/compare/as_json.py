"""What `rung show`, `rung diff` and the page of the lab say of runs, as plain values for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rung.errors import RunError
from rung.runs.columns import Progress
from rung.runs.fields import summary
from rung.runs.query import Run

if TYPE_CHECKING:
    from rung.compare.align import Outcome, Side
    from rung.compare.factors import Comparison, Strictness
    from rung.compare.lineage import Link


def run_json(run: Run, progress: Progress | None = None, has_summary: bool = True) -> dict[str, Any]:
    """All of a run's record. Without its summary of metrics it takes no time, also where many rows are unread."""
    return {
        **run.document,
        **summary(run),
        "config": run.config(),
        "sources": run.sources(),
        "data": run.data(),
        "environment": run.environment(),
        "metrics": {name: msgspec.to_builtins(one) for name, one in run.summary(progress).items()}
        if has_summary
        else {},
        "evals": run.evals(),
        "notes": run.notes(),
        "pinned": run.pinned(),
        "changed": changed(run),
        "events": list(run.events()),
        "samples": [path.relative_to(run.path).as_posix() for path in run.samples()],
        "checkpoints": run.checkpoints(),
        "disk_bytes": run.disk_bytes(),
    }


def link_of(run: Run) -> Link | None:
    """The run with its parent; None for a first run, or where the parent cannot be read."""
    if not run.document.get("parent"):
        return None
    from rung.compare.lineage import find_parent

    try:
        link = find_parent(run)
        link.has_rows = False  # for one line they need not be read
    except (RunError, OSError):
        return None
    return link


def changed(run: Run, link: Link | None = None) -> str:
    """The parent and what changed against it, in one line; in brackets why it is not known."""
    if not (parent := run.document.get("parent")):
        return ""
    from rung.compare.lineage import short_change

    link = link or link_of(run)
    try:
        text = short_change(link) if link is not None else "(it cannot be read)"
    except (RunError, OSError) as error:
        text = f"({error})"
    return f"{text or f'({link.problem})' if link and link.problem else text or 'nothing'} since {parent}"


def diff_json(comparison: Comparison, strict: Strictness, happened: Outcome) -> dict[str, Any]:
    """All that `rung diff` found."""
    code = comparison.code
    runs = {"a": comparison.a, "b": comparison.b}
    return {
        **{
            key: {
                "id": run.document["id"], "path": str(run.path), "status": run.status, "status_text": run.status_text,
                "step": run.step, "parent": run.document.get("parent"), "why": run.document.get("why"),
            }
            for key, run in runs.items()
        },
        "is_strict": strict.is_strict,
        "words": strict.words,
        "factor": None if strict.factor is None else strict.factor._asdict(),
        "confounders": [difference._asdict() for difference in strict.confounders],
        "allowed": [difference._asdict() for difference in strict.allowed],
        "differences": [difference._asdict() for difference in comparison.differences],
        "same": comparison.same,
        "not_looked_at": comparison.unknown,
        "notes": comparison.notes,
        "code": {
            "files": [file._asdict() for file in code.files],
            "patch": code.patch, "problem": code.problem, "notes": code.notes,
        },
        "outcome": {
            "metric": happened.metric, "is_lower_better": happened.is_lower_better,
            "a": _side_plain(happened.a), "b": _side_plain(happened.b),
            "at_steps": [shared._asdict() for shared in happened.at_steps],
            "at_targets": [shared._asdict() for shared in happened.at_targets],
            "problems": happened.problems,
        },
    }  # fmt: skip


def _side_plain(side: Side) -> dict[str, Any]:
    points = {name: getattr(side, name) for name in ("final", "best")}
    return {**vars(side), **{name: None if point is None else point._asdict() for name, point in points.items()}}
