"""`rung diff`: what differs between two runs, whether that was one change, and what happened. Works without torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.cli.options import print_json, runs_option
from rung.report.table import Coloured, paragraph, print_table
from rung.runs.files import to_json
from rung.runs.query import open_run
from rung.text import echo, one_line, visible
from rung.units import count

if TYPE_CHECKING:
    from rung.compare.align import Outcome, Shared
    from rung.compare.factors import Comparison, Difference, Strictness

SHORT_PATCH = 40  # changed lines that are shown without being asked for
NUM_FILES = 20
NUM_ROWS = 8
_WORDS = {"hidden": "confounder", "metric": "other metric"}
_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


@click.command("diff", short_help="Say what differs between two runs.")
@click.argument("a")
@click.argument("b")
@click.option("--metric", help="The metric to compare by, such as full_val/loss; default: that of the best eval of A.")
@click.option("--patch", is_flag=True, help="Show the whole change of the code, however long.")
@click.option("--stat", is_flag=True, help="Of the code show only which files changed, all of them.")
@click.option("--allow", "allowed", multiple=True, metavar="NAME",
              help="Do not count it as a confounder: seed, code, environment, packages, a key, ...")  # fmt: skip
@click.option("--declare", "declared", metavar="NAME", help="What was changed on purpose, if not a config key: code.")
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the whole patch and all digits.")
def command(
    a: str, b: str, metric: str | None, patch: bool, stat: bool, allowed: tuple[str, ...], declared: str | None,
    root: Path, as_json: bool,
) -> None:  # fmt: skip
    """Say what changed from run A to run B: config, code, data, environment, seed, budget, meaning of the metrics.

    It is a strict A/B when exactly one thing was changed on purpose, and nothing else that was recorded differs and
    could matter. The code of a run is what it executed, wherever it lies. The last line says what was not looked at. A
    and B are piano/7, piano/best or a path.

    \b
    Examples:
      rung diff piano/6 piano/7
      rung diff piano/6 piano/7 --patch
      rung diff piano/6 piano/7 --declare code --allow packages
      rung diff piano/6 other/runs/piano/6 --metric full_val/note_on --json
    """
    from rung.compare.align import outcome
    from rung.compare.as_json import diff_json
    from rung.compare.factors import compare, strictness

    runs = open_run(a, root), open_run(b, root)
    # What to call the two: their ids, or their paths where two folders have a run of one id.
    both = [run.id if runs[0].id != runs[1].id else str(run.path) for run in runs]
    names = shown(both[0], 200), shown(both[1], 200)
    for run, name in zip(runs, names):
        run.id = name  # so that every sentence says which of two namesakes it is about
    comparison = compare(*runs)
    strict = strictness(comparison, allowed, declared)
    happened = outcome(comparison.a, comparison.b, metric)
    if as_json:
        print_json(diff_json(comparison, strict, happened))
        return
    for run, name in zip(runs, names):
        parent = f"  from {shown(run.document['parent'])}" if run.document.get("parent") else ""
        why = f"  why: {shown(str(run.document['why']), 200)}" if run.document.get("why") else ""
        step = "nothing logged" if run.step is None else f"step {run.step}"
        echo(f"{name}  {shown(run.status, 200)}, {step}{parent}{why}")
    echo(paragraph(shown(strict.words, 2000)), bold=True)
    for note in comparison.notes:
        echo(paragraph(shown(note, 400)))

    rows = []
    for one in [one for one in comparison.differences if one.part == "config"]:
        before = "(absent)" if one.source_before == "absent" else shown(one.before)
        after = "(absent)" if one.source_after == "absent" else shown(one.after)
        sources = dict.fromkeys(shown(s) for s in (one.source_before, one.source_after) if s)
        detail = shown(one.detail, 200)
        rows.append([shown(one.name), before, after, _weight(one, strict), " -> ".join(sources), detail])
    echo("\nconfig" if rows else "\nconfig: the same")
    if rows:
        head = ["key", *names, "what it is", "set by", "detail"]
        width = len(head) if any(row[-1] for row in rows) else len(head) - 1
        print_table(head[:width], [row[:width] for row in rows], keep=(0, 1, 2, 3))

    _print_code(comparison, strict, "all" if patch else "none" if stat else "short")

    rows = []
    for one in [one for one in comparison.differences if one.part not in ("config", "code")]:
        is_tree = isinstance(one.before, dict | list) or isinstance(one.after, dict | list)
        values = ["", ""] if is_tree or one.before == one.after else [shown(one.before), shown(one.after)]
        rows.append([one.part, shown(one.name), *values, _weight(one, strict), shown(one.detail, 300)])
    if rows:
        echo("\nconditions")
        print_table(["part", "what", *names, "what it is", "detail"], rows, keep=range(5))
    if comparison.same:
        echo("\n" + paragraph(f"the same: {shown('; '.join(comparison.same), 1000)}"))

    _print_outcome(happened, names)
    echo("\n" + paragraph(f"not looked at: {shown('; '.join(comparison.unknown), 1000)}"))


def shown(value: Any, most: int = 60) -> str:
    """A value as one line of text, without characters that a terminal would obey."""
    text = value if isinstance(value, str) else to_json(value).decode()
    text = one_line(text.encode("utf-8", "backslashreplace").decode())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _weight(difference: Difference, strict: Strictness) -> str:
    if difference in strict.allowed:
        return "allowed"
    if difference.weight in _WORDS and difference not in strict.confounders:
        return "factor"  # declared by name
    return _WORDS.get(difference.weight, difference.weight)


def _print_code(comparison: Comparison, strict: Strictness, how: str) -> None:
    """`how`: all of the patch, short (all of a short one, the head of a long one) or none of it."""
    code = comparison.code
    changes = [one for one in comparison.differences if one.part == "code"][: len(code.files)]
    if code.problem:
        echo("\n" + paragraph(f"code: unknown, {shown(code.problem, 600)}"))
    elif not code.files:
        echo("\ncode: the same" + (", as far as it was executed" if code.is_executed else ""))
    else:
        echo(f"\ncode ({len(code.files)} file{'s' if len(code.files) != 1 else ''})")
        listed = changes if how != "short" else changes[:NUM_FILES]
        print_table(["file", "lines", "what it is"], [
            [shown(one.name, 100), shown(one.detail, 200), _weight(one, strict)] for one in listed
        ])  # fmt: skip
        if len(changes) > len(listed):
            echo(f"and {len(changes) - len(listed)} more (--stat lists all)")
    for note in code.notes:
        echo(paragraph(shown(note, 600)))
    if not code.patch or how == "none":
        return
    lines = code.patch.removesuffix("\n").split("\n")
    heads = ("+++ ", "--- ")
    changed = [i for i, line in enumerate(lines) if line.startswith(("+", "-")) and not line.startswith(heads)]
    end = len(lines) if how == "all" or len(changed) <= SHORT_PATCH else changed[SHORT_PATCH]
    echo()
    for line in lines[:end]:
        # A carriage return is a difference too; `visible` takes it for a line end.
        text = visible(line.replace("\r", "\u240d").encode("utf-8", "backslashreplace").decode())
        echo(" ".join(text.split("\n")), fg=_COLOURS.get(line[:1]))
    if end < len(lines):
        echo(f"... {len(changed) - SHORT_PATCH} of {len(changed)} changed lines are not shown: --patch")


def _print_outcome(happened: Outcome, names: tuple[str, str]) -> None:
    better = "lower" if happened.is_lower_better else "higher"
    echo(f"\nwhat happened: {shown(happened.metric)} ({better} is better)")
    sides, rows = (happened.a, happened.b), []
    for what in ("final", "best"):
        points = [getattr(side, what) for side in sides]
        cells = ["-" if point is None else f"{_figure(point.value)} at {point.step:.0f}" for point in points]
        change = "" if None in points else _change(points[1].value - points[0].value, happened.is_lower_better)
        rows.append([what, *cells, change])
    speeds = ["-" if side.steps_per_s is None else f"{side.steps_per_s:.3g} steps/s" for side in sides]
    for i, side in enumerate(sides):
        if side.targets_per_s is not None:
            speeds[i] = f"{count(side.targets_per_s)} targets/s"
    rates = [[getattr(side, name) for side in sides] for name in ("targets_per_s", "steps_per_s")]
    ratios = [f"{b / a:.2f}x" for a, b in rates if a is not None and b is not None]
    rows.append(["speed", *speeds, next(iter(ratios), "")])
    rows.append(["targets", *("-" if side.targets is None else count(side.targets) for side in sides), ""])
    print_table(["", *names, "B - A"], rows, numeric=(1, 2, 3))
    pairs = [[(shared.step, shared.b) for shared in points] for points in (happened.at_steps, happened.at_targets)]
    is_twice = pairs[0] == pairs[1]
    title = "at equal steps, which are equal targets" if is_twice else "at equal steps"
    _print_curves(title, "step", happened.at_steps, names, happened.is_lower_better)
    if not is_twice:
        title = f"at equal targets, {names[1]} between its evals"
        _print_curves(title, "targets", happened.at_targets, names, happened.is_lower_better)
    for problem in happened.problems:
        echo(paragraph(shown(problem, 400)))


def _print_curves(title: str, head: str, points: list[Shared], names: tuple[str, str], is_lower_better: bool) -> None:
    if not points:
        return
    last = len(points) - 1
    evenly = sorted({round(i * last / (NUM_ROWS - 1)) for i in range(NUM_ROWS)})
    picked = evenly if last >= NUM_ROWS else range(last + 1)
    echo(f"\n{title}" + (f" ({len(picked)} of {len(points)})" if len(picked) < len(points) else ""))
    rows = [
        [f"{p.at:.0f}", _figure(p.a), _figure(p.b), _change(p.b - p.a, is_lower_better)]
        for p in (points[i] for i in picked)
    ]
    print_table([head, *names, "B - A"], rows, numeric=(0, 1, 2, 3))


def _change(value: float, is_lower_better: bool) -> str:
    text = _figure(value, "+.3g")
    return Coloured(text, "green" if (value < 0) == is_lower_better else "red") if value else text


def _figure(value: float, form: str = "") -> str:
    if not math.isfinite(value):
        return str(value).replace("nan", "NaN")
    return format(value, form or (".4f" if 1e-3 <= abs(value) < 1e5 or value == 0 else ".4g"))
