"""Starts a run of somebody's own loop, and knows the one that is going on.

`rung.init` is the only place that may raise: a name that cannot be one, a folder that cannot be written. The run ends
with `finish`, with its `with`, with the next `init`, or with the script: a script that ends by an error has crashed.
A process that is killed says nothing, and its run is shown as vanished, as any other.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rung.errors import UserError
from rung.lab import runs_folder
from rung.runs.executed import Executed, is_of_python
from rung.runs.failure import failure_here
from rung.runs.query import Run, open_run
from rung.runs.record import Record, read_document
from rung.script.never_raise import say
from rung.script.run import RECIPE, OwnRun
from rung.script.settings import dotted, source_of, tree_of
from rung.secrets import command_without_secrets, without_secrets

UNSEEDED = 67280421310721  # what torch says of a generator that nobody has seeded


@dataclass
class _Open:
    run: OwnRun | None = None
    others: list[OwnRun] = field(default_factory=list)  # that go on beside it
    known_error: BaseException | None = None  # of an earlier failure, in a session that went on
    exits: dict[str, Any] = field(default_factory=dict)  # the last exit with a code: see _note_exits


_open = _Open()


def init(
    experiment: str | None = None,
    config: Any = None,
    *,
    why: str | None = None,
    parent: Any = None,
    tags: Sequence[str] = (),
    seed: int | None = None,
    runs: str | Path | None = None,
    mirror: str | Sequence[str] = (),
    mode: str | None = None,
    code: str | Path | bool = True,
    planned_seeds: int | None = None,
    **wandb: Any,
) -> OwnRun:
    """Starts a run. The names of wandb are understood too: project, name, notes, group, dir.

    config: a dict, a dataclass, argparse's result or OmegaConf. why: what is to be found out. parent: the run that
    this one changes. runs: the folder, or RUNG_RUNS, or ./runs. mirror: "wandb" or "tensorboard".
    mode="disabled" writes nothing, and so do ranks other than the first. An earlier run is finished, unless
    reinit="create_new" lets both go on. code: the folder whose code is kept, or False for none; by default the one
    that the script was started from, or its own. planned_seeds: how many seeds each arm of a comparison is to have,
    fixed before the first one is looked at; `rung ab --judge` then need not allow for further looks.
    """
    if planned_seeds is not None and (type(planned_seeds) is not int or planned_seeds < 1):
        raise UserError(f"planned_seeds={planned_seeds!r} is not a number of seeds; give 3 or more.", code="bad-value")
    if wandb.pop("reinit", None) != "create_new":
        finish()
    stem = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "").stem  # of the script
    experiment = experiment or wandb.pop("project", None) or (stem if stem and not stem.startswith("_") else "own")
    why, folder = why or wandb.pop("notes", None), runs or wandb.pop("dir", None)
    labels = [*tags, *(str(wandb.pop(name)) for name in ("name", "group", "job_type") if wandb.get(name))]
    tree = tree_of(config)
    sources = {key: source_of(key, sys.argv) for key, _ in dotted(tree)}

    rank = os.environ.get("RANK", "0")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank = str(distributed.get_rank())
    if mode == "disabled" or (rank.isdecimal() and int(rank) > 0):
        return _take(OwnRun(None, tree, sources))

    # A mirror that cannot be is a mistake of the call: before there is a run.
    mirrors = list(dict.fromkeys([mirror] if isinstance(mirror, str) else mirror))
    if mirrors:
        from rung.trackers.mirror import open_mirror, require

        for kind in mirrors:
            require(kind)
    if seed is None:  # what the configuration says, else what torch was seeded with; None where nobody has set one
        named = (value for key, value in dotted(tree) if key.rpartition(".")[2] in ("seed", "random_seed"))
        seed = said if isinstance(said := next(named, None), int) else torch_seed()
    root = (Path(folder) if folder else runs_folder()).expanduser()
    parent = getattr(parent, "id", parent) or None
    record = Record.create(
        root,
        str(experiment),
        recipe=RECIPE,
        preset=None,
        command=command_without_secrets(sys.argv),
        seed=seed,
        config=without_secrets(tree),
        sources=sources,
        derived={},
        data={},
        parent=None if parent is None else str(parent),
        why=None if why is None else str(why),
        tags=labels,
        code_root=(_code_root() if code else None) if isinstance(code, bool) else Path(code),
    )
    record.follow(Executed(record, command_without_secrets(sys.argv)))
    if planned_seeds is not None:
        record.update(planned_seeds=planned_seeds)
    run, here = OwnRun(record, tree, sources), Path.cwd()
    say(f"{record.id} in {record.path.relative_to(here) if record.path.is_relative_to(here) else record.path}")
    if ignored := [name for name, value in wandb.items() if value is not None]:
        run.tell(f"rung.init does not know {', '.join(f'{name}=' for name in ignored)}; ignored")
    if parent is not None:
        try:
            open_run(str(parent), root)
        except UserError as error:
            run.tell(f"parent={str(parent)!r}: {error}")
    if mirrors:
        written = Run(record.path, read_document(record.path))
        for kind in mirrors:
            opened = open_mirror(kind, record.path, written.document, written.config())
            record.follow(opened)
            say(opened.summary_line())
    return _take(run)


def current() -> OwnRun | None:
    """The run that was started last, while it trains."""
    return _open.run if _open.run is not None and _open.run.status in ("running", "disabled") else None


def needed() -> OwnRun:
    run = current()
    if run is None:
        raise UserError("there is no run; start one: rung.init(experiment=...).", code="no-run")
    return run


def log(data: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
    needed().log(data, step, **options)


def watch(model: Any, optimizer: Any = None, every: int = 20, **options: Any) -> None:
    needed().watch(model, optimizer, every, **options)


def define_metric(name: str, better: str | None = None, **definition: Any) -> None:
    needed().define_metric(name, better, **definition)


def finish(status: str | int | None = None, **options: Any) -> None:
    """Ends the current run, if there is one."""
    run, _open.run = _open.run, None
    if run is not None:
        run.finish(status, **options)


def _take(run: OwnRun) -> OwnRun:
    if _open.run is not None:
        _open.others.append(_open.run)
    _open.run, _open.known_error = run, getattr(sys, "last_value", None)
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    _note_exits()
    return run


def _at_exit() -> None:
    """Python keeps the error that ended a script; in a session the last one may be old and somebody else's."""
    error = getattr(sys, "last_value", None)
    is_session = hasattr(sys, "ps1") or "IPython" in sys.modules
    raised = None if is_session or error is _open.known_error else error
    for run in [*_open.others, *([] if _open.run is None else [_open.run])]:
        known = _open.exits
        if raised is None and known and not is_session and known["done"].get(id(run)) == run.out.num_done:
            run.end_by(SystemExit(known["code"]), known["failure"])
        else:
            run.end_by(raised)


def _note_exits() -> None:
    """Python does not tell at the end of a script that it exits with an error: whoever calls sys.exit or exit with a
    code is noted, and counts unless somebody catches it and the run goes on."""

    def note(code: Any) -> None:
        if not code or threading.current_thread() is not threading.main_thread():
            return
        runs = [*_open.others, *([] if _open.run is None else [_open.run])]
        done = {id(run): run.out.num_done for run in runs}
        _open.exits = {"code": code, "failure": failure_here(f"exit {code}"), "done": done}

    for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        exits = getattr(place, name, None)
        if exits is None or hasattr(exits, "_noted_by_rung"):
            continue

        @functools.wraps(exits, assigned=("__doc__", "__name__"), updated=())
        def noted(code: Any = None, /, exits: Any = exits) -> Any:
            with contextlib.suppress(Exception):
                note(code)
            return exits(code)

        noted._noted_by_rung = True  # type: ignore[attr-defined]
        setattr(place, name, noted)


def _code_root() -> Path:
    """The folder of the script where it lies below none that has nothing to do with it, else where we are."""
    script, here = getattr(sys.modules.get("__main__"), "__file__", None), Path.cwd()
    folder = Path(script).resolve().parent if script else here
    is_installed = is_of_python(folder) or folder.name == "bin"  # a profiler or a test runner runs the script
    return here if is_installed or folder.is_relative_to(here) else folder


def torch_seed() -> int | None:
    if "torch" not in sys.modules:
        return None
    seed = int(sys.modules["torch"].initial_seed())
    return seed if seed != UNSEEDED and seed < 2**63 else None
