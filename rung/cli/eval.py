"""rung eval"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.cli.resolve import Resolved, json_option, resolve, runs_option
from rung.errors import RunError, UserError

if TYPE_CHECKING:
    from rung.engine.build import Setup
    from rung.recipe import Stream


@click.command(short_help="Evaluate a run.")
@click.argument("run", metavar="RUN|RECIPE")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--at", type=int, help="The save to evaluate; default: the best one, else the last.")
@click.option("--split", help="Another split of the data, such as test; looks closer, and keeps what it finds.")
@click.option("--weights", type=click.Path(path_type=Path, file_okay=False),
              help="A Hugging Face folder to evaluate on the same rows, in place of the run's weights.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Where to keep what --split finds; default: evals/ in the run's folder.")  # fmt: skip
@json_option
@runs_option
def command(
    run: str, words: tuple[str, ...], at: int | None, split: str | None, weights: Path | None, out: Path | None,
    as_json: bool, runs_root: Path,
) -> None:  # fmt: skip
    """Evaluate RUN on all its eval sets, with the loss it was trained with, and print the exact averages.

    With --split it looks closer: the loss by component (or composer) and by position in the context, each with its
    standard error, on fixed rows that are listed in a file. What it finds is kept with the run: figures as JSON and
    CSV, the curve as SVG. --weights does the same for a model of others, as a baseline.

    \b
    Examples:
      rung eval piano/7
      rung eval piano/7 --at 1000 --json
      rung eval piano/7 --split test
      rung eval text/3 --split test --weights pythia-70m
      rung eval text --split validation --weights pythia-70m dataset.base_dataset_name=arxiv
    """
    if split is None and weights is None:
        setup, _ = open_weights(run, words, at, runs_root)
        print_results(setup.evaluator.run(setup.state.model), baselines_of(setup.streams), as_json)
        return
    from rung.cli.examined import Examined, print_examined, write_examined

    subject, setup = _subject(run, words, at, weights, runs_root, out)
    model = setup.state.model if weights is None else setup.recipe.foreign(weights).to(setup.world.device)
    chosen = setup.evaluator.streams if split is None else setup.recipe.held_out(split)
    if words:
        subject.check_rows(split or "validation", chosen)
    found = Examined.of(setup, model, chosen, subject, split or "validation")
    write_examined(found)
    print_examined(found, as_json)


def _subject(
    run: str, words: tuple[str, ...], at: int | None, weights: Path | None, runs_root: Path, out: Path | None
) -> tuple[Any, Setup]:
    """What is evaluated, where to keep what is found, and all that it takes."""
    from rung.cli.examined import Subject
    from rung.engine.build import build
    from rung.recipes import CATALOG
    from rung.runs.query import open_run

    if weights is not None and at is not None:
        raise UserError(f"--at {at} names a save of the run, --weights {weights} another model; leave one of them out")
    if weights is not None and not weights.is_dir():
        raise UserError(f"there is no folder {weights}; --weights takes a Hugging Face folder (config.json, weights)")
    if weights is not None and (run in CATALOG or ":" in run):  # without weights `piano` is its latest run
        resolved = resolve(run, words)
        setup = build(resolved.config, resolved.recipe_class, runs_root, is_training=False, is_new=False)
        return Subject(None, None, None, f"folder {weights.name}", out or Path("evals")), setup
    found = open_run(run, runs_root)
    if weights is not None:
        resolved = _config_of(run, words, runs_root)
        setup = build(resolved.config, resolved.recipe_class, runs_root, is_training=False, is_new=False)
        return Subject(found.id, found.path, None, f"folder {weights.name}", out or found.path / "evals"), setup
    setup, step = open_weights(run, words, at, runs_root)
    return Subject(found.id, found.path, step, f"checkpoint {step}", out or found.path / "evals"), setup


def _config_of(run: str, words: tuple[str, ...], runs_root: Path) -> Resolved:
    from rung.cli.resume import config_of
    from rung.runs.query import open_run

    return config_of(open_run(run, runs_root), words)


def open_weights(run: str, words: tuple[str, ...], at: int | None, runs_root: Path) -> tuple[Setup, int]:
    """A run put together with the weights of one of its saves; also the step of that save."""
    from rung.engine import checkpoint
    from rung.engine.build import build, find_checkpoint
    from rung.runs.query import open_run

    found = open_run(run, runs_root)
    resolved = _config_of(run, words, runs_root)
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


def baselines_of(streams: Mapping[str, Stream]) -> dict[str, Mapping[str, float]]:
    return {name: stream.baselines for name, stream in streams.items()}


def print_results(
    results: Mapping[str, Mapping[str, float]], baselines: Mapping[str, Mapping[str, float]], as_json: bool
) -> None:
    if as_json:
        rows = {name: {**values, "baselines": dict(baselines[name])} for name, values in results.items()}
        click.echo(json.dumps(rows, indent=1))
        return
    for name, values in results.items():
        click.echo(f"{name}: loss {values['loss']:.6f} over {values['targets']:.0f} targets")
        for part, value in values.items():
            if part not in ("loss", "targets"):
                click.echo(f"  {part} {value:.6f}")
        for what, value in baselines[name].items():
            click.echo(f"  {what} {value:.6f} (a baseline of this set)")
