"""rung replay"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.cli.resolve import json_option, runs_option
from rung.errors import RunError

if TYPE_CHECKING:
    from rung.engine.build import Setup
    from rung.runs.query import Run


@click.command(short_help="Take a step of a run again, to see why it failed.")
@click.argument("run", metavar="RUN[@STEP]")
@click.option("--debug", "is_debug", is_flag=True, help="Stop in a debugger right before the forward of the step.")
@json_option
@runs_option
def command(run: str, is_debug: bool, as_json: bool, runs_root: Path) -> None:
    """Take a step of RUN again: a failed one to name the cause, any other to see that it comes out as it did.

    A step that failed was captured: without a step, the latest capture is replayed. It is tried in other precisions,
    with other batches and older weights, until the cause is in the data, the weights, the optimizer, the model, the
    precision, the device or the compiler; the sample, the operation and the line are named. Any other step is taken
    again from the last save before it and compared with the record.

    \b
    Examples:
      rung replay piano/7
      rung replay piano/7@1201
      rung replay piano/7@1200 --debug
    """
    from rung.forensics import replay
    from rung.runs.files import to_json
    from rung.runs.query import open_run, ref

    name, step = split(run)
    found = open_run(name, runs_root)
    if found.status == "running":
        raise RunError(
            f"{found.id} is still {found.status_text}; a replay would take its machine from it: stop it first"
        )
    report = lambda text: click.echo(f"{found.id}: {text}", err=True)  # noqa: E731
    if step is None or step in replay.captured_steps(found):
        captured = replay.read(found, step)
        fact = captured.facts[0]
        # What raised on a GPU may take the GPU's whole context with it: an id outside of its table does.
        setup = put_together(found, fact["dtype"], runs_root, on_cpu=bool(fact.get("error")))
        verdict = replay.replay(setup, found, captured, report, is_debug)
        again = verdict.command(ref(found.path, found.id))
        plain = {"run": found.id, **verdict.plain(), "command": again}
        lines = [*verdict.lines(), *([f"  {'':<10}{again}"] if again else [])]
    else:
        setup = put_together(found, str((found.document.get("derived") or {}).get("dtype", "auto")), runs_root)
        compared = replay.replay_healthy(setup, found, step, report, is_debug)
        plain, lines = {"run": found.id, **compared.plain()}, compared.lines()
    click.echo(to_json(plain).decode() if as_json else "\n".join([f"{found.id}  {lines[0]}", *lines[1:]]))


def split(run: str) -> tuple[str, int | None]:
    """A run and a step, of piano/7@1200."""
    name, at, step = run.rpartition("@")
    if not at:
        return run, None
    if not step.isdecimal():
        raise RunError(f"{step or 'nothing'} is not a step; name it as {name}@1200")
    return name, int(step)


def put_together(run: Run, dtype: str, runs_root: Path, on_cpu: bool = False) -> Setup:
    """The run's own config in the precision it was computed in, on this machine."""
    import torch

    from rung.cli.resume import config_of
    from rung.engine.build import build

    words = [f"system.dtype={dtype}"]
    wants_gpu = str(run.config()["system"]["device"]).startswith("cuda")
    if on_cpu or (wants_gpu and not torch.cuda.is_available()):
        words.append("system.device=cpu")
    resolved = config_of(run, tuple(words))
    return build(
        resolved.config,
        resolved.recipe_class,
        runs_root,
        is_training=resolved.config.values["system.compile"],
        is_new=False,
    )
