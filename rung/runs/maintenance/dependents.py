"""Why a run should stay: others come from it or began with its weights, or one of its checkpoints is pinned.

Weights are recognised by the manifest of the checkpoint that was loaded, and by the name or path in init_from: the
first also finds a checkpoint that a resume has set aside, the second also one that is gone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rung.errors import CheckpointError
from rung.files import sha256
from rung.runs.maintenance.selection import RunState, all_states
from rung.runs.marks import PINNED, read_mark

_INIT_FROM = re.compile(r"^init_from:[ ]*(.+?)[ ]*$", re.MULTILINE)


class InitialWeights(NamedTuple):
    """The weights that a run began with: what init_from says, and the hash of the manifest that was loaded."""

    name: str
    manifest: str | None


def initial_weights(path: Path, document: Mapping[str, Any]) -> InitialWeights:
    derived = document.get("derived")
    loaded = derived.get("weights_from") if isinstance(derived, dict) else None
    manifest = loaded.get("manifest") if isinstance(loaded, dict) else None
    name = ""
    with contextlib.suppress(OSError, ValueError):
        match = _INIT_FROM.search((path / "config.yaml").read_text("utf-8"))
        name = match[1].strip("'\"") if match else ""
    return InitialWeights(name, manifest if isinstance(manifest, str) else None)


def manifests_below(folder: Path) -> set[str]:
    """Hashes of the manifests of all checkpoints below a folder."""
    found = set()
    for file in folder.glob("**/manifest.json"):
        with contextlib.suppress(OSError):  # rotated away in the meantime
            found.add(sha256(file))
    return found


def is_inside(name: str, target: RunState) -> bool:
    """Whether a name, as init_from has it, means the run or something in it."""
    if name in target.names:
        return True
    inside = f"/{target.path.parent.parent.name}/{target.id}/"
    return "/" in name and (Path(name).resolve().is_relative_to(target.path.resolve()) or inside in f"/{name}/")


def reasons_to_keep(targets: Sequence[RunState]) -> Iterator[str]:
    """Why runs should stay, one sentence each."""
    going = {target.path.resolve() for target in targets}
    for root in dict.fromkeys(target.root for target in targets):
        here = [target for target in targets if target.root == root]
        others = [state for state in all_states(root) if state.path.resolve() not in going]
        yield from _relations(others, here)
    for target in targets:
        pinned: list[int] = []
        with contextlib.suppress(CheckpointError, OSError):  # a mark that cannot be read protects nothing
            pinned = read_mark(target.path / "checkpoints", PINNED)
        if pinned:
            yield f"{target.id} has pinned checkpoints ({', '.join(map(str, pinned))})"


def _relations(others: Iterable[RunState], targets: Sequence[RunState]) -> Iterator[str]:
    by_uid = {target.document["uid"]: target for target in targets if target.document.get("uid")}
    by_name = {name: target for target in targets for name in target.names}
    by_manifest: dict[str, list[RunState]] | None = None  # read where somebody began with weights

    def meant(holder: Any, key: str) -> RunState | None:
        """A reference goes by uid; an older run.json has the name alone."""
        holder = holder if isinstance(holder, dict) else {}
        uid = holder.get(f"{key}_uid")
        return by_uid.get(uid) if uid else by_name.get(str(holder.get(key)))

    for other in others:
        start = initial_weights(other.path, other.document)
        if start.manifest and by_manifest is None:
            by_manifest = {}
            for target in targets:
                for manifest in manifests_below(target.path / "checkpoints"):
                    by_manifest.setdefault(manifest, []).append(target)
        related = {"comes from": [meant(other.document, "parent")]}
        related["is compared with"] = [meant(other.document.get("ab"), "base")]
        related["started with the weights of"] = [*(by_manifest or {}).get(start.manifest or "", ())]
        if start.name in by_name or "/" in start.name:
            inside = [target for target in targets if is_inside(start.name, target)]
            related["started with the weights of"] += inside
        named = set[str]()
        for relation, needed in ((relation, run) for relation, runs in related.items() for run in runs):
            if needed is not None and needed.id not in named:
                named.add(needed.id)
                yield f"{other.id} {relation} {needed.id}"
