"""What init_from may name: a run, a checkpoint of ours, a Hugging Face folder, a file of others.

Finds it, and tells the keys that a model needs to take its weights, so that nobody has to repeat them. Loading is done
in build.py. Imports no torch: a config is also resolved where nothing is computed.

The surprising thing: a path wins over a run of the same name, as it does wherever a run can be named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rung.config import REFERENCE, Schema
from rung.errors import CheckpointError, RunError
from rung.files import sha256
from rung.recipe import Recipe
from rung.runs import marks
from rung.runs.query import open_run

TRAINING = ("dropout", "init")  # of a model section: choices of training or of a start from nothing, not of weights
FILES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")  # as others call their weights


def foreign(reference: str) -> Path | None:
    """The path of weights that others have trained, where init_from names such."""
    path = Path(reference).expanduser()
    try:
        if path.is_file():
            return path
        is_folder = (path / "config.json").is_file() and not (path / "manifest.json").is_file()
    except OSError as error:
        raise CheckpointError(f"cannot look for weights at {reference}: {error.strerror}; name another place") from None
    return path if is_folder else None


def find_checkpoint(reference: str, runs_root: Path) -> Path:
    """A checkpoint folder, or a run (its best save, else its last)."""
    path = Path(reference)
    if (path / "manifest.json").is_file() or (
        path.is_dir() and path.name.isdigit() and path.parent.name == "checkpoints"
    ):
        return path
    if path.suffix in FILES:
        raise CheckpointError(f"there is no file {path}; name one of nanoGPT, a Hugging Face folder, or a run")
    if path.is_dir() and any(one.suffix in FILES for one in path.iterdir()):
        raise CheckpointError(
            f"{path} has weights but no config.json to say of which model; copy that too, or name a file"
        )
    try:
        run = open_run(reference, runs_root)
    except RunError as error:
        raise CheckpointError(f"there are no weights at {reference}, and {error}") from None
    folder = run.path / "checkpoints"
    best, steps = marks.read_mark(folder, marks.BEST), marks.saved_steps(folder)
    if not best and not steps:
        raise CheckpointError(f"{run.id} has no whole checkpoint; train it further, or name another run")
    return marks.save_folder(folder, best[0] if best else steps[-1])


def fingerprint(source: Path) -> dict[str, Any]:
    """What a run remembers of the weights it begins with, so that others in their place are seen."""
    if (manifest := source / "manifest.json").is_file():
        return {"step": json.loads(manifest.read_text("utf-8"))["step"], "manifest": sha256(manifest)}
    files = [source] if source.is_file() else sorted([*source.glob("config.json"), *source.glob("*.safetensors")])
    return {"files": {file.name: sha256(file) for file in files}}


def keys_of(reference: str, recipe_class: type[Recipe], schema: Schema, runs_root: Path) -> dict[str, Any]:
    """The keys that a model must have to take these weights, as a tree.

    Where a key of the model section refers to another one (the positions of a model are the length of a row), that
    other key is told in its place.
    """
    source = foreign(reference)
    if source is not None:
        return dict(recipe_class.keys_of(source))
    was = _config_of(find_checkpoint(reference, runs_root))
    found: dict[str, Any] = {}
    for name, known in schema.keys.items():
        section, _, last = name.partition(".")
        if section != "model" or last in TRAINING:
            continue
        refers = REFERENCE.fullmatch(str(known.default))
        section, _, last = (refers[1] if refers else name).rpartition(".")
        if last in (there := was.get(section, {})):
            found.setdefault(section, {})[last] = there[last]
    return found


def _config_of(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((path / "state.json").read_text("utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: state.json does not tell its config ({error})") from error
    return config
