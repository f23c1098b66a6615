"""rung eval"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.cli.options import json_option, runs_option, trust_option
from rung.report.table import loss_text, paragraph, print_table, value_text
from rung.text import echo, echo_json, one_line

if TYPE_CHECKING:
    from rung.evaluation import Evaluation


@click.command(short_help="Evaluate a run.")
@click.argument("run", metavar="RUN|RECIPE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--at", type=int, help="The save to evaluate; default: the best one, else the last.")
@click.option("--split", help="Another split of the data, such as test; looks closer, and keeps what it finds.")
@click.option("--weights", type=click.Path(path_type=Path, file_okay=False),
              help="A Hugging Face folder to evaluate on the same rows, in place of the run's weights.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Where to keep what --split finds; default: evals/ in the run's folder.")  # fmt: skip
@json_option
@trust_option
@runs_option
def command(
    run: str, overrides: tuple[str, ...], at: int | None, split: str | None, weights: Path | None, out: Path | None,
    as_json: bool, root: Path,
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
    from rung import api
    from rung.progress import reporter

    report, close = reporter() if split is not None or weights is not None else (None, lambda: None)
    try:
        found = api.evaluate(run, overrides, split=split, at=at, weights=weights, out=out, runs=root, report=report)
    finally:
        close()
    if found.file is None:
        print_results(found, as_json)
    elif as_json:
        echo_json(json.dumps(found.document(), indent=1))
    else:
        echo(f"{found.run.id if found.run else 'no run'}, {one_line(found.weights)}, split {found.split}")
        for name, values in found.items():
            _print_set(name, values)
        echo(f"in {found.file}")


def print_results(found: Evaluation, as_json: bool) -> None:
    if as_json:
        echo_json(json.dumps(found.sets, indent=1))
        return
    for name, values in found.items():
        echo(f"{name}: loss {loss_text(values['loss'])} over {values['targets']:.0f} targets")
        for part, value in values.items():
            if part not in ("loss", "targets", "baselines"):
                echo(f"  {part} {value_text(value)}")
        for what, value in values["baselines"].items():
            echo(f"  {what} {loss_text(value)} (a baseline of this set)")


def _print_set(name: str, values: Mapping[str, Any]) -> None:
    head = ["", "loss", "s.e.", "perplexity", "targets", "rows"]
    below = {**values.get("target_parts", {}), **values.get("groups", {})}
    rows = [[name, *_row(values)], *([one_line(part), *_row(one)] for part, one in below.items())]
    mean = values.get("mean_of_groups")
    if mean and mean["loss"] is not None:
        rows.append(["mean of groups", _number(mean["loss"]), _number(mean["se"]), "", "", ""])
    print_table(head, rows, numeric=range(1, 6), keep=(0, 1, 2))
    if parts := values.get("parts"):
        echo(paragraph(", ".join(f"{name} {value:.4f}" for name, value in parts.items()), "  ", "  "))
    positions = values.get("positions", {}).get("loss", [])
    known = [(place, loss) for place, loss in enumerate(positions, start=1) if loss is not None]
    if known:
        chosen = sorted({1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, known[-1][0]} & {place for place, _ in known})
        losses = ", ".join(f"{place}: {positions[place - 1]:.3f}" for place in chosen)
        echo(paragraph(f"loss of the n-th prediction of a row: {losses}", "  ", "    "))
    if control := values.get("control"):
        labels, shuffled = control["labels"], control["shuffled"]
        if control["deals"]:
            echo(
                f"  groups lie {labels['spread']:.4f} nats apart (largest {labels['largest_z']:.1f} s.e.); with labels "
                f"at random {shuffled['spread']:.4f} ({shuffled['largest_z']:.1f}), and as clearly as this in "
                f"{control['as_far']} of {control['deals']} deals"
            )
    for what, value in values["baselines"].items():
        echo(f"  {what} {value:.4f} (a baseline of this set)")


def _row(values: Mapping[str, Any]) -> list[str]:
    perplexity, rows = values.get("perplexity"), values.get("rows")
    return [
        _number(values["loss"]),
        _number(values.get("se", values.get("loss_se"))),
        "" if perplexity is None else f"{perplexity:.2f}",
        f"{values['targets']:.0f}",
        "" if rows is None else str(rows),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
