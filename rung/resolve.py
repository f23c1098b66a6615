"""From a recipe, a preset, files, overrides and perhaps an earlier run to one resolved config."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rung.config import Config, Layer, Schema, differences, load_file, merge, nest, parse_overrides
from rung.engine.config import SCRATCH, Engine
from rung.errors import ConfigError, RunError, UserError
from rung.recipe import Recipe
from rung.recipes import CATALOG, find_recipe, preset_layer
from rung.runs.fields import leaves
from rung.runs.query import ref, root_of
from rung.runs.renamed import current_config
from rung.runs.trust import check_module

if TYPE_CHECKING:
    from rung.runs.query import Run

COMMAND_LINE, PYTHON = "command line", "python"  # who gave the overrides

# Keys that change where and how a run is computed and shown, not what it learns.
FREE = (
    "system.", "ddp.", "logging.", "guard.", "signals.", "checkpoint.", "eval_interval", "sample_interval", "sampling.",
)  # fmt: skip
CUT = ("data.batch_size", "optimizer.gradient_accumulation_steps")


@dataclass(frozen=True)
class Resolved:
    """A recipe and the config to build it with."""

    recipe: str  # as run.json names it
    recipe_class: type[Recipe]
    config: Config
    preset: str | None = None
    parent: Run | None = None  # whose config this one changes


def schema_of(recipe_name: str, recipe_class: type[Recipe]) -> Schema:
    return Schema({"engine": Engine, "recipe": recipe_class.Config}, f"rung config {recipe_name}")


def resolve(
    recipe: str | type[Recipe] | None,
    overrides: str | Sequence[str] = (),
    files: Sequence[str | Path] = (),
    base: Sequence[Layer] | None = None,
    *,
    preset: str | None = None,
    config: Mapping[str, Any] | None = None,
    parent: Run | None = None,
    runs: Path | str | None = None,
    source: str = COMMAND_LINE,
) -> Resolved:
    """Defaults, then the preset (or `base`, or what was set in `parent`), then files, `config` and key=value overrides.

    Where one of the last three names weights to begin with, the keys these need lie over the preset and under files.
    `source` is what config.sources.json says of `config` and overrides.
    """
    if recipe is None:
        if parent is None:
            raise UserError(
                "which recipe? name one (`rung recipes` lists them), or a run to start from", code="missing-option"
            )
        recipe = recipe_of(parent, runs)
    name = recipe if isinstance(recipe, str) else f"{recipe.__module__}:{recipe.__qualname__}"
    recipe_class = find_recipe(recipe) if isinstance(recipe, str) else recipe
    overrides = [overrides] if isinstance(overrides, str) else overrides
    chosen = [*([preset] if preset else []), *(w.partition("=")[2] for w in overrides if w.startswith("preset="))]
    if len(chosen) > 1:
        raise ConfigError(
            f"preset is given {len(chosen)} times ({', '.join(chosen)}); keep one", code="options-conflict"
        )
    preset = chosen[0] if chosen else None
    if preset is None and base is None and parent is not None:
        base = [run_layer(parent.id, parent.config(), parent.sources())]
    if base is None or preset is not None:
        base = preset_layer(recipe_class, preset)
        preset = preset or (base[0].source.removeprefix("preset ") if base else None)
    own = [Layer(f"file {path}", load_file(Path(path))) for path in files]
    own += [Layer(source, nested(config))] if config else []
    if tree := parse_overrides([word for word in overrides if not word.startswith("preset=")]):
        own.append(Layer(source, tree))
    schema = schema_of(name, recipe_class)
    layers = [*base, *_weights_layer(own, recipe_class, schema, root_of(runs)), *own]
    return Resolved(name, recipe_class, schema.resolve(layers), preset, parent)


class Since(NamedTuple):
    """What has become of a config since one of the run's saves was made with it: key -> (then, now)."""

    edits: dict[str, tuple[Any, Any]]  # in config.yaml
    defaults: dict[str, tuple[Any, Any]]  # in today's code, of keys that nobody set
    new: dict[str, Any]  # keys that did not exist then, at their default
    lost: list[str]  # keys that exist no more

    def lines(self, run_id: str) -> list[str]:
        lines = []
        if self.defaults:
            changed = ", ".join(f"{name}={then} (now {now})" for name, (then, now) in self.defaults.items())
            lines.append(f"defaults have changed since; {run_id} keeps its own: {changed}")
        if self.new:
            lines.append(f"keys that are new since: {', '.join(f'{n}={value}' for n, value in self.new.items())}")
        if self.lost:
            lines.append(f"keys that no longer exist: {', '.join(self.lost)}")
        return lines


def resolve_saved(
    run: Run,
    saved: Mapping[str, Any],
    overrides: str | Sequence[str] = (),
    *,
    config: Mapping[str, Any] | None = None,
    takes_edits: bool = False,
    runs: Path | str | None = None,
) -> tuple[Resolved, Since]:
    """The config that a save was made with, `saved`, under overrides.

    A key at its default keeps the default of that time. Keys that each attempt may take anew are those of config.yaml;
    of others an edited config.yaml is not believed over the save, whose bytes are hashed, unless `takes_edits`.
    """
    recipe = recipe_of(run, runs)
    schema, gone = schema_of(recipe, find_recipe(recipe)), object()
    was, written = current_config(deepcopy(dict(saved)), recipe), run.config()
    own = run_layer(run.id, written, run.sources())
    today = schema.resolve([own]).tree()
    known = tuple(f"{name}." for name in schema.keys)  # a value may be a mapping itself
    since = Since({}, {}, {}, [name for name, _ in leaves(was) if not f"{name}.".startswith(known)])
    for name in schema.keys:
        then, file, now = (_at(tree, name, gone) for tree in (was, written, today))
        if then is gone:
            since.new[name] = now
        elif not is_free(name):
            if file is not gone and file != then:
                since.edits[name] = then, file
            elif now != then:
                since.defaults[name] = then, now
    pinned = {name: then for name, (then, _) in since.defaults.items()}
    pinned |= {name: pair[takes_edits] for name, pair in since.edits.items()}
    layers = [own, Layer(f"run {run.id}", nest(pinned))]
    return resolve(recipe, overrides, base=layers, config=config, parent=run, runs=runs), since


def resolve_resume(
    run: Run,
    saved: Mapping[str, Any],
    overrides: str | Sequence[str] = (),
    *,
    takes_edits: bool = False,
    runs: Path | str | None = None,
) -> tuple[Resolved, Since]:
    """As `resolve_saved`; refuses overrides that change what the run learns, and an edited config.yaml."""
    overrides = [overrides] if isinstance(overrides, str) else overrides
    # First: a key that does not exist is not one that changes learning.
    resolved, since = resolve_saved(run, saved, overrides, takes_edits=takes_edits, runs=runs)
    if since.edits and not takes_edits:
        edits = ", ".join(f"{name}={then} is now {now}" for name, (then, now) in since.edits.items())
        raise ConfigError(
            f"{run.path / 'config.yaml'} was edited after {run.id} was trained: {edits}; put it back, start a new run "
            f"with `rung train --parent {ref(run.path, run.id)}`, or add --accept-edits to train on with what it says "
            "now",
            code="config-edited",
        )
    before = run.config()
    hangs_on_evals = before["lr"]["schedule"] == "plateau" and before["lr"]["decay_lr"]
    hangs_on_evals = hangs_on_evals or before.get("eval_patience", 0) > 0  # evals also decide when it ends
    for name in differences({}, parse_overrides(overrides)):
        if not is_free(name) or (hangs_on_evals and name == "eval_interval"):
            raise ConfigError(
                f"{name} changes what {run.id} learns and cannot be given on resume; "
                f"start a new run with `rung train --parent {ref(run.path, run.id)} {name}=...`",
                code="not-resumable",
            )
    rows = [
        tree["data"]["batch_size"] * tree["optimizer"]["gradient_accumulation_steps"]
        for tree in (before, resolved.config.tree())
    ]
    if rows[0] != rows[1]:
        raise ConfigError(
            f"{CUT[0]} x {CUT[1]} is {rows[1]} rows a step here and {rows[0]} in {run.id}; "
            "a resumed run must take the same rows: change both so that the product stays",
            code="not-resumable",
        )
    return resolved, since


def is_free(name: str) -> bool:
    """Whether each attempt at a run may take this key anew."""
    return name in CUT or name.startswith(FREE)


def _at(tree: Mapping[str, Any], name: str, default: Any) -> Any:
    node: Any = tree
    for part in name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def recipe_of(run: Run, runs: Path | str | None = None) -> str:
    """The recipe that builds its model again; refuses a run that rung did not train, and code that came with the run.

    `runs` is the runs folder that the user named.
    """
    recipe = str(run.document.get("recipe"))
    if recipe == "own loop":
        command = shlex.join(map(str, run.document.get("command") or []))
        raise RunError(
            f"{run.id} was trained by a script of its own, which rung cannot build; run it again: {command}",
            code="not-supported",
        )
    if run.document.get("imported"):
        raise RunError(
            f"{run.id} came from another tracker ({recipe}); there is no model that rung could build",
            code="not-supported",
        )
    if recipe not in CATALOG and ":" in recipe:
        check_module(recipe.partition(":")[0], run, root_of(runs))
    return recipe


def run_layer(run_id: str, tree: dict[str, Any], sources: dict[str, str]) -> Layer:
    """The config of an earlier run as a layer: only what was set there, so that defaults stay defaults."""
    was_set = [n for n, source in sources.items() if source != "default" and not source.startswith("derived")]
    return Layer(f"run {run_id}", nest({name: reduce(getitem, name.split("."), tree) for name in was_set}))


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as Python code writes them, {"lr.learning_rate": 1e-4, "model": {"n_layer": 2}}, as one tree."""
    tree: dict[str, Any] = {}
    for name, value in config.items():
        plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        merge(tree, nest({str(name): deepcopy(plain)}))  # a copy: later keys may be merged into it
    return tree


def _weights_layer(own: Sequence[Layer], recipe_class: type[Recipe], schema: Schema, root: Path) -> list[Layer]:
    """Where the user sets init_from: the keys that its weights need."""
    names = [str(layer.tree["init_from"]) for layer in own if "init_from" in layer.tree]
    if not names or names[-1] in SCRATCH:
        return []
    from rung.engine.init_from import config_from_pretrained, external_source

    try:
        tree = config_from_pretrained(names[-1], recipe_class, schema, root)
    except UserError:
        if external_source(names[-1]) is not None:
            raise
        return []  # nothing is lost yet: whoever needs the weights says what is wrong with the name
    return [Layer(f"init_from {names[-1]}", tree)] if tree else []
