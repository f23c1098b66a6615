"""The words a user may mean: recipes, presets, keys, runs. For shell completion, and for what an unknown option meant.

Imports no torch: the keys of a recipe lie in a config.py of their own.
"""

from __future__ import annotations

import difflib
import importlib
import shlex
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from rung.cli.options import GroupWithDefault
from rung.config import Schema
from rung.engine.config import Engine
from rung.errors import UserError
from rung.lab import data_folder
from rung.recipes import CATALOG
from rung.runs.query import experiments, list_runs, open_run, root_of

# What other trainers call a key, where its last part is not the same word.
USUAL = {
    "lr": "lr.learning_rate", "steps": "optimizer.max_iters", "max_steps": "optimizer.max_iters",
    "iters": "optimizer.max_iters", "bs": "data.batch_size", "wd": "optimizer.weight_decay",
    "grad_accum": "optimizer.gradient_accumulation_steps", "layers": "model.n_layer", "heads": "model.n_head",
}  # fmt: skip
RENAMED = {("train", "--from"): "--parent (--from names what `rung data` reads)"}
Words = Iterator[tuple[str, str]]  # a word, and what it is


def schema(recipe: str) -> Schema:
    """The keys of a recipe of the catalog; of any other, whose code is not run for this, those of the engine."""
    owners: dict[str, type] = {"engine": Engine}
    if recipe in CATALOG:
        module = CATALOG[recipe][0].partition(":")[0].rpartition(".")[0]
        owners["recipe"] = importlib.import_module(f"{module}.config").Config
    return Schema(owners)


def recipe_meant(words: Sequence[str], root: Path) -> str:
    """The recipe that a command line is about, by its name or by that of a run; empty where neither is named."""
    for word in words:
        if word in CATALOG:
            return word
    for word in words:
        if not word.startswith("-") and "=" not in word:
            try:
                return str(open_run(word, root).document.get("recipe"))
            except (UserError, OSError, ValueError):
                continue
    return ""


def explain(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """What an option was meant to be that is none: another one, or a key."""
    context, name = error.ctx, error.option_name
    if context is None:
        return f"{name} is not an option"
    text = f"{name} is not an option of {context.command_path}"
    if renamed := RENAMED.get((str(context.info_name), name)):
        return f"{text}; it is now {renamed}"
    options = [one for param in context.command.params for one in param.opts if isinstance(param, click.Option)]
    hint = _key_meant(name, words) if any(p.name == "overrides" for p in context.command.params) else None
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.7)
    if hint is not None and (hint[1] or not near):
        return f"{text}; keys are written without dashes: {hint[0]}"
    return f"{text}{f'; did you mean {near[0]}?' if near else ''} (see `{context.command_path} --help`)"


def _key_meant(option: str, words: Sequence[str]) -> tuple[str, bool] | None:
    """`--batch-size 8` as data.batch_size=8, and whether that is beyond doubt."""
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == option), None)
    name, value = option.lstrip("-").replace("-", "_"), "..."
    if at is not None and "=" in words[at]:
        value = words[at].partition("=")[2]
    elif at is not None and at + 1 < len(words) and not words[at + 1].startswith("--"):
        value = words[at + 1]
    if name == "preset":
        return f"preset={value}", True
    if name in ("epochs", "num_epochs", "max_epochs"):
        return f"optimizer.max_iters={shlex.quote(f'{value} epochs')}", True
    keys = schema(recipe_meant(words, root_of())).keys
    by_last = {known.rpartition(".")[2]: known for known in reversed(keys)}
    key = name if name in keys else USUAL.get(name) or by_last.get(name)
    if key in keys:
        return f"{key}={shlex.quote(value) if value != '...' else value}", True
    near = difflib.get_close_matches(name, [*by_last, *keys], n=1, cutoff=0.7)
    return (f"{by_last.get(near[0], near[0])}={shlex.quote(value)}", False) if near else None


class Bash(BashComplete):
    """As click's, but without a space after `key=`, where the value is still to come."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value == *= ]] && compopt -o nospace"
    )


def use_our_shells() -> None:
    add_completion_class(Bash)


def complete(command: click.Command) -> None:
    """Teaches the parameters of a verb what they may be, by their names."""
    for param in command.params:
        found = _KINDS.get(str(param.name))
        if found is not None and not isinstance(param.type, click.Choice):
            setattr(param, "shell_complete", _completer(found))  # noqa: B010 - of this one parameter
    if isinstance(command, click.Group):
        for one in command.commands.values():
            complete(one)
    if isinstance(command, GroupWithDefault):
        complete(command.default)
        if any(param.name == "overrides" for param in command.default.params):  # rung data RECIPE
            verbs, recipes = command.shell_complete, _completer(_recipes)
            setattr(command, "shell_complete", lambda *what: [*recipes(*what), *verbs(*what)])  # noqa: B010


def _completer(words: Callable[[click.Context, str], Words]) -> Callable[[click.Context, str], list[CompletionItem]]:
    def shell_complete(context: click.Context, incomplete: str) -> list[CompletionItem]:
        try:
            return [
                CompletionItem(w, help=about) for w, about in words(context, incomplete) if w.startswith(incomplete)
            ]
        except (UserError, OSError, ValueError, TypeError, AttributeError):  # a shell is no place for our mistakes
            return []

    return shell_complete


def _root(context: click.Context) -> Path:
    return root_of(context.params.get("root"))


def _recipes(context: click.Context, incomplete: str) -> Words:
    if context.params.get("parent"):  # then the recipe is its, and what follows are keys
        yield from _keys(context, incomplete)
    else:
        yield from ((name, about) for name, (_, about) in CATALOG.items())


def _runs(context: click.Context, incomplete: str) -> Words:
    """The experiments, and the runs of the one that is begun."""
    root, (name, slash, _) = _root(context), incomplete.partition("/")
    if not slash:
        names = experiments(root)
        yield from ((one, "experiment") for one in names)
        if len([one for one in names if one.startswith(incomplete)]) != 1:
            return
        name = next(one for one in names if one.startswith(incomplete))
    for run in list_runs(root, name, []):
        yield run.id, " ".join(filter(None, [run.status, str(run.document.get("why") or "")]))


def _experiments(context: click.Context, incomplete: str) -> Words:
    yield from ((name, "experiment") for name in experiments(_root(context)))


def _recipes_and_runs(context: click.Context, incomplete: str) -> Words:
    yield from _recipes(context, incomplete)
    yield from _runs(context, incomplete)


def _data(context: click.Context, incomplete: str) -> Words:
    if context.command_path.split()[1:2] == ["data"]:
        found = (path.parent for pattern in ("*", "*/*") for path in data_folder().glob(f"{pattern}/manifest.json"))
        yield from ((path.relative_to(data_folder()).as_posix(), "data") for path in sorted(found))
    else:  # rung sweep show NAME
        found = (path.parent for path in _root(context).glob(".sweeps/*/sweep.json"))
        yield from ((path.name, "sweep") for path in sorted(found))


def _keys(context: click.Context, incomplete: str) -> Words:
    """`key=`, and after the sign what the key may be. bash makes the sign a word of its own."""
    given, verb = context.params, str(context.info_name)
    words = [str(word) for name in ("recipe", "run", "what", "parent") if (word := given.get(name))]
    before = [str(word) for word in given.get("overrides") or given.get("args") or ()]
    recipe = recipe_meant([verb, *words, *before], _root(context))  # the verb: `rung data piano`
    name, equals, value = incomplete.partition("=")
    open_keys = [word for word in before[-2:] if "=" not in word and (verb != "ab" or word != before[0])]
    if equals:
        yield from ((f"{name}={one}", name) for one in _values(recipe, name, context, value))
    elif open_keys and before[-1] in ("=", open_keys[-1]):
        yield from ((one, open_keys[-1]) for one in _values(recipe, open_keys[-1], context, incomplete))
    else:
        if verb in ("train", "check", "config", "ab"):
            yield "preset=", "where the keys begin"
        yield from ((f"{key.name}=", key.doc) for key in schema(recipe).keys.values())


def _args(context: click.Context, incomplete: str) -> Words:
    """Runs; after the base of `rung ab`, keys."""
    is_ab = context.info_name == "ab" and context.params.get("args") and not context.params.get("is_judging")
    yield from (_keys if is_ab else _runs)(context, incomplete)


def _values(recipe: str, name: str, context: click.Context, incomplete: str) -> list[str]:
    if name == "preset":
        module = importlib.import_module(CATALOG[recipe][0].partition(":")[0].rpartition(".")[0])
        folder = Path(next(iter(module.__path__)), "presets")
        return [path.stem for path in sorted(folder.glob("*.yaml"))]
    key = schema(recipe).keys.get(name)
    if key is None:
        return []
    if name == "init_from":
        return [word for word, _ in _runs(context, incomplete)]
    if key.kind is bool:
        return ["true", "false"]
    if typing.get_origin(key.kind) is Literal:
        return [str(one) for one in typing.get_args(key.kind)]
    return [] if key.default is None else [str(key.default)]


_KINDS: Mapping[str, Callable[[click.Context, str], Any]] = {
    "recipe": _recipes, "what": _recipes_and_runs, "overrides": _keys, "run": _runs, "runs": _runs, "a": _runs,
    "b": _runs, "parent": _runs, "target": _runs, "source": _runs, "args": _args, "experiments": _experiments,
    "experiment": _experiments, "failed": _experiments, "name": _data, "names": _data,
}  # fmt: skip
