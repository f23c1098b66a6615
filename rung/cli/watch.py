"""`rung watch`: a run that trains elsewhere, as the terminal that trains it shows it. Imports no torch."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.cli.options import runs_option
from rung.report.table import columns, loss_text, paragraph
from rung.text import echo, one_line

if TYPE_CHECKING:
    from rung.progress import Display
    from rung.runs.query import Run

LOOK_S = 0.5
NUM_EVALS = 5  # of the past that are shown again


@click.command("watch", short_help="Follow a run that trains elsewhere.")
@click.argument("run")
@runs_option
def command(run: str, root: Path) -> None:
    """Follow RUN until it ends: steps, evals, findings. Ctrl-C ends the watching, not the run.

    Of a run that has ended it says so, with its curve. The exit code is 0 after a run that finished and 1 after one
    that was stopped, crashed, diverged or vanished, for a command that should hear of it.

    \b
    Examples:
      rung watch piano/7
      rung watch piano
      rung watch piano/7 || echo "piano/7 needs you"
    """
    from rung.progress import Curve, make_display
    from rung.runs.metrics import number_of
    from rung.runs.query import open_run, ref
    from rung.runs.tail import Tail

    found = open_run(run, root)
    tail = Tail(found.id, found.path / "metrics")
    why = f'  why: "{found.document["why"]}"' if found.document.get("why") else ""
    echo(f"{found.id}  {found.status_text}{why}", bold=True)
    past = [loss for loss in found.metrics(["loss"]).get("loss", []) if loss is not None]
    told = list(found.events())
    if found.status == "running":
        display = make_display(_num_steps(found), _log_interval(found), _baselines(found))
        try:
            display.past(past)
            for event in [event for event in told if event.get("kind") == "eval"][-NUM_EVALS:]:
                _tell(display, event, found)
            size = -1
            while found.status == "running":
                time.sleep(LOOK_S)
                # The status before the rows: what was written until the end is then still read.
                found = open_run(found.path, root)
                for row in (tail.read() or {}).get("rows", []):
                    values = {name: number for name in row if (number := number_of(row[name])) is not None}
                    if "loss" in values:
                        display.step(int(row["step"]), values)
                if (now := _size(found)) != size:
                    size, events = now, list(found.events())
                    for event in events[len(told) :]:
                        _tell(display, event, found)
                    told = events
        finally:
            display.close()
    elif len(past) > 1:
        curve = Curve()
        for loss in past:
            curve.add(loss)
        low, high = curve.range()
        echo(f"loss {loss_text(high)} to {loss_text(low)}")
        for line in curve.lines(min(columns(), 100), 3):
            echo(line)
    reason = f": {one_line(found.document['reason'])}" if found.document.get("reason") else ""
    echo(paragraph(f"{found.id} is {found.status_text}{reason}, at step {found.step}"))
    if best := found.best:
        echo(f"best {one_line(best.get('set'))} loss {loss_text(best.get('loss'))} at step {best.get('step')}")
    echo(f"look at it with `rung show {ref(found.path, found.id)}`")
    if found.status != "finished":
        sys.exit(1)


def _num_steps(run: Run) -> int | None:
    found = (run.document.get("derived") or {}).get("num_steps")
    return found if isinstance(found, int) else None


def _log_interval(run: Run) -> int:
    logging = run.config().get("logging")
    found = logging.get("log_interval") if isinstance(logging, dict) else None
    return found if isinstance(found, int) and found > 0 else 10


def _baselines(run: Run) -> dict[str, dict[str, float]]:
    return {
        name: {what: loss for what, loss in about["baselines"].items() if isinstance(loss, int | float)}
        for name, about in run.data().items()
        if isinstance(about, dict) and isinstance(about.get("baselines"), dict)
    }


def _size(run: Run) -> int:
    try:
        return (run.path / "events.ndjson").stat().st_size
    except OSError:
        return 0


def _tell(display: Display, event: dict[str, Any], run: Run) -> None:
    """An event, as the terminal that trains tells of it."""
    kind, step, results = event.get("kind"), event.get("step"), event.get("results")
    if kind == "eval" and isinstance(step, int) and isinstance(results, dict):
        numbers = {
            name: {part: float(one) for part, one in values.items() if isinstance(one, int | float)}
            for name, values in results.items()
            if isinstance(values, dict) and isinstance(values.get("loss"), int | float)
        }
        if numbers:
            display.eval(step, numbers, (run.best or {}).get("step") == step)
    elif kind == "finding" and event.get("severity") != "info":
        display.say(
            one_line(f"{event.get('severity')}: {event.get('title')} ({event.get('rule')}): {event.get('what')}")
        )
    elif kind in ("note", "crash", "diverged", "sample_failed"):
        display.say(one_line(f"{kind}: {event.get('text') or event.get('why') or event.get('error') or ''}"))
