"""rung resume"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.cli.resolve import Resolved, recipe_of, resolve, run_layer, runs_option
from rung.cli.train import (
    follow,
    mirror_option,
    mirrors_of,
    open_mirrors,
    open_remote,
    remote_option,
    require_mirrors,
    require_remote,
)
from rung.config import differences, parse_overrides
from rung.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rung.runs.query import Run

# Keys that change where and how a run is computed and shown, not what it learns.
FREE = (
    "system.",
    "ddp.",
    "logging.",
    "guard.",
    "signals.",
    "checkpoint.",
    "eval_interval",
    "sample_interval",
    "sampling.",
)
CUT = ("data.batch_size", "optimizer.gradient_accumulation_steps")


@click.command(short_help="Go on with a run.")
@click.argument("run")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--at", type=int, help="The save to go on from; default: the last one.")
@mirror_option
@remote_option
@runs_option
def command(
    run: str, words: tuple[str, ...], at: int | None, mirrors: tuple[str, ...], remote: str | None, runs_root: Path
) -> None:
    """Go on with RUN from its last save, as if it had never stopped.

    The config is the run's own. Only what does not change what is learned can be given anew: where it runs, how often
    it saves and evaluates, how a step's rows are cut into micros. For anything else start a new run: rung train --from.

    \b
    Examples:
      rung resume piano/7
      rung resume piano/7 --at 1000
      rung resume piano/7 data.batch_size=8 optimizer.gradient_accumulation_steps=4
    """
    from rung.engine.build import build, restore
    from rung.engine.checkpoint import Checkpoints
    from rung.runs.query import open_run
    from rung.runs.record import Record

    require_mirrors(mirrors)
    require_remote(remote)
    found = open_run(run, runs_root)
    if found.status == "running":  # asked first: its saves come and go while we look
        raise RunError(f"{found.id} is still {found.status_text}; stop it first, or start a new run")
    resolved = same_learning(found, words)
    mirrors = mirrors_of(resolved, mirrors)
    require_mirrors(mirrors)
    saves = Checkpoints(found.path / "checkpoints")
    steps = saves.steps()
    if not steps:
        raise RunError(f"{found.id} has no save to go on from; start again with `rung train --from {found.id}`")
    step = steps[-1] if at is None else at
    if step not in steps:
        raise RunError(f"{found.id} has no save at step {step}; it has {', '.join(map(str, steps))}")
    if found.status == "finished" and step == steps[-1]:
        budget = resolved.config.values["optimizer.max_iters"]
        why = found.document.get("reason") or f"optimizer.max_iters={budget} was reached"
        raise RunError(
            f"{found.id} is finished: {why} at step {step}; another budget is "
            f"another run: `rung train --from {found.id} init_from={found.id} optimizer.max_iters=...`"
        )
    setup = build(resolved.config, resolved.recipe_class, runs_root, is_new=False)
    restore(setup, saves.at(step), evaluated={row["step"] for row in found.evals()})
    record, aside = None, []
    if setup.world.is_first:
        record = Record.reopen(found.path, command=sys.argv)
        saves.sweep()
        aside = saves.set_aside(after=step)
        record.event("resume", step=step, overrides=list(words), set_aside=aside)
    lines = [f"{found.id} goes on at step {step}", *setup.chosen]
    if aside:
        lines.append(f"set aside the later saves {', '.join(map(str, aside))}, in {found.path}/checkpoints")
    opened = open_mirrors(record, mirrors) if record is not None else []
    upload = open_remote(record, remote) if record is not None else None
    others = [one.words() for one in (*opened, upload) if one is not None]
    follow(setup, record, "\n  ".join([*lines, *others]), opened, upload)


def config_of(run: Run, words: tuple[str, ...] = ()) -> Resolved:
    """The run's own config with these overrides."""
    return resolve(recipe_of(run), words, base=[run_layer(run.id, run.config(), run.sources())])


def same_learning(run: Run, words: tuple[str, ...]) -> Resolved:
    """The run's own config with overrides that leave what it learns alone; refuses others."""
    resolved = config_of(run, words)  # first: a key that does not exist is not a key that changes learning
    before = run.config()
    hangs_on_evals = before["lr"]["schedule"] == "plateau" and before["lr"]["decay_lr"]
    hangs_on_evals = hangs_on_evals or before.get("eval_patience", 0) > 0  # evals also decide when it ends
    for name in differences({}, parse_overrides(words)):
        is_free = name in CUT or (name.startswith(FREE) and not (hangs_on_evals and name == "eval_interval"))
        if not is_free:
            raise ConfigError(
                f"{name} changes what {run.id} learns and cannot be given on resume; "
                f"start a new run with `rung train --from {run.id} {name}=...`"
            )
    rows = [
        tree["data"]["batch_size"] * tree["optimizer"]["gradient_accumulation_steps"]
        for tree in (before, resolved.config.tree())
    ]
    if rows[0] != rows[1]:
        raise ConfigError(
            f"{CUT[0]} x {CUT[1]} is {rows[1]} rows a step here and {rows[0]} in {run.id}; "
            "a resumed run must take the same rows: change both so that the product stays"
        )
    return resolved
