"""A prepared data set on disk: memory-mapped arrays, an index of records, splits, a manifest.

    <store>/manifest.json   counts, dtypes, sizes, hashes, and what the recipe wrote about its preparation
    <store>/<name>.bin      one array per name, raw little-endian numbers
    <store>/index.jsonl     one record per line: start, length, split, and whatever the recipe wants to remember
    <store>/splits.json     split -> record numbers
    <store>/...             whatever else the recipe keeps with its data: the files of a tokenizer

A store is whole or absent: it is written beside its final name and moved there last. Opening it hashes the manifest,
each file up to WHOLE_BYTES, and a few blocks of larger ones, others each time; `verify` hashes every byte, and training
does so beside the first steps (engine/datacheck.py). What a record is, is the recipe's business.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from rung import parse
from rung.errors import DataError
from rung.files import exchange, sha256, sync, write_whole
from rung.lab import data_folder
from rung.text import one_line

SCHEMA = 2
_READ = (1, 2)  # 1 has no hash of the manifest and none of blocks: those files are hashed whole, or not until verify
WHOLE_BYTES = 16 << 20  # hashed at each opening: 20 ms of one core
BLOCK_BYTES, NUM_BLOCKS = 1 << 20, 16  # and of larger files so many blocks: half a file that was exchanged is missed
# once in 65,000 openings
_ODD = "backslashreplace"  # file names that are not UTF-8 have lone surrogates; \\udcff is how JSON spells one
_OWNED = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name
_MANIFEST = {
    "kind": str, "info": dict, "splits": {"*": int}, "indexed": str, "files": {"*": {"bytes": int, "sha256": str}},
    "arrays": {"*": {"rows": int, "row_shape": [int], "dtype": str}},
}  # fmt: skip


class Store:
    """A store opened for reading. Arrays are memory maps and cannot be written."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.info: dict[str, Any] = manifest["info"]
        self.arrays: dict[str, np.ndarray] = {
            name: _map(path / f"{name}.bin", spec) for name, spec in manifest["arrays"].items()
        }
        # Not splitlines: a title may hold a U+2028.
        lines = parse.read_bytes(path / "index.jsonl", parse.MOST_DATA_BYTES).split(b"\n")
        # One text for the parser: 300,000 records took 0.9 s instead of 2.1.
        self.index: list[dict[str, Any]] = parse.loose_json(
            b"[%s]" % b",".join(line for line in lines if line), parse.NO_LIMIT
        )
        self.starts = np.array([record["start"] for record in self.index], dtype=np.int64)
        self.lengths = np.array([record["length"] for record in self.index], dtype=np.int64)
        splits = parse.read_bytes(path / "splits.json", parse.MOST_DATA_BYTES)
        self._splits: dict[str, list[int]] = parse.loose_json(splits, parse.NO_LIMIT)

        if any(not isinstance(split, list) or set(map(type, split)) - {int} for split in self._splits.values()):
            raise ValueError("splits.json is not lists of record numbers")
        named = np.array([number for split in self._splits.values() for number in split], dtype=np.int64)
        if len(named) and not 0 <= named.min() <= named.max() < len(self.index):
            raise ValueError(f"splits.json names record {named.max()} or {named.min()} of {len(self.index)}")
        if self.index and manifest.get("indexed") not in self.arrays:
            raise ValueError(f"there is no array {manifest.get('indexed')}, which the index is of")
        ends = self.starts + self.lengths
        if len(ends) and not (self.starts.min() >= 0 and self.lengths.min() >= 0 and 0 <= ends.min() <= ends.max()):
            raise ValueError("a record begins before the first row")

    @classmethod
    def open(cls, path: Path | str, kind: str | None = None) -> Store:
        path = Path(path)
        if not (path / "manifest.json").is_file():
            command = f"rung data RECIPE --from FOLDER --name {_name_of(path)}"
            raise DataError(f"no data at {path}; prepare it with `{command}`, see `rung data --help`", code="no-data")
        manifest = _manifest_of_a_store(path)
        if manifest is None:
            problem = f"{path} is not a store of rung: its manifest.json is of something else, or damaged"
            raise DataError(f"{problem}; name another, or prepare the data again", code="not-a-store")
        if manifest["schema"] not in _READ:
            problem = f"{path} has schema {manifest['schema']}, this rung reads {' and '.join(map(str, _READ))}"
            remedy = "prepare the data again" if manifest["schema"] < SCHEMA else "update rung"
            raise DataError(f"{problem}; {remedy}", code="data-mismatch")
        if (said := manifest.get("sha256")) != (found := _hash_of(manifest)) and (said or manifest["schema"] > 1):
            raise _damaged(path, manifest["kind"], _other_hash("manifest.json", found, str(said)))
        if missing := [name for name in _MANIFEST if name != "indexed" and manifest.get(name) is None]:
            raise _damaged(path, manifest["kind"], f"manifest.json has no {', '.join(missing)}")
        if kind is not None and manifest["kind"] != kind:
            problem = f"{path} holds {manifest['kind']} data, not {kind}"
            raise DataError(f"{problem}; point dataset.base_dataset_name elsewhere", code="data-mismatch")
        if wrong := parse.mismatch(manifest, _MANIFEST, "it"):
            raise _damaged(path, manifest["kind"], f"manifest.json cannot be read: {wrong}")
        try:
            for name, spec in manifest["files"].items():
                if os.path.isabs(name) or ".." in Path(name).parts or not os.path.isfile(path / name):
                    raise _damaged(path, manifest["kind"], f"{one_line(name)} is missing")
                size = (path / name).stat().st_size
                if size != spec["bytes"]:
                    problem = f"{name} has {size} bytes, the manifest says {spec['bytes']}"
                    raise _damaged(path, manifest["kind"], problem)
                if spec["sha256"] is None:
                    raise ValueError(f"{name} has no hash")
                if wrong := _glance(path / name, name, spec):
                    raise _damaged(path, manifest["kind"], wrong)
            return cls(path, manifest)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            problem = f"its index, splits or arrays cannot be read ({error})"
            raise _damaged(path, manifest["kind"], problem) from error

    @property
    def fingerprint(self) -> str:
        """Changes when any byte of the data, the index or the splits does."""
        digest = hashlib.sha256()
        for name, spec in sorted(self.manifest["files"].items()):
            digest.update(f"{name} {spec['sha256']}\n".encode())
        return digest.hexdigest()[:16]

    def split(self, name: str) -> np.ndarray:
        """Record numbers of a split, in order."""
        if name not in self._splits:
            known = ", ".join(self._splits)
            raise DataError(f"{self.path} has no split {name!r}, only {known}; prepare more data", code="no-split")
        return np.array(self._splits[name], dtype=np.int64)

    @property
    def splits(self) -> list[str]:
        return list(self._splits)

    def file(self, name: str) -> bytes:
        """What the recipe put beside the arrays under this name, with its hash checked: these files are small."""
        spec = self.manifest["files"].get(name)
        if spec is None:
            raise _damaged(self.path, self.manifest["kind"], f"it holds no {name}")
        data = parse.read_bytes(self.path / name)
        found = hashlib.sha256(data).hexdigest()
        if found != spec["sha256"]:
            raise _damaged(self.path, self.manifest["kind"], _other_hash(name, found, spec["sha256"]))
        return data

    @property
    def large_bytes(self) -> int:
        """Of the files that opening looked into and did not hash whole."""
        return sum(spec["bytes"] for spec in self.manifest["files"].values() if spec["bytes"] > WHOLE_BYTES)

    def verify(self, after_block: Callable[[int], None] | None = None, only_large: bool = False) -> list[str]:
        """Hashes every file; returns the problems found, worst first, and nothing when all is well.

        `after_block` is called with the number of bytes after each megabyte.
        """
        problems = []
        for name, spec in self.manifest["files"].items():
            if only_large and spec["bytes"] <= WHOLE_BYTES:
                continue
            found, _ = _hashes(self.path / name, after_block)
            if found != spec["sha256"]:
                problems.append(_other_hash(name, found, spec["sha256"]))
        indexed = self.manifest.get("indexed")
        last = int((self.starts + self.lengths).max(initial=0))
        if indexed in self.arrays and last > len(self.arrays[indexed]):
            problems.append(f"the index reaches row {last} of {indexed}, which has {len(self.arrays[indexed])}")
        return problems


class StoreWriter:
    """Writes a store beside its final name; leaving the `with` block without an error moves it there."""

    def __init__(self, out: Path | str, kind: str, replace: bool = False) -> None:
        self.out = Path(out)
        self.kind = kind
        self.replace = replace
        self.info: dict[str, Any] = {}
        # Not the process id: in a container every process may have the same one, also one that was killed half-way.
        self._beside = self.out.with_name(f".{self.out.name}.{uuid.uuid4().hex[:12]}.tmp")
        self._new_folders: list[Path] = []
        self._specs: dict[str, dict[str, Any]] = {}
        self._files: dict[str, BinaryIO] = {}
        self._others: list[str] = []
        self._num_records = 0
        self._splits: dict[str, list[int]] = {}

    def __enter__(self) -> StoreWriter:
        try:
            check_free(self.out, self.replace)
            self._new_folders = [folder for folder in self.out.parents if not folder.exists()]
            self._beside.mkdir(parents=True)
            self._index = (self._beside / "index.jsonl").open("wb")
        except OSError as error:
            self._clear()
            reason = f"cannot write {self.out}: {error.strerror}"
            raise DataError(f"{reason}; choose another place with --name", code="cannot-write") from error
        return self

    def array(self, name: str, dtype: type | np.dtype, row_shape: tuple[int, ...] = ()) -> None:
        """Declares an array that grows by `append`. The first one declared is the one that records point into."""
        self._specs[name] = {"dtype": np.dtype(dtype).newbyteorder("<").str, "row_shape": list(row_shape), "rows": 0}
        self._files[name] = (self._beside / f"{name}.bin").open("wb")

    def append(self, name: str, rows: np.ndarray) -> int:
        """Adds rows and returns the number of the first."""
        spec = self._specs[name]
        dtype = np.dtype(spec["dtype"])
        if rows.dtype != dtype and rows.size and dtype.kind in "iu":
            self.check_ids(int(rows.max()), name, int(rows.min()))
        shape = list(rows.shape[1:])
        if shape != spec["row_shape"]:
            raise DataError(f"{name} takes rows of shape {spec['row_shape']}, got {shape}", code="bad-shape")
        first = spec["rows"]
        self._files[name].write(np.ascontiguousarray(rows, dtype=dtype).tobytes())
        spec["rows"] += len(rows)
        return int(first)

    def written(self, name: str) -> np.ndarray:
        """What was appended so far, mapped from disk."""
        self._files[name].flush()
        return _map(self._beside / f"{name}.bin", self._specs[name])

    def check_ids(self, max_id: int, name: str, min_id: int = 0) -> None:
        """Refuses numbers that the array's type would wrap around."""
        limits = np.iinfo(np.dtype(self._specs[name]["dtype"]))
        if max_id > limits.max or min_id < limits.min:
            wrong, kind = max_id if max_id > limits.max else min_id, limits.dtype.name
            problem = f"id {wrong} does not fit the {kind} of {name} ({limits.min} to {limits.max})"
            raise DataError(f"{problem}; use a smaller vocabulary or a wider type", code="too-large")

    def file(self, name: str, data: bytes) -> None:
        """Keeps a file with the data: listed and hashed in the manifest, a part of the fingerprint."""
        taken = {"manifest.json", "index.jsonl", "splits.json", *self._others}
        if name in taken or Path(name).name != name or not name or name.startswith(".") or name.endswith(".bin"):
            raise ValueError(f"{name!r} cannot be a file of a store: it is taken, hidden, an array or no plain name")
        (self._beside / name).write_bytes(data)
        self._others.append(name)

    def record(self, split: str, start: int, length: int, **fields: Any) -> None:
        row = {"start": int(start), "length": int(length), "split": split, **fields}
        self._index.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", _ODD) + b"\n")
        self._splits.setdefault(split, []).append(self._num_records)
        self._num_records += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        failure: OSError | None = None
        if isinstance(error, OSError) and error.errno is not None:
            # An error about a file that the recipe reads is not ours.
            is_ours = error.filename is None or str(error.filename).startswith(str(self._beside))
            failure = error if is_ours else None
        try:
            for file in (*self._files.values(), self._index):
                file.close()
            if error is None:
                self._finish()
        except OSError as raised:
            failure = raised
        finally:
            self._clear()
        if failure is not None:
            reason = f"cannot write {self.out}: {failure.strerror}"
            raise DataError(f"{reason}; nothing was kept", code="cannot-write") from failure

    def _clear(self) -> None:
        """Removes what is half-written, and the folders that were made for it unless something is in them."""
        shutil.rmtree(self._beside, ignore_errors=True)
        for folder in self._new_folders:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _finish(self) -> None:
        (self._beside / "splits.json").write_text(json.dumps(self._splits), "utf-8")
        names = [f"{name}.bin" for name in self._specs] + ["index.jsonl", "splits.json", *self._others]
        manifest = {
            "schema": SCHEMA,
            "kind": self.kind,
            "arrays": self._specs,
            "indexed": next(iter(self._specs), None),
            "records": self._num_records,
            "splits": {split: len(numbers) for split, numbers in self._splits.items()},
            "files": {name: _describe(self._beside / name) for name in names},
            "info": self.info,
        }
        manifest = json.loads(json.dumps(manifest))  # as it will be read
        manifest["sha256"] = _hash_of(manifest)
        text = json.dumps(manifest, indent=1, ensure_ascii=False)
        (self._beside / "manifest.json").write_text(text, "utf-8", _ODD)
        for name in [*names, "manifest.json"]:
            sync(self._beside / name)
        swap(self._beside, self.out)
        sync(self.out.parent)


def note_command(path: Path, words: Sequence[str]) -> None:
    """Keeps what was typed to prepare the data, for a page that says how to do it again; no part of the fingerprint."""
    file = path / "manifest.json"
    if not file.is_file():  # a recipe of somebody's own may keep its data otherwise
        return
    manifest = parse.json(parse.read_bytes(file))
    if "command" not in manifest["info"]:  # else the data was there already
        manifest["info"]["command"] = list(words)
        manifest["sha256"] = _hash_of(manifest)
        write_whole(file, json.dumps(manifest, indent=1, ensure_ascii=False).encode("utf-8", _ODD))


def swap(new: Path, out: Path) -> None:
    """Moves a folder to its place. One that is there leaves it in the same moment, so that a kill finds either; on a
    disk that cannot exchange two folders it steps aside first, and comes back whatever goes wrong."""
    if exchange(new, out):
        shutil.rmtree(new, ignore_errors=True)
        return
    old = new.with_suffix(".old")
    try:
        if out.exists():
            out.rename(old)
        new.rename(out)
    except BaseException:  # a key that interrupts is no OSError
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_report(out: Path, files: Mapping[str, bytes]) -> None:
    """Writes a folder of a report.json and what belongs to it, whole or not at all, in place of an older one."""
    if out.exists() and not (out / "report.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(
            f"{out} is not a report of rung (it has no report.json) and is left alone; move it away",
            code="folder-exists",
        )
    beside = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        beside.mkdir(parents=True)
        for name, data in files.items():
            (beside / name).write_bytes(data)
        swap(beside, out)
    except OSError as error:
        raise DataError(
            f"cannot write {out}: {error.strerror}; free some space or choose another place", code="cannot-write"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_free(out: Path, replace: bool) -> None:
    """Refuses a place that is taken, unless a store is there and may be replaced, and one that cannot be written."""
    if out.exists():
        if not replace:
            remedy = "pass --replace to prepare it again, or --name for another place"
            raise DataError(f"{out} exists already; {remedy}", code="data-exists")
        if not out.is_dir() or (_manifest_of_a_store(out) is None and any(out.iterdir())):
            problem = f"{out} is not a store of rung (it has no manifest.json of one) and is left alone"
            raise DataError(f"{problem}; pass --name, or move it away", code="not-a-store")
    nearest = next(folder for folder in out.absolute().parents if folder.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        problem = f"cannot write {out}: {nearest} is not a folder that can be written"
        raise DataError(f"{problem}; choose another place with --name", code="cannot-write")


def check_apart(source: Path, out: Path) -> None:
    """Refuses a place that is, holds or lies in what the data is made from: replacing one would remove the other."""
    here, there = out.resolve(), source.resolve()
    if here == there or here in there.parents or there in here.parents:
        problem = f"{out} and what it is made from, {source}, overlap"
        raise DataError(f"{problem}; choose a place with --name", code="options-conflict")


def commands_of(recipe: str, config: Any) -> Iterator[list[str]]:
    """What to type to prepare the data sets that a part of a config names, as far as they are prepared here."""
    if isinstance(config, dict | list):
        for value in config.values() if isinstance(config, dict) else config:
            yield from commands_of(recipe, value)
    elif isinstance(config, str) and (place(config) / "manifest.json").is_file():
        manifest = _manifest_of_a_store(place(config))
        if manifest is not None:
            said = parse.mapping(manifest.get("info")).get("command")
            yield list(map(str, said)) if isinstance(said, list) else ["rung", "data", recipe, "--name", config]


def place(name: str) -> Path:
    """Where a data set of this name lies: a path as it is, a plain name under $RUNG_DATA or data/ of the lab.

    A name such as epr-labs/maestro, as sets are called on a hub, lies there too, unless it is a path from here: one
    that exists, one into a folder that exists, or one into the data folder itself.
    """
    path, root = Path(name), data_folder()
    if len(path.parts) == 1 and not path.is_absolute():
        return root / name
    if not _OWNED.fullmatch(name) or path.exists() or path.parent == root:
        return path
    return path if path.parent.is_dir() and not (root / name).exists() else root / name


def missing(recipe: str, name: str, key: str = "base_dataset_name", command: str = "") -> DataError:
    """That a recipe's data is not there, and the whole command that puts it there: without --from, what is embedded."""
    own = f"rung data {recipe}" if name == recipe else f"rung data {recipe} --from FOLDER --name {name}"
    problem = f"no data at {place(name)}; prepare it with `{command or own}`, or name another with dataset.{key}"
    return DataError(problem, code="no-data")


def _name_of(path: Path) -> str:
    """What `place` finds it by."""
    return path.relative_to(data_folder()).as_posix() if path.is_relative_to(data_folder()) else str(path)


def _damaged(path: Path, kind: str, problem: str) -> DataError:
    again = f"prepare it again: `rung data {kind} --name {_name_of(path)} --replace`, with the same --from as before"
    return DataError(f"{path} is damaged: {problem}; {again}", code="data-damaged")


def _other_hash(name: str, found: str, wanted: str) -> str:
    return f"{name} has hash {found[:8]}.., the manifest says {wanted[:8]}.."


def _hash_of(manifest: Mapping[str, Any]) -> str:
    """Of all that a manifest says, but for this hash."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _hashes(file: Path, after_block: Callable[[int], None] | None = None) -> tuple[str, list[str]]:
    """The hash of a file, and 16 digits of that of each of its blocks."""
    whole, blocks = hashlib.sha256(), []
    with file.open("rb") as handle:
        while block := handle.read(BLOCK_BYTES):
            whole.update(block)
            blocks.append(hashlib.sha256(block).hexdigest()[:16])
            if after_block is not None:
                after_block(len(block))
    return whole.hexdigest(), blocks


def _describe(file: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    size, (digest, blocks) = file.stat().st_size, _hashes(file)
    return {"bytes": size, "sha256": digest, **({"blocks": "".join(blocks)} if size > WHOLE_BYTES else {})}


def _glance(file: Path, name: str, spec: Mapping[str, Any]) -> str:
    """What is wrong with a file, as far as can be seen at once: all of a small one, some blocks of a large one."""
    if spec["bytes"] <= WHOLE_BYTES:
        found = sha256(file)
        return _other_hash(name, found, str(spec["sha256"])) if found != spec["sha256"] else ""
    blocks = str(spec.get("blocks", ""))
    num_blocks = len(blocks) // 16
    with file.open("rb") as handle:
        # Not by the run's seed: other blocks each time.
        for number in random.SystemRandom().sample(range(num_blocks), min(NUM_BLOCKS, num_blocks)):
            handle.seek(number * BLOCK_BYTES)
            if hashlib.sha256(handle.read(BLOCK_BYTES)).hexdigest()[:16] != blocks[16 * number : 16 * number + 16]:
                return f"{name} is not what was prepared, from byte {number * BLOCK_BYTES} on"
    return ""


def _manifest_of_a_store(path: Path) -> dict[str, Any] | None:
    """None where manifest.json is not a store's: other programs write one too, Donkey Car beside its recordings."""
    try:
        manifest = parse.loose_json(parse.read_bytes(path / "manifest.json"))
    except (OSError, ValueError):
        return None
    is_ours = isinstance(manifest, dict) and isinstance(manifest.get("schema"), int)
    return manifest if is_ours and isinstance(manifest.get("kind"), str) else None


def _map(file: Path, spec: dict[str, Any]) -> np.ndarray:
    shape = (spec["rows"], *spec["row_shape"])
    if np.dtype(spec["dtype"]).kind not in "biufc":
        raise ValueError(f"{file.name} has dtype {spec['dtype']}, which is no number")
    if 0 in shape:  # an empty file cannot be mapped
        return np.zeros(shape, dtype=spec["dtype"])
    return np.memmap(file, dtype=spec["dtype"], mode="r", shape=shape)
