"""The list of an item's files, and the items of a bucket. An item, a run or a data set, exists when its manifest does.

    runs/<experiment>/<n>/manifest.json        data/<name>/manifest.json
    runs/<experiment>/<n>/files/<path>.<hash>  the first 16 digits of its sha256

A file is named by its content, so one that is there need not be sent again, and a new manifest can replace the old one
while somebody still reads by that. A file of lines that has grown is listed in pieces: those that are there, and what
came since. What is read here came from elsewhere and is checked: no path leads out of the item.
`push` differs for every push, so that of two that send the same files at the same time exactly one wins.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from rung import parse
from rung.errors import RunError, UserError
from rung.remote.bucket import Bucket, RemoteError, Version, in_parallel
from rung.runs.files import floats_again, to_json
from rung.runs.maintenance.selection import RANGE
from rung.runs.record import check_name

SCHEMA = 2  # raise it when an older reader would misread an item; 1 knows no pieces
FOLDERS = {"run": "runs", "data": "data"}
_HASH = re.compile(r"[0-9a-f]{64}")
_PLAIN = "/!'()+,=@ "  # besides letters, digits and _.-~
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_ITEM = re.compile(r"(?P<place>.+)/(?:runs/(?P<run>[^/]+/[0-9]+)|data/(?P<data>[^/]+))/?")


@dataclass(frozen=True)
class Piece:
    """Some bytes of a file, from `start` on: one object."""

    path: str
    start: int
    bytes: int
    sha256: str

    @property
    def key(self) -> str:
        """Where its content lies, below the item: readable, and nothing in it that a store would refuse."""
        name = quote(self.path, safe=_PLAIN)
        if len(name) > 700 or max(map(len, name.split("/"))) > 200:
            name = f"long/{hashlib.sha256(self.path.encode()).hexdigest()[:32]}"
        return f"files/{name}.{self.sha256[:16]}"


@dataclass(frozen=True)
class FileEntry:
    path: str
    bytes: int
    sha256: str
    parts: tuple[tuple[int, str], ...] = field(default=(), compare=False)  # bytes and hash of each of several

    @property
    def pieces(self) -> list[Piece]:
        parts = self.parts or ((self.bytes, self.sha256),)
        ends = itertools.accumulate(size for size, _ in parts)
        return [Piece(self.path, end - size, size, sha256) for end, (size, sha256) in zip(ends, parts)]


@dataclass(frozen=True)
class Manifest:
    """An item: its kind ("run" or "data"), name ("piano/7"), identity, files, and what a listing shows of it."""

    kind: str
    name: str
    uid: str  # of a run its uid, of a data set its fingerprint
    entries: tuple[FileEntry, ...]
    document: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    push: str = ""

    @property
    def place(self) -> str:
        return place_of(self.kind, self.name)

    @property
    def num_bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    @property
    def pieces(self) -> list[Piece]:
        return [piece for entry in self.entries for piece in entry.pieces]

    def key(self, piece: Piece) -> str:
        return f"{self.place}/{piece.key}"

    def encoded(self) -> bytes:
        schema = SCHEMA if any(entry.parts for entry in self.entries) else 1
        head = {"schema": schema, "kind": self.kind, "name": self.name, "uid": self.uid, "push": self.push}
        files = [{"path": e.path, "bytes": e.bytes, "sha256": e.sha256, **_where(e)} for e in self.entries]
        more = {"created": self.created, "bytes": self.num_bytes, "document": self.document, "files": files}
        return msgspec.json.format(to_json({**head, **more}), indent=1) + b"\n"


def _where(entry: FileEntry) -> dict[str, Any]:
    keys = [{"bytes": one.bytes, "sha256": one.sha256, "key": one.key} for one in entry.pieces]
    return {"parts": keys} if entry.parts else {"key": keys[0]["key"]}


def place_of(kind: str, name: str) -> str:
    return f"{FOLDERS[kind]}/{name}"


def split_item(url: str) -> tuple[str, str, str] | None:
    """Place, kind and name of a URL that names an item, .../runs/piano/7 or .../data/piano; None for any other."""
    if not (match := _ITEM.fullmatch(url)):
        return None
    return match["place"], "run" if match["run"] else "data", match["run"] or match["data"]


def check_item(kind: str, name: str) -> None:
    """Raises RunError where a name cannot be that of a run or a data set."""
    experiment, _, number = name.partition("/")
    if kind == "run" and not _NUMBER.fullmatch(number):
        raise RunError(f"{name!r} is not a run; name one as piano/7.", code="bad-name")
    if kind == "data" and number:
        raise RunError(f"{name!r} is not the name of a data set; name one as piano.", code="bad-name")
    check_name(experiment)


def read_manifest(bucket: Bucket, kind: str, name: str) -> tuple[Manifest, Version] | None:
    """The manifest of an item and its version; None where the item is not there."""
    key = f"{place_of(kind, name)}/manifest.json"
    found = bucket.read(key)
    if found is None:
        return None
    try:
        content = parse.json(found[0])  # not from_json, to which a file called Infinity is a number
        if not isinstance(content, dict) or not isinstance(content.get("schema"), int):
            raise ValueError("it is not a manifest of rung")
        if content["schema"] > SCHEMA:
            message = f"{name} in the bucket was pushed by a newer rung (schema {content['schema']}); upgrade rung."
            raise RemoteError(message, code="version-mismatch")
        if (content["kind"], content["name"]) != (kind, name):
            raise ValueError(f"it is of {content['kind']} {content['name']}, not of {kind} {name}")
        entries = []
        for spec in content["files"]:
            path, num_bytes, sha256 = spec["path"], spec["bytes"], spec["sha256"]
            parts = [(part["bytes"], part["sha256"]) for part in spec.get("parts") or ()]
            entry = FileEntry(path, num_bytes, sha256, tuple(parts))
            if not isinstance(entry.path, str) or not isinstance(entry.bytes, int) or entry.bytes < 0:
                raise ValueError("a file has no path or no size")
            for size, digest in ((num_bytes, sha256), *parts):
                if not isinstance(digest, str) or not _HASH.fullmatch(digest):
                    raise ValueError(f"{entry.path!r} has no hash")
                if not isinstance(size, int) or size < 0:
                    raise ValueError(f"a part of {entry.path!r} has no size")
            if parts and sum(size for size, _ in parts) != entry.bytes:
                raise ValueError(f"the parts of {entry.path!r} are not its {entry.bytes} bytes")
            if any(part in ("", ".", "..") or "\0" in part for part in entry.path.split("/")):
                raise ValueError(f"the path {entry.path!r} leads out of the item")
            for piece, said in zip(entry.pieces, spec.get("parts") or [spec]):
                if said.get("key") != piece.key:
                    raise ValueError(f"{entry.path!r} lies at {said.get('key')!r}, which is not its place")
            entries.append(entry)
        # No path twice, and none that is a file and a folder.
        paths = [entry.path for entry in entries]
        folders = {"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, path.count("/") + 1)}
        if len(set(paths)) != len(paths) or folders & set(paths):
            raise ValueError("two of its files have one path")
        document = floats_again(content["document"]) if isinstance(content["document"], dict) else {}
        created, push = str(content["created"]), str(content["push"])
        return Manifest(kind, name, str(content["uid"]), tuple(entries), document, created, push), found[1]
    except (ValueError, KeyError, TypeError) as error:
        message = f"{bucket.at(key)} is damaged: {error}; push the item again with --force."
        raise RemoteError(message, code="item-damaged") from None


def runs_there(bucket: Bucket, experiments: Sequence[str] = (), problems: list[str] | None = None) -> list[Manifest]:
    """The runs at a place, of some experiments or all, by experiment and number."""
    for experiment in experiments:
        check_name(experiment)
    names = []
    for experiment in experiments or bucket.folders("runs"):
        numbers = [number for number in bucket.folders(f"runs/{experiment}") if number.isdecimal()]
        names += [f"{experiment}/{number}" for number in sorted(numbers, key=int)]
    return _read_all(bucket, "run", names, problems)


def data_there(bucket: Bucket, problems: list[str] | None = None) -> list[Manifest]:
    """The data sets at a place, by name."""
    return _read_all(bucket, "data", bucket.folders("data"), problems)


def names_of(bucket: Bucket, refs: Sequence[str]) -> list[str]:
    """The runs of a bucket that "piano/7", "piano/3..7" or "piano" (all of them) mean."""
    names: list[str] = []
    for ref in refs:
        ref = ref.rstrip("/")
        experiment, _, number = ref.partition("/")
        if match := RANGE.fullmatch(ref):
            low, high = int(match[2] or 0), int(match[3]) if match[3] else 10**9
            found = [m.name for m in runs_there(bucket, [match[1]]) if low <= int(m.name.rpartition("/")[2]) <= high]
        elif number:
            check_item("run", ref)
            found = [ref]
        else:
            found = [manifest.name for manifest in runs_there(bucket, [experiment])]
        if not found:
            message = f"there is no run {ref} at {bucket.url}; `rung ls --remote {bucket.url}` lists all."
            raise RemoteError(message, code="no-item")
        names += found
    return list(dict.fromkeys(names))


def _read_all(bucket: Bucket, kind: str, names: Sequence[str], problems: list[str] | None) -> list[Manifest]:
    """The manifests of these names; an item without one is half sent, or half removed, and does not exist."""
    found: dict[str, Manifest] = {}

    def read(name: str) -> None:
        try:
            check_item(kind, name)
        except RunError:
            return  # somebody else's folder
        try:
            if (there := read_manifest(bucket, kind, name)) is not None:
                found[name] = there[0]
        except UserError as error:
            if problems is None:
                raise
            problems.append(str(error))

    in_parallel(read, names)
    return [found[name] for name in names if name in found]
