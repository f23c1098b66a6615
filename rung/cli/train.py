"""rung train"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from rung import parse
from rung.cli.options import config_option, mirror_option, nproc_option, remote_option, runs_option, trust_option
from rung.errors import UserError
from rung.runs.query import Run, open_run


@click.command(short_help="Train a recipe.")
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1, metavar="[preset=NAME] [KEY=VALUE]...")
@config_option
@click.option("--parent", "parent", help="Start from the config of this run; what you add is the change.")
@click.option("--why", help="What this run is to find out; kept with it.")
@click.option("--experiment", help="The series to file the run under; default: the parent's, else the recipe's name.")
@click.option("--tag", "tags", multiple=True, help="A word to find the run by; may be repeated.")
@click.option(
    "--check/--no-check", "checks", default=True, help="Look for mistakes before step 0, as `rung check` does."
)
@nproc_option
@click.option("--sweep", "point", hidden=True, help="NAME:KEY, the point of a sweep that this run is.")
@mirror_option
@remote_option
@trust_option
@runs_option
def command(
    recipe: str | None, overrides: tuple[str, ...], files: tuple[Path, ...], parent: str | None, why: str | None,
    experiment: str | None, tags: tuple[str, ...], checks: bool, nproc: int, point: str | None,
    mirrors: tuple[str, ...], remote: str | None, root: Path,
) -> None:  # fmt: skip
    """Train RECIPE and record everything about it under runs/.

    Ctrl-C saves at the next step boundary and stops; `rung resume` continues from there. A second Ctrl-C stops at once.

    \b
    Examples:
      rung train piano
      rung train piano preset=small optimizer.max_iters=2000 --why "does it fit in an evening?"
      rung train --parent piano/6 optimizer.grad_clip=0.5 --why "norm sits at 1.0 from step 300"
      rung train piano init_from=piano/6 lr.learning_rate=1e-4
      rung train piano eval_only=true init_from=piano/6
      rung train piano --mirror tensorboard
      rung train piano --remote s3://bucket/lab
      rung train piano preset=gpt2 --nproc 8
    """
    from rung import api, ranks
    from rung.progress import make_display, patience
    from rung.resolve import resolve

    base = None if parent is None else open_run(parent, root)
    if base is not None and recipe is not None and "=" in recipe:
        overrides, recipe = (recipe, *overrides), None
    if recipe is None and base is None:
        raise UserError("which recipe? (`rung recipes` lists them), or --parent RUN", code="missing-recipe")
    with patience("loading torch and the recipe"):
        resolved = resolve(recipe, overrides, files, parent=base, runs=root)
    if nproc > 1 and not ranks.is_started():
        ranks.check_nproc(nproc, resolved.config.values["system.device"])
        ranks.check_rows(nproc, resolved.config.view("engine"))
        sys.exit(ranks.run_ranks(nproc, sys.argv[1:]))
    if resolved.config.values["eval_only"]:
        from rung.cli.eval import print_results

        print_results(api.evaluate(resolved, runs=root), as_json=True)
        return
    sweep = None
    if point is not None:
        name, _, key = point.rpartition(":")
        file = root / ".sweeps" / name / "sweep.json"
        try:
            points = {one["key"]: one for one in parse.loose_json(parse.read_bytes(file))["points"]}
            sweep = {"name": name, "point": key, "varies": points[key]["varies"]}
        except (OSError, ValueError, KeyError, TypeError):
            message = f"{file} has no point {key} of a sweep {name}; start it with `rung sweep`"
            raise UserError(message, code="no-point") from None
    run = api.train(
        resolved, experiment=experiment, why=why, tags=tags, mirrors=mirrors, remote=remote, runs=root, check=checks,
        sweep=sweep, display=make_display,
    )  # fmt: skip
    if code := exit_code(run):
        sys.exit(code)


def exit_code(run: Run) -> int:
    """1 after a divergence, 128 + N after signal N; after 0 a shell's `&&` would take the training for finished."""
    if os.environ.get("RANK", "0") != "0":  # whoever started the ranks would end the first one, which has more to write
        return 0
    return 1 if run.status == "diverged" else 128 + run.stop_signal if run.stop_signal else 0
