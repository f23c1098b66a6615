"""From the words of a command line to a recipe and its resolved config; shared by the verbs that need one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.config import Config, Layer, Schema, load_file, parse_overrides
from rung.engine.config import Engine
from rung.errors import ConfigError, RunError
from rung.recipe import Recipe
from rung.recipes import find_recipe, preset_layer

if TYPE_CHECKING:
    from rung.runs.query import Run

runs_option = click.option(
    "--runs",
    "runs_root",
    type=click.Path(path_type=Path, file_okay=False),
    default=lambda: Path(os.environ.get("RUNG_RUNS", "runs")),
    show_default="$RUNG_RUNS or ./runs",
    help="Where the runs are.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@dataclass(frozen=True)
class Resolved:
    recipe_class: type[Recipe]
    config: Config
    preset: str | None


def schema_of(recipe_name: str, recipe_class: type[Recipe]) -> Schema:
    return Schema({"engine": Engine, "recipe": recipe_class.Config}, f"rung config {recipe_name}")


def resolve(
    recipe_name: str,
    words: Sequence[str] = (),
    files: Sequence[Path] = (),
    base: Sequence[Layer] | None = None,
) -> Resolved:
    """Defaults, then the preset (or `base` in its place), then files, then key=value words."""
    recipe_class = find_recipe(recipe_name)
    chosen = [word.partition("=")[2] for word in words if word.startswith("preset=")]
    if len(chosen) > 1:
        raise ConfigError(f"preset is given {len(chosen)} times ({', '.join(chosen)}); keep one")
    preset = chosen[0] if chosen else None
    rest = [word for word in words if not word.startswith("preset=")]
    if base is None or preset is not None:
        base = preset_layer(recipe_class, preset)
        preset = preset or (base[0].source.removeprefix("preset ") if base else None)
    layers = [*base, *(Layer(f"file {path}", load_file(path)) for path in files)]
    overrides = parse_overrides(rest)
    if overrides:
        layers.append(Layer("command line", overrides))
    return Resolved(recipe_class, schema_of(recipe_name, recipe_class).resolve(layers), preset)


def recipe_of(run: Run) -> str:
    """The recipe that builds its model again; refuses a run that rung did not train."""
    recipe = str(run.document.get("recipe"))
    if recipe == "own loop":
        again = shlex.join(map(str, run.document.get("command") or []))
        raise RunError(f"{run.id} was trained by a script of its own, which rung cannot build; run it again: {again}")
    if run.document.get("imported"):
        raise RunError(f"{run.id} came from another tracker ({recipe}); there is no model that rung could build")
    return recipe


def run_layer(run_id: str, tree: dict[str, Any], sources: dict[str, str]) -> Layer:
    """The config of an earlier run as a layer: only what was set there, so that defaults stay defaults."""
    kept: dict[str, Any] = {}
    for name, source in sources.items():
        if source == "default" or source.startswith("derived"):
            continue
        *sections, last = name.split(".")
        here, place = kept, tree
        for part in sections:
            here, place = here.setdefault(part, {}), place[part]
        here[last] = place[last]
    return Layer(f"run {run_id}", kept)
