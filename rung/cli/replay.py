"""rung replay"""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from rung.cli.options import json_option, print_json, runs_option, trust_option
from rung.errors import RunError
from rung.report.table import hanging
from rung.text import echo


@click.command(short_help="Take a step of a run again, to see why it failed.")
@click.argument("run", metavar="RUN[@STEP]")
@click.option("--debug", "is_debug", is_flag=True, help="Stop in a debugger right before the forward of the step.")
@click.option(
    "--build",
    metavar="FILE:FUNCTION",
    help="For a run of your own script: a function that returns (model, optimizer, loss).",
)
@json_option
@trust_option
@runs_option
def command(run: str, is_debug: bool, build: str | None, as_json: bool, root: Path) -> None:
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
      rung replay mine/3@41 --build train.py:build
    """
    from rung.api import rebuild
    from rung.forensics import replay
    from rung.runs.query import open_run, ref
    from rung.runs.record import append_event

    name, at, number = run.rpartition("@")
    if at and not number.isdecimal():
        raise RunError(f"{number or 'nothing'} is not a step; name it as {name}@1200", code="no-step")
    step = int(number) if at else None
    found = open_run(name if at else run, root)
    if found.status == "running":
        raise RunError(
            f"{found.id} is still {found.status_text}; a replay would compete for its device: stop it first",
            code="wrong-state",
        )
    report = lambda text: echo(f"{found.id}: {text}", err=True)  # noqa: E731
    if found.document.get("recipe") == "own loop":
        from rung.script.replay import replay_run

        verdict = replay_run(found, step, build, report)
        plain, lines = {"run": found.id, **verdict.to_dict()}, verdict.lines()
    elif step is None or step in replay.captured_steps(found):
        captured = replay.read(found, step)
        fact = captured.facts[0]
        # What raised on a GPU may take the GPU's whole context with it: an id outside of its table does.
        setup = rebuild(found, fact["dtype"], save=captured.path, on_cpu=bool(fact.get("error")), runs=root)
        verdict = replay.replay(setup, found, captured, report, is_debug)
        again = verdict.command(ref(found.path, found.id))
        plain = {"run": found.id, **verdict.to_dict(), "command": again}
        lines = [*verdict.lines(), *([f"  {'':<10}{again}"] if again else [])]
    else:
        dtype = str((found.document.get("derived") or {}).get("dtype", "auto"))
        setup = rebuild(found, dtype, runs=root)
        compared = replay.replay_healthy(setup, found, step, report, is_debug)
        plain, lines = {"run": found.id, **compared.to_dict()}, compared.lines()
    with contextlib.suppress(RunError, OSError):  # the record of others may only be read
        append_event(found.path, "replay", step=plain.get("step", step), text="\n".join(lines))
    if as_json:
        print_json(plain)
    else:
        echo(f"{found.id}  {lines[0]}")
        for line in lines[1:]:
            echo(line if line.strip() == plain.get("command") else hanging(line))  # a command stays in one piece
