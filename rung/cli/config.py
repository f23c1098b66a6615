"""rung config"""

from __future__ import annotations

import functools
import json
import operator
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import click

from rung.cli.options import config_option, json_option
from rung.config import Key, Schema
from rung.errors import UserError
from rung.recipes import CATALOG, find_recipe
from rung.report.table import PARAGRAPH, columns, paragraph
from rung.resolve import resolve, schema_of
from rung.text import echo, echo_json
from rung.units import Budget


@click.command(short_help="Print the keys of a recipe.")
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1, metavar="[preset=NAME] [KEY=VALUE]...")
@config_option
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the reference; without RECIPE, of all of them.")
@json_option
def command(
    recipe: str | None, overrides: tuple[str, ...], files: tuple[Path, ...], as_markdown: bool, as_json: bool
) -> None:
    """Print every key of RECIPE as it would be used: value, where it comes from, what it means.

    What is printed is YAML that -c takes back.

    \b
    Examples:
      rung config piano
      rung config piano preset=gpt2 optimizer.max_iters=5000
      rung config piano -c my.yaml --json
      rung config --markdown
    """
    if as_markdown:
        if overrides or files or as_json:
            raise UserError(
                "--markdown prints what can be set, not values; leave out KEY=VALUE, -c and --json",
                code="options-conflict",
            )
        echo("\n".join(reference(list(CATALOG) if recipe is None else [recipe])))
        return
    if recipe is None:
        raise UserError("which recipe? (`rung recipes` lists them)", code="missing-recipe")
    config = resolve(recipe, overrides, files).config
    tree = config.tree()
    values = {name: functools.reduce(operator.getitem, name.split("."), tree) for name in config.schema.keys}
    if as_json:
        rows = {
            name: {"value": values[name], "source": config.sources[name], "doc": found.doc}
            for name, found in config.schema.keys.items()
        }
        echo_json(json.dumps(rows, indent=1))
        return
    # YAML with the meaning and the source of each value behind it; both owners of a group in one place.
    for group, keys in _grouped(config.schema).items():
        if group:
            echo(f"{group}:")
        for found in keys:
            shown = _yaml(found, values[found.name])
            line = f"{'  ' if group else ''}{found.name.rpartition('.')[2]}: {shown}"
            about = f"{found.doc}  [{config.sources[found.name]}]"
            indent = "  " if group else ""
            if len(beside := f"{line:<44}  # {about}") <= columns():  # and in a file, where the keys are counted
                echo(beside)
            elif columns() >= PARAGRAPH:
                echo(paragraph(about, f"{line:<44}  # ", f"{'':<44}  # "))
            else:
                echo(paragraph(about, f"{indent}# ", f"{indent}# "))
                echo(line)


INTRO = """\
# Config keys

This page is printed by `rung config --markdown`; change the keys, not the page.

A run has one tree of keys. Some are the engine's and the same for every recipe, the others are the recipe's own; a
group such as `data` may hold both. `rung config RECIPE` prints the tree as it would be used.

**Layers.** Defaults, then a preset (`preset=small`; without one, `tiny`), then YAML files (`-c my.yaml`, in order),
then `key=value` words. Later ones win, key by key. `rung train --parent RUN` puts what that run had set in the preset's
place. A mistake anywhere (an unknown key, a wrong type, a value out of range, keys that contradict each other) ends
the command with exit code 2 before anything starts, and all mistakes are listed at once.

**Values.** Those of YAML: `1e-4`, `true`, `null`, `[1, 2]`, text. A whole number may be written `3e5`. A *quantity*
is a number with a unit: `2000` (steps), `1.5M tokens`, `3 epochs`, `10 min`; a comma joins several, and the first
that is due counts; `0` means never.

**References.** `${a.b}` stands for the value of another key, whichever layer set that one, so
`${optimizer.max_iters}` follows `optimizer.max_iters=5000`. A circle of references, or one to a key that does not
exist, is an error.

**Sources.** Each value keeps where it came from: `default`, `preset tiny`, `file my.yaml`, `command line`, `python`, or
`derived: from optimizer.max_iters` for a default that refers to another key. They are shown by `rung config` and kept
with every run.

**Unread keys.** A key that was set and that nothing has read after the first eval is reported by name: it does
nothing in that run. A default that nothing reads is not reported.
"""


def reference(recipes: list[str]) -> Iterator[str]:
    """The page of all keys: how they work, the engine's, those of each recipe."""
    yield INTRO
    for name in recipes:
        schema = schema_of(name, find_recipe(name))
        if name == recipes[0]:
            yield "## engine: for every recipe\n"
            yield from _tables(schema, "engine")
        about = f"{CATALOG[name][1]}\n" if name in CATALOG else ""
        yield f"## {name}: its own keys\n\n{about}"
        yield from _tables(schema, "recipe")


def _tables(schema: Schema, owner: str) -> Iterator[str]:
    own = Schema({owner: schema.owners[owner]})
    for group, keys in _grouped(own).items():
        if not keys:
            continue
        yield f"### {group}\n\n{own.sections[group]}\n" if group else "### without a group\n"
        yield "| key | type | default | meaning | owner |"
        yield "|---|---|---|---|---|"
        for found in keys:
            cells = (f"`{found.name}`", _kind(found), f"`{_yaml(found, found.default)}`", found.doc, owner)
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        yield ""


def _kind(found: Key) -> str:
    """The type and the range, spelled out."""
    args = typing.get_args(found.kind)
    origin = typing.get_origin(found.kind)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if origin in (typing.Union, types.UnionType):
        first = next(a for a in args if a is not type(None))
        return f"{_kind(Key(found.name, first, None, '', found.low, found.high))} or null"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", Budget: "quantity"}
    names |= {list: "list", dict: "mapping"}
    limits = [f"from {found.low:g}"] if found.low is not None else []
    limits += [f"to {found.high:g}"] if found.high is not None else []
    return " ".join([names.get(origin or found.kind, "any"), *limits])


def _grouped(schema: Schema) -> dict[str, list[Key]]:
    """Keys by group: those without one first, then in the order of their first key."""
    groups: dict[str, list[Key]] = {"": []}
    for found in schema.keys.values():
        groups.setdefault(found.name.rpartition(".")[0], []).append(found)
    return groups


def _yaml(found: Key, value: Any) -> str:
    """A value as one would write it: plain where YAML reads it back as the same, quoted elsewhere."""
    if isinstance(value, Budget) or found.kind is Budget:
        return str(value)
    is_word = isinstance(value, str) and re.fullmatch(r"\$\{[\w.]+\}|[A-Za-z_./][\w./-]*", value)
    if is_word and value.lower() not in ("true", "false", "yes", "no", "on", "off", "y", "n", "null", "."):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
