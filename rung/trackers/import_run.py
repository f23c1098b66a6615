"""Turns a History into a run on disk that every verb can read.

A run is whole or absent: run.json comes last. It says where it came from under `imported`, and the same run of the same
tracker is imported once, unless asked for again. Metrics that surely are what rung has a name for get that name
(`renamed`), evals become evals (runs/metricnames.py); the old names are kept under `imported`. Nothing of this
machine goes into the run: times, versions and packages are those of the source, and what it does not say stays unknown.
"""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from rung.files import write_whole
from rung.runs.fields import leaves
from rung.runs.files import plain, to_json, write_json
from rung.runs.metricnames import eval_of, usual_name
from rung.runs.metrics import numbers
from rung.runs.query import Run, list_runs
from rung.runs.record import SCHEMA, check_name, claimed
from rung.trackers.history import History, is_time

_OURS = ("step", "unix_s")  # every row has these already


@dataclass(frozen=True)
class ImportResult:
    """What became of one run of another tracker."""

    history: History
    run_id: str | None  # None in a dry run, and for what was not imported
    num_evals: int
    remark: str  # why it was not imported, or what was left out


def import_run(history: History, root: Path, experiment: str, is_dry: bool = False) -> ImportResult:
    """Writes the run as the next of `experiment`; nothing of it is left behind if that fails."""
    check_name(experiment)
    names = renamed(history)
    eval_names = {name: eval_of(name) for name, new in names.items() if new.startswith("eval/")}
    evals: list[dict[str, Any]] = []
    for step, unix_s, values in history.rows():
        results: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            found = eval_names.get(name)
            if found is not None:
                results.setdefault(found.set, {})[found.name] = value
        if results:
            evals.append({"kind": "eval", "step": step, "unix_s": unix_s, "segment": 0, "results": results})

    # What was not imported, in words.
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(history.left_out.items()))
    remarks = [f"not imported: {counted}"] if counted else []
    if history.num_replaced:
        remarks.append(f"{history.num_replaced} values were logged again later; the later ones count")
    remark = "; ".join(filter(None, [*remarks, *history.problems]))
    if is_dry:
        return ImportResult(history, None, len(evals), remark)

    encode = msgspec.json.Encoder().encode
    lines: list[bytes] = []
    steps: list[int] = []
    for step, unix_s, values in history.rows():
        row = {"step": step, "unix_s": (history.started or 0.0) if unix_s is None else unix_s}
        lines.append(encode(numbers({**row, **{names[name]: value for name, value in values.items()}})) + b"\n")
        steps.append(step)
    events = [*evals]
    for at, unix_s, text in history.remarks:
        events.append({"kind": "note", "step": at, "unix_s": unix_s, "segment": 0, "text": text})
    if remark:
        events.append({"kind": "warning", "step": None, "unix_s": time.time(), "segment": 0, "text": remark})
    last = steps[-1] if steps else None
    events.append({"kind": "end", "step": last, "unix_s": history.ended, "segment": 0, "status": history.status})
    config = plain(history.config)
    with claimed(root, experiment) as path:
        (path / "metrics").mkdir()
        write_whole(path / "metrics" / "000.ndjson", b"".join(lines))
        write_whole(path / "events.ndjson", b"".join(to_json(event) + b"\n" for event in events))
        write_whole(path / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode())
        write_json(path / "config.sources.json", {key: history.tracker for key, _ in leaves(config)})
        write_json(path / "data.json", {})
        write_json(path / "definitions.json", {})
        write_json(path / "env.json", history.environment)
        write_json(path / "run.json", _document(history, experiment, int(path.name), names, steps, evals))
        return ImportResult(history, f"{experiment}/{path.name}", len(evals), remark)


def earlier(root: Path) -> Callable[[History], Run | None]:
    """Answers which run here was imported from a history, if any."""
    here: dict[tuple[Any, Any], Run] = {}
    for run in list_runs(root, problems=[]):
        source = run.document.get("imported")
        if isinstance(source, dict):
            here[source.get("from"), source.get("id")] = run
    return lambda history: here.get((history.tracker, history.id))


def experiment_for(history: History) -> str:
    """A name that a folder and a git ref can have, after the source's project or folder."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", history.group or history.tracker)
    name = re.sub(r"\.\.+", ".", name).strip("-._").removesuffix(".lock")[:100]
    return name or history.tracker


def renamed(history: History) -> dict[str, str]:
    """Source's name of each metric -> its name here. No two become one: the first keeps the name they would share."""
    wanted = {}
    for name in history.names:
        found = eval_of(name)
        wanted[name] = f"eval/{found.set}/{found.name}" if found is not None else usual_name(name) or name
    taken = {name for name, new in wanted.items() if name not in _OURS and new == name}
    out = {}
    for name, new in wanted.items():
        if name in _OURS:
            new = f"{history.tracker}/{name}"
            while new in taken:
                new = f"{history.tracker}/{new}"
        elif new in taken:
            new = name
        taken.add(new)
        out[name] = new
    return out


def _document(
    history: History,
    experiment: str,
    number: int,
    names: Mapping[str, str],
    steps: Sequence[int],
    evals: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:
    """What run.json says."""
    started, ended = (when if when is not None and is_time(when) else None for when in (history.started, history.ended))
    created = _utc(time.time() if started is None else started)
    seed = next((history.config[key] for key in ("seed", "random_seed") if key in history.config), None)
    packages = history.environment.get("packages") or {}
    versions = {"python": history.environment.get("python"), "torch": packages.get("torch")}
    segment = {"number": 0, "started": created, "first_step": steps[0] if steps else None, "command": history.command}
    elapsed = 0.0 if started is None or ended is None else ended - started
    # The lowest finite loss of the eval set that was there first.
    best: dict[str, Any] | None = None
    for event in evals:
        for of_set, values in event["results"].items():
            loss = values.get("loss")
            if loss is None or not math.isfinite(loss) or (best is not None and of_set != best["set"]):
                continue
            if best is None or loss < best["loss"]:
                best = {"step": event["step"], "set": of_set, "loss": loss}
    return {
        "schema": SCHEMA,
        "uid": uuid.uuid4().hex,
        "id": f"{experiment}/{number}",
        "experiment": experiment,
        "number": number,
        "parent": None,
        "why": ": ".join(filter(None, [history.name, history.notes])) or None,
        "verdict": None,
        "tags": history.tags,
        "recipe": f"import {history.tracker}",
        "preset": None,
        "status": history.status,
        "command": history.command,
        "seed": seed if isinstance(seed, int) else None,
        "created": created,
        "ended": None if ended is None else _utc(ended),
        "versions": {name: version for name, version in versions.items() if version},
        "process": None,
        "best": best,
        "last_step": steps[-1] if steps else None,
        "derived": {},
        "code": {"kind": "none", "reason": f"imported from {history.tracker}, which does not keep it with the run"},
        "segments": [{**segment, "env": "env.json"}],
        "reason": history.reason,
        "totals": {"step": steps[-1] if steps else 0, "elapsed_s": elapsed},
        "imported": {
            "from": history.tracker,
            "path": str(history.path),
            "id": history.id,
            "name": history.name,
            "unix_s": time.time(),
            "summary": history.summary,
            "renamed": {new: old for old, new in names.items() if new != old},
        },
    }


def _utc(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
