"""What init_from may name: a run, a checkpoint of ours, a Hugging Face folder, a checkpoint file of another project.

Finds it and reads the config keys that a model needs to take its weights, so that nobody has to repeat them; build.py
loads them. A path wins over a run of the same name, as everywhere. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rung import parse
from rung.config import REFERENCE, Schema
from rung.errors import CheckpointError, RunError
from rung.files import sha256
from rung.recipe import Pretrained, Recipe
from rung.runs import marks
from rung.runs.paths import inside
from rung.runs.query import open_run
from rung.runs.renamed import current_config

TRAINING = ("dropout", "init")  # of a model section: choices of training or of a start from nothing, not of weights
FILES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")  # as others call their weights


def external_source(reference: str) -> Path | None:
    """The path of weights that others have trained, where init_from names such."""
    path = Path(reference).expanduser()
    try:
        if path.is_file():
            return path
        is_folder = (path / "config.json").is_file() and not (path / "manifest.json").is_file()
    except OSError as error:
        raise CheckpointError(
            f"cannot access {reference}: {error.strerror}; name another path", code="cannot-read"
        ) from None
    return path if is_folder else None


def find_checkpoint(reference: str, runs_root: Path) -> Path:
    """A checkpoint folder, or a run (its best save, else its last)."""
    path = Path(reference)
    if (path / "manifest.json").is_file() or (
        path.is_dir() and path.name.isdigit() and path.parent.name == "checkpoints"
    ):
        return path
    if path.suffix in FILES:
        raise CheckpointError(
            f"there is no file {path}; name one of nanoGPT, a Hugging Face folder, or a run", code="no-file"
        )
    if path.is_dir() and any(one.suffix in FILES for one in path.iterdir()):
        raise CheckpointError(
            f"{path} has weights but no config.json to say of which model; copy that too, or name a file",
            code="no-file",
        )
    try:
        run = open_run(reference, runs_root)
    except RunError as error:
        raise CheckpointError(f"there are no weights at {reference}, and {error}", code="no-checkpoint") from None
    folder = run.path / "checkpoints"
    best, steps = marks.read_mark(folder, marks.BEST), marks.saved_steps(folder)
    if not best and not steps:
        raise CheckpointError(
            f"{run.id} has no whole checkpoint; train it further, or name another run", code="no-checkpoint"
        )
    return marks.save_folder(folder, best[0] if best else steps[-1])


def fingerprint(source: Path) -> dict[str, Any]:
    """What a run remembers of the weights it begins with, so that others in their place are seen."""
    if (manifest := source / "manifest.json").is_file():
        return {"step": parse.loose_json(parse.read_bytes(manifest))["step"], "manifest": sha256(manifest)}
    files = [source] if source.is_file() else sorted([*source.glob("config.json"), *source.glob("*.safetensors")])
    return {"files": {file.name: sha256(file) for file in files}}


def config_from_pretrained(
    reference: str, recipe_class: type[Recipe], schema: Schema, runs_root: Path
) -> dict[str, Any]:
    """The keys that a model must have to take these weights, as a tree.

    Where a key of the model section refers to another one (the positions of a model are the length of a row), that
    other key is returned in its place. A key that the weights' config does not have came later; its default is what
    models were before.
    """
    source = external_source(reference)
    if source is not None:
        return dict(recipe_class.config_from_pretrained(source)) if issubclass(recipe_class, Pretrained) else {}
    recipe = f"{recipe_class.__module__}:{recipe_class.__qualname__}"
    was = current_config(config_of(find_checkpoint(reference, runs_root)), recipe)
    found: dict[str, Any] = {}
    for name, known in schema.keys.items():
        section, _, last = name.partition(".")
        if section != "model" or last in TRAINING:
            continue
        refers = REFERENCE.fullmatch(str(known.default))
        section, _, last = (refers[1] if refers else name).rpartition(".")
        there = was.get(section, {})
        if last in there:
            found.setdefault(section, {})[last] = there[last]
        elif there and not refers:
            found.setdefault(section, {})[last] = known.default
    return found


def config_of(path: Path) -> dict[str, Any]:
    """The config that a save or a capture was made with."""
    try:
        return dict(parse.loose_json(parse.read_bytes(inside(path, "state.json")))["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged: state.json has no readable config ({error})", code="checkpoint-damaged"
        ) from error
