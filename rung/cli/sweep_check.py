"""Asks the recipe about every point of a sweep before the first one is trained; all mistakes are told at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rung.errors import ConfigError

if TYPE_CHECKING:
    from rung.config import Layer
    from rung.sweep.space import Point, Sweep

MOST_TOLD = 20


def check_points(sweep: Sweep) -> None:
    """Raises ConfigError where the recipe would refuse a point, with the points and the reasons."""
    from rung.recipe import Recipe
    from rung.recipes import find_recipe

    recipe = find_recipe(sweep.recipe)  # one that is not there is one mistake, and not one for each point
    if sweep.eval_split is not None and recipe.held_out is Recipe.held_out:
        raise ConfigError(f"eval: {sweep.recipe} has no split {sweep.eval_split!r} to evaluate on; leave eval out")
    base_of = functools.cache(lambda preset, files: _base(sweep.recipe, preset, files))
    wrong: dict[str, list[Point]] = {}
    points = _samples(sweep) if sweep.search is not None else sweep.points
    for point in points:
        try:
            _check(sweep, point, base_of)
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(point)
    if not wrong:
        return
    num = sum(map(len, wrong.values()))
    lines = [f"{num} of {len(points)} points cannot be trained; nothing was started:"]
    for reason, of in list(wrong.items())[:MOST_TOLD]:
        who = "every point" if len(of) == len(points) > 1 else ", ".join(point.told for point in of[:3])
        more = f" and {len(of) - 3} more" if len(of) > 3 and len(of) < len(points) else ""
        lines += [f"  {who}{more}:", *(f"    {line}" for line in reason.splitlines())]
    if len(wrong) > MOST_TOLD:
        lines.append(f"  and {len(wrong) - MOST_TOLD} more reasons")
    raise ConfigError("\n".join(lines))


def _base(recipe: str, preset: str | None, files: tuple[str, ...]) -> list[Layer]:
    """What points start from; read once, as reading YAML takes longer than checking a point."""
    from rung.config import Layer, load_file
    from rung.recipes import find_recipe, preset_layer

    return [*preset_layer(find_recipe(recipe), preset), *(Layer(f"file {one}", load_file(Path(one))) for one in files)]


def _check(sweep: Sweep, point: Point, base_of: Callable[[str | None, tuple[str, ...]], list[Layer]]) -> None:
    from rung.cli.resolve import resolve
    from rung.sweep.space import split_files

    words, files = split_files(point.words)
    presets = [one.partition("=")[2] for one in words if one.startswith("preset=")]
    rest = [one for one in words if not one.startswith("preset=")]
    resolved = resolve(sweep.recipe, rest, base=base_of(presets[0] if presets else None, tuple(files)))
    if resolved.config.values["eval_only"]:
        raise ConfigError("eval_only=true trains nothing, so there would be no run; leave it out")


def _samples(sweep: Sweep) -> list[Point]:
    """Points at the ends of what a search may choose from."""
    from rung.sweep.ranges import read_settings
    from rung.sweep.space import point_of

    space = read_settings(sweep.search or {}).space
    ends = [(one[0], one[-1]) if isinstance(one, tuple) else (one.low, one.high) for one in space.values()]
    return [point_of(sweep, dict(zip(space, values))) for values in zip(*ends)]
