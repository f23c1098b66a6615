"""What is at a place: the manifests of its runs and data sets."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rung.errors import RunError, UserError
from rung.remote.bucket import Bucket, RemoteError
from rung.remote.manifest import Manifest, check_item, read_manifest
from rung.remote.workers import each
from rung.runs.record import check_name

_RANGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([0-9]*)\.\.([0-9]*)")

_ITEM = re.compile(r"(?P<place>.+)/(?:runs/(?P<run>[^/]+/[0-9]+)|data/(?P<data>[^/]+))/?")


def split_item(url: str) -> tuple[str, str, str] | None:
    """Place, kind and name of a URL that names an item, .../runs/piano/7 or .../data/piano; None for any other."""
    match = _ITEM.fullmatch(url)
    if match is None:
        return None
    return match["place"], "run" if match["run"] else "data", match["run"] or match["data"]


def runs_there(bucket: Bucket, experiments: Sequence[str] = (), problems: list[str] | None = None) -> list[Manifest]:
    """The runs at a place, of some experiments or all, by experiment and number."""
    names = []
    for experiment in experiments:
        check_name(experiment)
    for experiment in experiments or bucket.folders("runs"):
        numbers = [number for number in bucket.folders(f"runs/{experiment}") if number.isdecimal()]
        names += [f"{experiment}/{number}" for number in sorted(numbers, key=int)]
    return _read(bucket, "run", names, problems)


def data_there(bucket: Bucket, problems: list[str] | None = None) -> list[Manifest]:
    """The data sets at a place, by name."""
    return _read(bucket, "data", bucket.folders("data"), problems)


def names_of(bucket: Bucket, words: Sequence[str]) -> list[str]:
    """The runs that are there and that "piano/7", "piano/3..7" or "piano" (all of them) mean."""
    names: list[str] = []
    for word in words:
        word = word.rstrip("/")
        experiment, _, number = word.partition("/")
        if match := _RANGE.fullmatch(word):
            low, high = int(match[2] or 0), int(match[3]) if match[3] else 10**9
            found = [m.name for m in runs_there(bucket, [match[1]]) if low <= int(m.name.rpartition("/")[2]) <= high]
        elif number:
            check_item("run", word)
            found = [word]
        else:
            found = [manifest.name for manifest in runs_there(bucket, [experiment])]
        if not found:
            raise RemoteError(f"there is no run {word} at {bucket.url}; `rung ls --remote {bucket.url}` lists all.")
        names += found
    return list(dict.fromkeys(names))


def _read(bucket: Bucket, kind: str, names: Sequence[str], problems: list[str] | None) -> list[Manifest]:
    """The manifests of these names; what has none is half sent, or half removed, and not there."""
    found: dict[str, Manifest] = {}

    def read(name: str) -> None:
        try:
            check_item(kind, name)
        except RunError:
            return  # somebody else's folder
        try:
            there = read_manifest(bucket, kind, name)
        except UserError as error:
            if problems is None:
                raise
            problems.append(str(error))
            return
        if there is not None:
            found[name] = there[0]

    each(read, names)
    return [found[name] for name in names if name in found]
