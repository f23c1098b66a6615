"""rung resume"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rung.cli.options import mirror_option, nproc_option, remote_option, runs_option, trust_option
from rung.runs.query import open_run


@click.command(short_help="Resume a run.")
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--at", type=int, help="The save to resume from; default: the last one.")
@click.option("--accept-edits", is_flag=True, help="Train on with a config.yaml that was edited since the save.")
@nproc_option
@mirror_option
@remote_option
@trust_option
@runs_option
def command(
    run: str, overrides: tuple[str, ...], at: int | None, accept_edits: bool, nproc: int,
    mirrors: tuple[str, ...], remote: str | None, root: Path,
) -> None:  # fmt: skip
    """Resume RUN from its last save, as if it had never stopped.

    The config is the one the save was made with, even where a default has changed since. Only keys that do not change
    what is learned can be given: where it runs, how often it saves and evaluates, how a step's rows are cut into
    micros and shared by how many processes. For anything else start a new run: rung train --parent.

    \b
    Examples:
      rung resume piano/7
      rung resume piano/7 --at 1000
      rung resume piano/7 --nproc 4
      rung resume piano/7 data.batch_size=8 optimizer.gradient_accumulation_steps=4
    """
    from rung import api, ranks
    from rung.cli.train import exit_code
    from rung.progress import make_display

    if nproc > 1 and not ranks.is_started():
        given = dict(word.partition("=")[::2] for word in overrides)
        device = given.get("system.device") or open_run(run, root).config().get("system", {}).get("device", "auto")
        ranks.check_nproc(nproc, device)
        sys.exit(ranks.run_ranks(nproc, sys.argv[1:]))
    done = api.resume(
        run, overrides, at=at, accept_edits=accept_edits, mirrors=mirrors, remote=remote, runs=root,
        display=make_display,
    )  # fmt: skip
    if code := exit_code(done):
        sys.exit(code)
