"""rung sample"""

from __future__ import annotations

import json
from pathlib import Path

import click

from rung.cli.resolve import json_option, runs_option


@click.command(short_help="Make samples from a run.")
@click.argument("run")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--at", type=int, help="The save to sample from; default: the best one, else the last.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to put them; default: ./samples/RUN/STEP-seed-N.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed gives other samples.")
@json_option
@runs_option
def command(
    run: str, words: tuple[str, ...], at: int | None, out: Path | None, seed: int, as_json: bool, runs_root: Path
) -> None:
    """Make samples from the weights of RUN. The run itself is not touched.

    \b
    Examples:
      rung sample piano/7
      rung sample piano/7 sampling.temperature=0.9 sampling.num_samples=4 --seed 3
      rung sample piano/7 --at 1000 --out /tmp/listen
    """
    import numpy as np

    from rung.cli.eval import open_weights
    from rung.errors import UserError
    from rung.recipe import Draw
    from rung.runs.query import open_run

    setup, step = open_weights(run, words, at, runs_root)
    out = out or Path("samples") / open_run(run, runs_root).id / f"{step}-seed-{seed}"
    made = setup.samples(Draw(seed, step, np.arange(1)))
    if not made:
        raise UserError(f"the recipe of {run} makes no samples")
    rows = []
    for sample in made:
        path = out / sample.name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(sample.data)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another place with --out") from error
        rows.append({"path": str(path), "caption": sample.caption})
        if not as_json:
            click.echo(f"{path}  {sample.caption}")
    if as_json:
        click.echo(json.dumps(rows, indent=1))
