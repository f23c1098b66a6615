"""`rung mirror`: a run for wandb or TensorBoard, written from the record. Works without torch and numpy."""

from __future__ import annotations

from pathlib import Path

import click

from rung.cli.options import runs_option
from rung.text import echo


@click.command("mirror", short_help="Show a run in wandb or TensorBoard.")
@click.argument("run")
@click.argument("tracker", type=click.Choice(["tensorboard", "wandb"]))
@runs_option
def command(run: str, tracker: str, root: Path) -> None:
    """Write all rows of RUN for TRACKER, in place of an earlier mirror, and say how to look at it.

    The mirror lies in the folder of the run, under mirror/. Nothing is sent anywhere: for wandb it is an offline run,
    unless WANDB_MODE says otherwise. TensorBoard's files are written without TensorBoard; it has to be installed only
    where you look at them. To mirror a run while it trains: rung train ... --mirror tensorboard.

    \b
    Examples:
      rung mirror piano/7 tensorboard
      rung mirror piano/best wandb
    """
    from rung.runs.query import open_run
    from rung.trackers.mirror import replay

    sink, num_rows = replay(tracker, open_run(run, root))
    echo(f"{num_rows} rows of {run} for {sink.name}")
    echo(f"  {sink.summary_line()}")
