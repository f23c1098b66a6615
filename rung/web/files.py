"""The files of a run that a page may show, and what is in its samples.

Only what a run makes to be looked at is given out: samples, captures, plots and pages. A file that a browser would take
for a page of ours is sent as a download, or in a sandbox; text is sent as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.responses import FileResponse, Response

from rung import parse
from rung.data.midi import read_performance
from rung.errors import RunError, UserError
from rung.runs.files import from_json
from rung.runs.paths import inside, is_known
from rung.runs.query import Run

_GIVEN_OUT = re.compile(r"(samples|captures)/.+|[^/]+\.(md|html|svg|png|csv)")
_TYPES = {
    "png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp",
    "svg": "image/svg+xml", "wav": "audio/wav", "mp3": "audio/mpeg", "ogg": "audio/ogg", "flac": "audio/flac",
    "mp4": "video/mp4", "webm": "video/webm",
    **dict.fromkeys(("txt", "md", "json", "ndjson", "csv", "abc"), "text/plain; charset=utf-8"),
}  # fmt: skip
_SANDBOX = "default-src 'none'; style-src 'unsafe-inline'; sandbox"  # of a drawing, which could hold a script
_TABLE, _HISTOGRAM = ".table.json", ".histogram.json"
_MOST_TEXT = 20_000  # characters of a text that are sent with the list
_MOST_NOTES = 20_000  # of one MIDI file
_MOST_BYTES = 16 << 20  # of one MIDI file or table
_MOST_ROWS = 2_000  # of a table


def respond(run: Run, name: str) -> Response:
    """A file of a run; RunError for any other name."""
    if not is_given_out(name):
        raise RunError(f"{name[:200]!r} is not a file that is shown.", code="no-file")
    path = inside(run.path, name)
    if not path.is_file():
        raise RunError(f"{run.id} has no file {name}.", code="no-file")
    kind = _TYPES.get(path.suffix[1:].lower())
    headers = {"content-security-policy": _SANDBOX}
    if kind is None:
        return FileResponse(path, headers=headers, media_type="application/octet-stream", filename=path.name)
    return FileResponse(path, headers=headers, media_type=kind)


def is_given_out(name: str) -> bool:
    return is_known(name) and _GIVEN_OUT.fullmatch(name) is not None


def samples(run: Run) -> Iterator[dict[str, Any]]:
    """What the run has made, by step and name; tables and histograms are not among them."""
    for step, path, caption in _kept(run):
        if path.name.endswith((_TABLE, _HISTOGRAM)):
            continue
        kind = kind_of(path)
        found: dict[str, Any] = {
            "run": run.id, "step": step, "name": path.name, "kind": kind, "url": url_of(run, path),
            "caption": caption, "num_bytes": path.stat().st_size,
        }  # fmt: skip
        if kind == "text":
            text = parse.read_bytes(path, most_bytes=_MOST_BYTES).decode("utf-8", "replace")
            found |= {"text": text[:_MOST_TEXT], "is_cut": len(text) > _MOST_TEXT}
        elif kind == "midi":
            try:
                found["notes"] = notes(path, path.stat().st_mtime_ns)
            except (UserError, OSError, ValueError, IndexError) as error:
                found |= {"notes": [], "problem": str(error)}
        yield found


def tables(run: Run) -> Iterator[dict[str, Any]]:
    """Tables and histograms of a run, and the pictures and sounds of a loop of one's own."""
    is_own = str(run.document.get("recipe")).startswith(("own loop", "import "))
    for step, path, caption in _kept(run):
        head = {"step": step, "url": url_of(run, path), "caption": caption}
        if path.name.endswith((_TABLE, _HISTOGRAM)):
            is_table = path.name.endswith(_TABLE)
            name = path.name.removesuffix(_TABLE if is_table else _HISTOGRAM)
            try:
                body = _table(path) if is_table else _histogram(path)
            except (OSError, ValueError) as error:
                body = {"problem": str(error)}
            yield {**head, "name": name, "kind": "table" if is_table else "histogram", **body}
        elif is_own and (kind := kind_of(path)) in ("image", "audio", "film"):
            yield {**head, "name": path.name, "kind": kind}


def _kept(run: Run) -> Iterator[tuple[int, Path, str]]:
    """Step, file and caption of each sample, by step and name."""
    captions = {str(event.get("path")): str(event.get("caption") or "") for event in run.events("sample")}
    for path in run.samples():
        name = path.relative_to(run.path).as_posix()
        if is_known(name) and path.parent.name.isdecimal():
            yield int(path.parent.name), path, captions.get(name, "")


def url_of(run: Run, path: Path) -> str:
    """The address of a file, relative to the page."""
    return f"files/{run.id}/{quote(path.relative_to(run.path).as_posix())}"


def kind_of(path: Path) -> str:
    suffix = path.suffix[1:].lower()
    if suffix in ("mid", "midi"):
        return "midi"
    if suffix in ("mp4", "webm"):
        return "film"
    if suffix in ("gif", "webp"):
        with parse.open_file(path) as file:
            head = file.read(64)
        return "film" if suffix == "gif" or b"ANIM" in head else "image"
    kind = _TYPES.get(suffix, "application/").partition("/")[0]
    return kind if kind in ("image", "audio", "text") else "file"


@lru_cache(maxsize=512)
def notes(path: Path, mtime_ns: int) -> list[tuple[float, float, int, int]]:
    """Start and end in seconds, key and velocity of every note of a MIDI file."""
    channels = read_performance(parse.read_bytes(path, most_bytes=_MOST_BYTES))
    found = [
        (round(float(note["start"]), 4), round(float(note["end"]), 4), int(note["pitch"]), int(note["velocity"]))
        for channel in channels.values()
        for note in channel.notes
    ]
    return sorted(found)[:_MOST_NOTES]


def _table(path: Path) -> dict[str, Any]:
    found = from_json(parse.read_bytes(path, most_bytes=_MOST_BYTES))
    if problem := parse.mismatch(found, {"columns": [str], "rows": [list]}, "it"):
        raise ValueError(f"{path.name} is not a table: {problem}")
    rows = found.get("rows") or []
    return {"columns": found.get("columns") or [], "rows": rows[:_MOST_ROWS], "num_rows": len(rows)}


def _histogram(path: Path) -> dict[str, Any]:
    found = from_json(parse.read_bytes(path, most_bytes=_MOST_BYTES))
    if problem := parse.mismatch(found, {"edges": [(int, float)], "counts": [(int, float)]}, "it"):
        raise ValueError(f"{path.name} is not a histogram: {problem}")
    edges, counts = found.get("edges") or [], found.get("counts") or []
    if len(edges) != len(counts) + 1:
        raise ValueError(f"{path.name} is not a histogram: {len(edges)} edges for {len(counts)} counts")
    return {"edges": edges, "counts": counts}
