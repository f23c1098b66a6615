"""What a person sees of a sweep: its plan, how it goes, how it ended. Reads the record, changes nothing.

On a terminal a table that is kept up to date; elsewhere one line for each change of a point.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rung.cli.options import print_json
from rung.errors import UserError
from rung.report.table import loss_text, one_line, print_table, value_text
from rung.runs.metrics import last_row
from rung.runs.query import Run
from rung.sweep.plan import load
from rung.sweep.space import Point, Sweep
from rung.sweep.state import State, states
from rung.text import echo, write
from rung.units import duration

_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "stopped": "yellow", "lost": "magenta"}
MOST_LIVE = 40  # rows of the live table; the rest is counted below it


def print_first(sweep: Sweep, found: dict[str, State], is_quiet: bool) -> None:
    """One line on what is finished, what continues and what is new."""
    words = Counter(_plan_word(one) for one in found.values())
    counts = ", ".join(f"{num} {word}" for word, num in words.items()) or "to be found by a search"
    points = f"{len(sweep.points)} points: {counts}"
    echo(one_line(f"{sweep.name}: {points}; {sweep.recipe}, runs of {sweep.experiment}"), err=is_quiet)


def print_plan(sweep: Sweep, found: dict[str, State], as_json: bool) -> None:
    """The points before anything starts."""
    if as_json:
        print_end(sweep, found, as_json=True)
        return
    print_first(sweep, found, is_quiet=False)
    if sweep.points:
        names = _varied(sweep)
        rows = [[str(i), *_varies(one, names), _plan_word(found[one.key]), _note(found[one.key])]
                for i, one in enumerate(sweep.points)]  # fmt: skip
        print_table(["point", *names, "state", ""], rows, _numeric(sweep, names), keep=range(len(names) + 3))


def print_end(sweep: Sweep, found: dict[str, State], as_json: bool) -> None:
    """Every point with its state, run and best loss; over seeds mean and sd; and what to type next."""
    names, split = _varied(sweep), sweep.eval_split
    if as_json:
        points = []
        for i, one in enumerate(sweep.points):
            now, run = found[one.key], found[one.key].run
            row = {"number": i, "key": one.key, "varies": dict(one.varies), "words": list(one.words)}
            row |= {"state": now.word, "where": now.where, "text": now.text, "run": run.id if run else None}
            best = (run.best or {}).get("loss") if run else None
            row |= {"status": run.status if run else None, "step": run.step if run else None, "best_loss": best}
            points.append(row | ({"eval_loss": examined(run, split)} if split else {}))
        document = {"name": sweep.name, "recipe": sweep.recipe, "experiment": sweep.experiment, "points": points}
        print_json({**document, "over_seeds": over_seeds(sweep, found)})
        return
    rows = []
    for i, one in enumerate(sweep.points):
        now, run = found[one.key], found[one.key].run
        cells = [run.id, value_text(run.step), loss_text((run.best or {}).get("loss"))] if run else ["-", "-", "-"]
        more = [loss_text(examined(run, split))] if split else []
        # A failure is shown in full below the table.
        note = "" if now.word in ("failed", "finished") else _note(now)
        rows.append([str(i), *_varies(one, names), now.word, *cells, *more, note])
    head = ["point", *names, "state", "run", "step", "best loss", *([f"{split} loss"] if split else []), ""]
    after = len(names) + 3
    numeric = [*_numeric(sweep, names), after, after + 1, *([after + 2] if split else [])]
    print_table(head, rows, numeric, keep=[i for i in range(len(head)) if i != after])
    if groups := over_seeds(sweep, found):
        names = [name for name in names if name != "seed"]
        rows = []
        for group in groups:
            sd = "" if group["sd"] is None else f" ± {group['sd']:.2g}"
            spread = "-" if group["mean"] is None else f"{group['mean']:.4f}{sd}"
            rows.append([*(value_text(group["varies"].get(name)) for name in names), str(group["n"]), spread])
        echo()
        print_table([*names, "seeds", "best loss over seeds"], rows, keep=range(len(names) + 2))
    words = Counter(one.word for one in found.values())
    echo(f"\n{sweep.name}: " + (", ".join(f"{num} {word}" for word, num in words.items()) or "no points yet"))
    for one in sweep.points:
        if found[one.key].word == "failed":
            echo(f"{one_line(one.label)} failed: {found[one.key].text}")
    if words["finished"]:
        echo(f"compare them with `rung sweep report {sweep.name}`")


def over_seeds(sweep: Sweep, found: dict[str, State]) -> list[dict[str, Any]]:
    """Points that differ in their seed alone: mean and sd of the best loss of those that finished."""
    if "seed" not in _varied(sweep):
        return []
    groups: dict[str, dict[str, Any]] = {}
    for one in sweep.points:
        rest = {name: value for name, value in one.varies.items() if name != "seed"}
        group = groups.setdefault(json.dumps(rest, sort_keys=True, default=str), {"varies": rest, "losses": []})
        run = found[one.key].run
        loss = (run.best or {}).get("loss") if run is not None and found[one.key].word == "finished" else None
        if isinstance(loss, int | float) and math.isfinite(loss):
            group["losses"].append(float(loss))
    for group in groups.values():
        losses = group.pop("losses")
        group["n"] = len(losses)
        group["mean"] = statistics.fmean(losses) if losses else None
        group["sd"] = statistics.stdev(losses) if len(losses) > 1 else None
    return list(groups.values())


class Display:
    """How a sweep goes. Launchers call `report`."""

    def __init__(self, sweep: Sweep, found: dict[str, State], is_quiet: bool, is_live: bool = True) -> None:
        self._sweep, self._out = sweep, sys.stderr if is_quiet else sys.stdout
        self._is_live = is_live and self._out.isatty()
        self._names = {one.key: one.label for one in sweep.points}
        self._words = {key: (one.word, "") for key, one in found.items() if one.word in ("finished", "failed")}
        self._num_points = int((sweep.search or {}).get("trials", 20)) if sweep.search else len(sweep.points)
        self._live: Any = None

    def __enter__(self) -> Display:
        if self._is_live:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(file=self._out), get_renderable=self._table, refresh_per_second=1, transient=True
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def report(self, key: str, word: str, where: str) -> None:
        if self._words.get(key) == (word, where):
            return
        self._words[key] = word, where
        if self._live is None and word != "waiting":
            if key not in self._names:  # a point that a search has found since
                self._names = {one.key: one.label for one in load(self._sweep.folder).points}
            name = self._names.get(key, key)
            num_done = sum(one in ("finished", "failed") for one, _ in self._words.values())
            about = f" ({one_line(where)})" if where else ""
            write(self._out, f"{num_done}/{self._num_points}  {one_line(name)}  {word}{about}\n")
            self._out.flush()

    def _table(self) -> Any:
        """Called about once a second, from a thread of rich, which an error would end."""
        from rich.table import Table
        from rich.text import Text

        try:
            sweep = load(self._sweep.folder)
            found = states(sweep)
        except (OSError, UserError) as error:
            return one_line(error).replace("[", "\\[")
        names = _varied(sweep)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in ["point", *names, "state", "run", "step", "loss", "eta"]:
            table.add_column(head, no_wrap=True)
        first = [one for one in sweep.points if found[one.key].word in ("running", "lost", "failed")]
        rest = [one for one in sweep.points if one not in first]
        chosen = {one.key for one in [*first, *rest][:MOST_LIVE]}
        for i, one in enumerate(sweep.points):
            if one.key in chosen:
                now = found[one.key]
                cells = [str(i), *_varies(one, names), now.word, *_progress(now)]
                table.add_row(*[Text(cell, style=_STYLES.get(cell, "")) for cell in cells])
        if len(sweep.points) > MOST_LIVE:
            words = Counter(one.word for one in found.values())
            table.add_row(Text("all: " + ", ".join(f"{num} {word}" for word, num in words.items())))
        return table


def _progress(now: State) -> list[str]:
    """Run, step of how many, last loss, and the time that is left of one that is running."""
    run = now.run
    if run is None:
        return ["-", "-", "-", ""]
    total = (run.document.get("derived") or {}).get("num_steps")
    step = run.step
    row = (last_row(run.path / "metrics") or {}) if now.word == "running" else {}
    loss = row.get("loss", (run.best or {}).get("loss"))
    eta = ""
    if isinstance(total, int) and step is not None and row.get("step_s"):
        eta = duration((total - step - 1) * row["step_s"])
    return [run.id, "-" if step is None else f"{step}/{total}" if total else str(step), loss_text(loss), eta]


def examined(run: Run | None, split: str | None) -> float | None:
    """The loss of a run on a split, as the page of the sweep has it: over its groups where there are some."""
    from rung.compare.scaling.measured import MEAN_OF_GROUPS, reading, split_eval

    figures = split_eval(run, split) if run is not None and split is not None else None
    if run is None or figures is None:
        return None
    found = reading(run, f"{split}/{MEAN_OF_GROUPS if figures.get(MEAN_OF_GROUPS) else 'loss'}", from_split=True)
    return found.figure.value if found is not None else None


def _plan_word(now: State) -> str:
    words = {"waiting": "new", "stopped": "continues", "lost": "continues"}
    return "tried again" if now.word == "failed" and not now.is_final else words.get(now.word, now.word)


def _note(now: State) -> str:
    return now.run.id if now.word == "finished" and now.run is not None else one_line(now.text)


def _varied(sweep: Sweep) -> list[str]:
    return list(dict.fromkeys(name for one in sweep.points for name in one.varies))


def _varies(point: Point, names: Sequence[str]) -> list[str]:
    return [value_text(point.varies[name]) if name in point.varies else "" for name in names]


def _numeric(sweep: Sweep, names: Sequence[str]) -> list[int]:
    def is_number(name: str) -> bool:
        return all(isinstance(one.varies.get(name, 0), int | float) for one in sweep.points)

    return [0, *(i + 1 for i, name in enumerate(names) if is_number(name))]
