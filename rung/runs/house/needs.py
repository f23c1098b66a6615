"""Why a run should stay: others come from it or began with its weights, or one of its checkpoints is pinned.

Whoever began with weights is known by the manifest of the checkpoint that was loaded, and by the name or path that
init_from gives: the first also finds a checkpoint that a resume has set aside, the second also one that is gone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rung.errors import CheckpointError
from rung.files import sha256
from rung.runs.house.places import Standing, everyone
from rung.runs.marks import PINNED, read_mark

_INIT_FROM = re.compile(r"^init_from:[ ]*(.+?)[ ]*$", re.MULTILINE)


class Beginning(NamedTuple):
    """With which weights a run began: what init_from says, and the hash of the manifest that was loaded."""

    name: str
    manifest: str | None


def beginning(path: Path, document: Mapping[str, Any]) -> Beginning:
    derived = document.get("derived")
    loaded = derived.get("weights_from") if isinstance(derived, dict) else None
    manifest = loaded.get("manifest") if isinstance(loaded, dict) else None
    name = ""
    with contextlib.suppress(OSError, ValueError):
        match = _INIT_FROM.search((path / "config.yaml").read_text("utf-8"))
        name = match[1].strip("'\"") if match else ""
    return Beginning(name, manifest if isinstance(manifest, str) else None)


def manifests_below(folder: Path) -> set[str]:
    """Hashes of the manifests of all checkpoints below a folder."""
    found = set()
    for file in folder.glob("**/manifest.json"):
        with contextlib.suppress(OSError):  # rotated away in the meantime
            found.add(sha256(file))
    return found


def is_inside(name: str, target: Standing) -> bool:
    """Whether a name, as init_from has it, means the run or something in it."""
    path = target.place.path
    return name in target.names or (
        "/" in name
        and (
            Path(name).resolve().is_relative_to(path.resolve())
            or f"/{path.parent.parent.name}/{target.place.id}/" in f"/{name}/"
        )
    )


def needed_by(targets: Sequence[Standing]) -> Iterator[str]:
    """Why runs should stay, one sentence each."""
    going = {target.place.path.resolve() for target in targets}
    for root in dict.fromkeys(target.place.root for target in targets):
        here = [target for target in targets if target.place.root == root]
        others = [found for found in everyone(root) if found.place.path.resolve() not in going]
        yield from _relations(others, here)
    for target in targets:
        try:
            pinned = read_mark(target.place.path / "checkpoints", PINNED)
        except (CheckpointError, OSError):  # a mark that cannot be read protects nothing
            continue
        if pinned:
            yield f"{target.place.id} has pinned checkpoints ({', '.join(map(str, pinned))})"


def _relations(others: Iterable[Standing], targets: Sequence[Standing]) -> Iterator[str]:
    by_name = {name: target for target in targets for name in target.names}
    by_manifest: dict[str, list[Standing]] | None = None  # read where somebody began with weights
    for found in others:
        document, ab = found.document, found.document.get("ab")
        base = ab.get("base") if isinstance(ab, dict) else None
        start = beginning(found.place.path, document)
        if start.manifest and by_manifest is None:
            by_manifest = {}
            for target in targets:
                for manifest in manifests_below(target.place.path / "checkpoints"):
                    by_manifest.setdefault(manifest, []).append(target)
        began_with = list((by_manifest or {}).get(start.manifest or "", ()))
        if start.name in by_name or "/" in start.name:
            began_with += [target for target in targets if is_inside(start.name, target)]
        related = [("comes from", by_name.get(str(document.get("parent"))))]
        related.append(("is compared with", by_name.get(str(base))))
        related += [("started with the weights of", target) for target in began_with]
        told = set[str]()
        for words, needed in related:
            if needed is not None and needed.place.id not in told:
                told.add(needed.place.id)
                yield f"{found.place.id} {words} {needed.place.id}"
