"""rung check"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click

from rung.cli.options import config_option, json_option, runs_option, trust_option
from rung.recipes import CATALOG
from rung.text import echo, echo_json


@click.command(short_help="Look for mistakes before training.")
@click.argument("what", metavar="RECIPE|RUN")
@click.argument("overrides", nargs=-1, metavar="[preset=NAME] [KEY=VALUE]...")
@config_option
@click.option("--quick", "is_quick", is_flag=True, help="Only what `rung train` asks before step 0; a few seconds.")
@json_option
@trust_option
@runs_option
def command(
    what: str, overrides: tuple[str, ...], files: tuple[Path, ...], is_quick: bool, as_json: bool, root: Path
) -> None:
    """Look for mistakes before training: in the plan, the data, the model, its loss and its evals.

    RECIPE is checked as it would start; a RUN (such as piano/7) with its own config, at its last save, or as it
    started where there is none. Nothing is trained and nothing is recorded. The exit code is 1 where something fails,
    else 0.

    \b
    Examples:
      rung check piano
      rung check piano preset=small data.batch_size=64 --quick
      rung check world -c my.yaml
      rung check piano/7
      rung check my_package.recipe:Mine --json
    """
    from rung.doctor.preflight.checks import run_checks
    from rung.doctor.preflight.result import CheckContext, render
    from rung.engine.build import build, restore
    from rung.engine.checkpoint import Checkpoints
    from rung.resolve import resolve
    from rung.runs.query import open_run

    if what in CATALOG or ":" in what:  # a recipe, as it would start
        resolved = resolve(what, overrides, files, runs=root)
        setup = build(resolved.config, resolved.recipe_class, root)
    else:  # a run, at its last save
        if "/" not in what and not (root / what).exists():
            resolve(what)  # no run of that name: say what a recipe is
        found = open_run(what, root)
        resolved = resolve(None, overrides, files, parent=found, runs=root)
        saves = Checkpoints(found.path / "checkpoints")
        steps = saves.steps()
        setup = build(resolved.config, resolved.recipe_class, root, is_new=not steps)
        if steps:
            restore(setup, saves.at(steps[-1]))
        else:  # a run that ended before its first one
            echo(f"{found.id} has no save; it is checked as it started", err=True)

    def report(name: str, done: int, total: int) -> None:
        echo(f"\r\x1b[K{done}/{total} {name}", nl=False, err=True)

    begun = time.monotonic()
    is_watched = sys.stderr.isatty() and not as_json
    context = CheckContext(setup, is_quick, shared={"runs_root": root})
    results = run_checks(context, report if is_watched else None)
    seconds = time.monotonic() - begun
    if is_watched:
        echo("\r\x1b[K", nl=False, err=True)
    if as_json:
        echo_json(json.dumps({"results": [r.to_dict() for r in results], "seconds": seconds}, indent=1))
    else:
        echo(render(results, seconds, has_details=not is_quick))
    setup.world.leave()
    if any(result.level == "fail" for result in results):
        sys.exit(1)
