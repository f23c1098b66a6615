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
from rung.engine.config import SCRATCH, Engine
from rung.errors import ConfigError, RunError, UserError
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
    """Defaults, then the preset (or `base` in its place), then files, then key=value words.

    Where files or words name weights to begin with, the keys these need lie over the preset and under files and words.
    """
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
    schema = schema_of(recipe_name, recipe_class)
    return Resolved(recipe_class, schema.resolve(_with_weights(layers, recipe_class, schema)), preset)


def _with_weights(layers: list[Layer], recipe_class: type[Recipe], schema: Schema) -> list[Layer]:
    """The layers and, where a file or a word sets init_from, one more: the keys that its weights need."""
    own = [place for place, layer in enumerate(layers) if layer.source.startswith(("file ", "command line"))]
    names = [layers[place].tree["init_from"] for place in own if "init_from" in layers[place].tree]
    if not names or str(names[-1]) in SCRATCH:
        return layers
    from rung.engine.init_from import foreign, keys_of

    name = str(names[-1])
    try:
        tree = keys_of(name, recipe_class, schema, _runs_root())
    except UserError:
        if foreign(name) is not None:
            raise
        return layers  # nothing is lost yet: whoever needs the weights says what is wrong with the name
    return [*layers[: own[0]], Layer(f"init_from {name}", tree), *layers[own[0] :]] if tree else layers


def _runs_root() -> Path:
    """Where the verb that is being run looks for runs."""
    context = click.get_current_context(silent=True)
    params = {} if context is None else context.params
    return Path(params.get("runs_root") or params.get("root") or os.environ.get("RUNG_RUNS", "runs"))


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
