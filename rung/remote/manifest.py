"""The list of an item's files. An item, a run or a data set, is at a place exactly when its manifest is.

    runs/<experiment>/<n>/manifest.json        data/<name>/manifest.json
    runs/<experiment>/<n>/files/<path>.<hash>  the first 16 digits of its sha256

A file is named by its content, so one that is there need not be sent again, and a new manifest can come into place
while somebody reads by the old one. What is read here came from elsewhere and is checked: no path leads out of the
item.

The surprising thing: `push` is a number of its own for each push, so that of two that send the same at the same time
exactly one finds its own manifest there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from rung.errors import RunError
from rung.remote.bucket import Bucket, RemoteError, Version
from rung.runs.files import floats_again, to_json
from rung.runs.record import check_name

SCHEMA = 1  # raise it when an older reader would misread an item
FOLDERS = {"run": "runs", "data": "data"}
_HASH = re.compile(r"[0-9a-f]{64}")
_PLAIN = "/!'()+,=@ "  # besides letters, digits and _.-~
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Entry:
    """One file of an item."""

    path: str
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
class Manifest:
    """An item: its kind ("run" or "data"), name ("piano/7"), identity, files, and what a listing shows of it."""

    kind: str
    name: str
    uid: str  # of a run its uid, of a data set its fingerprint
    entries: tuple[Entry, ...]
    document: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    push: str = ""

    @property
    def place(self) -> str:
        return place_of(self.kind, self.name)

    @property
    def num_bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def key(self, entry: Entry) -> str:
        return f"{self.place}/{entry.key}"

    def encoded(self) -> bytes:
        head = {"schema": SCHEMA, "kind": self.kind, "name": self.name, "uid": self.uid, "push": self.push}
        files = [{"path": e.path, "bytes": e.bytes, "sha256": e.sha256, "key": e.key} for e in self.entries]
        more = {"created": self.created, "bytes": self.num_bytes, "document": self.document, "files": files}
        return msgspec.json.format(to_json({**head, **more}), indent=1) + b"\n"


def place_of(kind: str, name: str) -> str:
    return f"{FOLDERS[kind]}/{name}"


def check_item(kind: str, name: str) -> None:
    """Raises RunError where a name cannot be that of a run or a data set."""
    experiment, _, number = name.partition("/")
    if kind == "run" and not _NUMBER.fullmatch(number):
        raise RunError(f"{name!r} is not a run; name one as piano/7.")
    if kind == "data" and number:
        raise RunError(f"{name!r} is not the name of a data set; name one as piano.")
    check_name(experiment)


def read_manifest(bucket: Bucket, kind: str, name: str) -> tuple[Manifest, Version] | None:
    """The manifest of an item and its version; None where the item is not there."""
    key = f"{place_of(kind, name)}/manifest.json"
    found = bucket.read(key)
    if found is None:
        return None
    try:
        return _decoded(found[0], kind, name), found[1]
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteError(f"{bucket.at(key)} is damaged: {error}; push the item again with --force.") from None


def _decoded(data: bytes, kind: str, name: str) -> Manifest:
    told = msgspec.json.decode(data)  # not from_json, to which a file called Infinity is a number
    if not isinstance(told, dict) or not isinstance(told.get("schema"), int):
        raise ValueError("it is not a manifest of rung")
    if told["schema"] > SCHEMA:
        raise RemoteError(f"{name} there was pushed by a newer rung (schema {told['schema']}); upgrade rung.")
    if (told["kind"], told["name"]) != (kind, name):
        raise ValueError(f"it is of {told['kind']} {told['name']}, not of {kind} {name}")
    entries = tuple(_entry(one) for one in told["files"])
    _check_tree(entries)
    document = floats_again(told["document"]) if isinstance(told["document"], dict) else {}
    return Manifest(kind, name, str(told["uid"]), entries, document, str(told["created"]), str(told["push"]))


def _entry(told: Any) -> Entry:
    entry = Entry(told["path"], told["bytes"], told["sha256"])
    if not isinstance(entry.path, str) or not isinstance(entry.bytes, int) or entry.bytes < 0:
        raise ValueError("a file has no path or no size")
    if not isinstance(entry.sha256, str) or not _HASH.fullmatch(entry.sha256):
        raise ValueError(f"{entry.path!r} has no hash")
    parts = entry.path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"the path {entry.path!r} leads out of the item")
    if told.get("key") != entry.key:
        raise ValueError(f"{entry.path!r} lies at {told.get('key')!r}, which is not its place")
    return entry


def _check_tree(entries: tuple[Entry, ...]) -> None:
    """No path twice, and none that is a file and a folder."""
    paths = [entry.path for entry in entries]
    folders = {"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, path.count("/") + 1)}
    if len(set(paths)) != len(paths) or folders & set(paths):
        raise ValueError("two of its files have one path")
