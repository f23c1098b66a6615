"""rung eval"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.cli.resolve import json_option, runs_option
from rung.errors import RunError

if TYPE_CHECKING:
    from rung.engine.build import Setup


@click.command(short_help="Evaluate a run.")
@click.argument("run")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--at", type=int, help="The save to evaluate; default: the best one, else the last.")
@json_option
@runs_option
def command(run: str, words: tuple[str, ...], at: int | None, as_json: bool, runs_root: Path) -> None:
    """Evaluate RUN on all its eval sets, with the loss it was trained with, and print the exact averages.

    \b
    Examples:
      rung eval piano/7
      rung eval piano/7 --at 1000 --json
      rung eval piano/7 system.device=cpu
    """
    setup, _ = open_weights(run, words, at, runs_root)
    print_results(setup.evaluator.run(setup.state.model), setup.data, as_json)


def open_weights(run: str, words: tuple[str, ...], at: int | None, runs_root: Path) -> tuple[Setup, int]:
    """A run put together with the weights of one of its saves; also the step of that save."""
    from rung.cli.resume import config_of
    from rung.engine import checkpoint
    from rung.engine.build import build, find_checkpoint
    from rung.runs.query import open_run

    found = open_run(run, runs_root)
    resolved = config_of(found, words)
    saves = checkpoint.Checkpoints(found.path / "checkpoints")
    if at is not None and at not in saves.steps():
        raise RunError(f"{found.id} has no save at step {at}; it has {', '.join(map(str, saves.steps())) or 'none'}")
    path = find_checkpoint(str(found.path), runs_root) if at is None else saves.at(at)
    saved = checkpoint.load(path)
    setup = build(resolved.config, resolved.recipe_class, runs_root, is_training=False, is_new=False)
    checkpoint.check_identity(saved, setup.identity)
    checkpoint.load_weights(setup.state.model, saved.weights, path)
    for name, was in found.data().items():
        if name in setup.data and setup.data[name]["fingerprint"] != was["fingerprint"]:
            click.echo(f"note: {name} is other data than {found.id} was trained with", err=True)
    return setup, saved.step


def print_results(results: Mapping[str, Mapping[str, float]], data: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        rows = {name: {**values, "baselines": data[name]["baselines"]} for name, values in results.items()}
        click.echo(json.dumps(rows, indent=1))
        return
    for name, values in results.items():
        click.echo(f"{name}: loss {values['loss']:.6f} over {values['targets']:.0f} targets")
        for part, value in values.items():
            if part not in ("loss", "targets"):
                click.echo(f"  {part} {value:.6f}")
        for what, value in data[name]["baselines"].items():
            click.echo(f"  {what} {value:.6f} (a baseline of this set)")
