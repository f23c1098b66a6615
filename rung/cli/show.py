"""`rung show`: one run on one page, from the record alone. Works without torch and numpy."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.cli.options import print_json, runs_option
from rung.compare.as_json import changed, link_of, run_json
from rung.errors import RunError
from rung.report.table import Coloured, age, loss_text, one_line, paragraph, print_table, printable, value_text
from rung.runs.columns import Progress, Summary
from rung.runs.fields import verdict_word
from rung.runs.files import read_json
from rung.runs.paths import inside
from rung.runs.query import Run, open_run, ref
from rung.text import echo
from rung.units import plural, size

if TYPE_CHECKING:
    from rung.compare.lineage import Link

_NUM_LAST = 10  # notes, evals and events
_NUM_SAMPLES = 8
_USUAL = (
    "loss", "norm", "norm_clipped", "lr", "step_s", "wait_s", "mfu", "memory_mb", "rss_mb", "grad_ratio",
)  # fmt: skip
_BARS = "▁▂▃▄▅▆▇█"


@click.command("show", short_help="Show one run.")
@click.argument("run")
@runs_option
@click.option("--all", "has_all", is_flag=True, help="Show every metric, not only those that one looks for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: all evals and events, with all digits.")
def command(run: str, root: Path, has_all: bool, as_json: bool) -> None:
    """Show RUN: what came of it and what it changed; then its settings, evals, metrics, samples, checkpoints, events.

    RUN is piano/7, piano or piano/last for the latest, piano/best for the lowest eval loss, or a path.

    \b
    Examples:
      rung show piano/7
      rung show piano/best --all
      rung show runs/piano/7 --json
    """
    found = open_run(run, root)
    if as_json:
        print_json(run_json(found, _progress()))
        return
    _print_header(found)

    if notes := found.notes():
        echo(f"\nnotes ({_how_many(notes)})")
    for note in notes[-_NUM_LAST:]:
        try:
            when = datetime.fromtimestamp(float(note["unix_s"]), UTC).strftime("%Y-%m-%d %H:%M")
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            when = "?"
        for i, line in enumerate(str(note.get("text") or "").splitlines() or [""]):
            echo(f"  {when if i == 0 else '':<16}  {printable(line)}".rstrip())

    # Of the config only what somebody chose: a page of defaults hides the three keys that matter.
    sources, values = found.sources(), dict(_leaves(found.config()))
    rows = [[key, number(values.get(key)), source] for key, source in sources.items() if source != "default"]
    if rows:
        echo(f"\nconfig ({len(rows)} of {len(sources)} keys are not defaults)")
        print_table(["key", "value", "set by"], rows, keep=(0, 1))

    if evals := found.evals():
        shown = evals[-_NUM_LAST:]
        names = [name for event in shown for name in event if name not in ("step", "set") and is_number(event[name])]
        columns = sorted(dict.fromkeys(names), key=lambda name: (name != "loss", name != "loss_se"))
        best = found.best or {}
        rows = []
        for e in shown:
            figures = [value_text(e.get(name)) for name in columns]
            if columns[:1] == ["loss"]:
                is_best = (e["step"], e.get("set")) == (best.get("step"), best.get("set"))
                figures[0] = Coloured(loss_text(e.get("loss")), "green") if is_best else loss_text(e.get("loss"))
            rows.append([str(e["step"]), str(e.get("set", "")), *figures])
        echo(f"\nevals ({_how_many(evals)})")
        print_table(["step", "set", *columns], rows, numeric=(0, *range(2, len(columns) + 2)), keep=(0, 1, 2))

    # The newest closer look at each split and each model.
    newest = {event.get("file"): event for event in found.events("examined")}
    if newest:
        echo(f"\nlooked closer ({len(newest)})")
    for file, event in newest.items():
        try:
            sets = read_json(inside(found.path, str(file)))["sets"]
            texts = [f"{one_line(name)} {one['loss']:.4f} ± {one.get('se') or 0:.4f}" for name, one in sets.items()]
        except (OSError, ValueError, KeyError, TypeError, RunError):
            texts = ["cannot be read"]
        echo(paragraph(f"{one_line(event.get('weights'))}: {', '.join(texts)}  {printable(str(file))}", "  ", "    "))

    _print_metrics(found, has_all)

    samples, checkpoints = found.samples(), found.checkpoints()
    captions = {str(event.get("path")): event.get("caption") for event in found.events("sample")}
    if samples:
        echo(f"\nsamples ({len(samples)})")
    for path in samples[-_NUM_SAMPLES:]:
        name = path.relative_to(found.path).as_posix()
        first = (str(captions.get(name) or "").splitlines() or [""])[0]
        echo(paragraph(f"{printable(name)}  {one_line(first)}".rstrip(), "  ", "    "))
    if checkpoints:
        pinned = {str(step) for step in found.pinned()}
        names = [f"{name} (pinned)" if name.lstrip("0") in pinned or name in pinned else name for name in checkpoints]
        echo(f"\ncheckpoints ({len(checkpoints)}): {' '.join(names)}")
    echo(f"\non disk {size(found.disk_bytes())} in {found.path}")

    events = [event for event in found.events() if event.get("kind") not in ("eval", "sample", "note")]
    if events:
        echo(f"\nevents ({_how_many(events)})")
        rows = []
        for event in events[-_NUM_LAST:]:
            step = "-" if event.get("step") is None else str(event["step"])
            rows.append([step, str(event.get("kind")), _told(event)])
        print_table(["step", "kind", "what"], rows, numeric=(0,), keep=(0, 1, 2))

    is_ours = found.document.get("recipe") != "own loop" and not found.document.get("imported")
    if is_ours and found.status not in ("running", "finished"):
        name = ref(found.path, found.id)
        if checkpoints:
            echo(f"\nto continue: rung resume {name} (from step {checkpoints[-1]})")
        else:
            echo(f"\nnothing was saved; to start again: rung train --parent {name}")


def _print_header(run: Run) -> None:
    """The answer first: what came of it, against what, what was changed and why; then where it came from."""
    doc, best = run.document, run.best or {}
    recipe = one_line(" ".join(filter(None, [doc.get("recipe"), doc.get("preset")])))
    planned = (doc.get("derived") or {}).get("num_steps")
    steps = "" if run.step is None else f"  step {run.step}{f' of {number(planned)}' if planned else ''}"
    echo(printable(f"{run.id}  {recipe}  {run.status_text}{steps}"), bold=True)

    link = link_of(run)
    losses = [e.get("loss") for e in run.evals() if e.get("set") == best.get("set") and is_number(e.get("loss"))]
    curve = f"{sparkline(losses)}  {loss_text(losses[0])} to {loss_text(losses[-1])}" if len(losses) > 1 else ""
    verdict, ab = doc.get("verdict"), doc.get("ab")
    verdict_text = str(verdict.get("text") or "") if isinstance(verdict, dict) else ""
    arm = []
    if isinstance(ab, dict):
        changes = " ".join(map(str, ab.get("overrides") or []))
        arm = [f"{ab.get('arm')} of {ab.get('id')}", f"base {ab.get('base')}", changes]
    samples, derived = run.samples(), doc.get("derived") or {}
    command = [str(word) for word in doc.get("command") or []]
    command[:1] = [Path(word).name for word in command[:1]]  # where the program lay says nothing
    ended = f", ended {doc['ended']}" if doc.get("ended") else ""
    texts = {
        "reason": doc.get("reason"),
        "best": _best(run),
        "against": _against(run, link),
        "evals": curve,
        "change": changed(run, link),
        "why": doc.get("why"),
        "verdict": ": ".join(filter(None, [verdict_word(run), verdict_text])),
        "sample": samples[-1].relative_to(run.path).as_posix() if samples else "",
        "tags": " ".join(map(str, doc.get("tags") or [])),
        "ab": ", ".join(filter(None, arm)),
        "command": shlex.join(command),
        "started": f"{doc.get('created')} ({age(doc.get('created'))} ago){ended}, seed {doc.get('seed')}",
        "code": _code(doc.get("code") or {}),
        "versions": "  ".join(f"{name} {version}" for name, version in (doc.get("versions") or {}).items() if version),
        "derived": ", ".join(
            f"{name} {value_text(value)}" for name, value in derived.items() if not isinstance(value, dict | list)
        ),
    }
    for name, text in texts.items():
        if text:
            echo(paragraph(one_line(text), f"  {name:<9}", " " * 11))


def _best(run: Run) -> str:
    """The best eval, against what a trivial model loses on the same set."""
    best = run.best or {}
    if not best:
        return ""
    text = f"{best.get('set')} loss {loss_text(best.get('loss'))} at step {best.get('step')}"
    text += f", checkpoint {best['checkpoint']}" if best.get("checkpoint") else ""
    about = run.data().get(str(best.get("set")))
    baselines = about.get("baselines") if isinstance(about, dict) else None
    for name, loss in baselines.items() if isinstance(baselines, dict) else ():
        if is_number(loss) and is_number(best.get("loss")) and math.isfinite(gap := best["loss"] - loss):
            text += f"; {abs(gap):.4f} {'above' if gap > 0 else 'below'} {name} ({loss_text(loss)})"
    return text


def _against(run: Run, link: Link | None) -> str:
    """The best eval beside that of the parent. One pair gives a difference and no verdict."""
    if link is None or link.parent is None or not run.best or not link.parent.best:
        return ""
    mine, other = run.best, link.parent.best
    if mine.get("set") != other.get("set") or not (is_number(mine.get("loss")) and is_number(other.get("loss"))):
        return ""
    if any(change.weight == "metric" for change in link.changes):
        return f"{link.parent.id} {loss_text(other['loss'])}, which counts something else"
    text = f"{link.parent.id} {loss_text(other['loss'])}"
    gap = mine["loss"] - other["loss"]
    return f"{text}: {gap:+.4f}, one pair and no verdict" if math.isfinite(gap) else text


def _code(code: Mapping[str, Any]) -> str:
    if code.get("kind") == "git":
        changed = code.get("num_changed", len(code.get("changed") or []))
        head = str(code.get("head") or "no commit")[:12]
        state = f"{head} with {changed} file{'s' if changed != 1 else ''} changed" if code.get("dirty") else head
        text = f"{state}, kept as {code.get('ref')}"
    elif code.get("kind") == "tar":
        text = f"{plural(code.get('num_files') or 0, 'file')} of {code.get('root')} in {code.get('file')}"
    else:
        text = "not kept"
    left_out = code.get("left_out") or []
    text += f"; left out: {', '.join(left_out[:3])}{' ...' if len(left_out) > 3 else ''}" if left_out else ""
    because = code.get("warning") or code.get("reason")
    return f"{text} ({because})" if because else text


def _told(event: Mapping[str, Any]) -> str:
    """What an event says, in a line; what it holds in lists is counted."""
    if event.get("kind") == "check" and isinstance(event.get("results"), list):
        results = [one for one in event["results"] if isinstance(one, dict)]
        bad = [f"{one.get('level')} {one.get('name')}" for one in results if one.get("level") in ("warn", "fail")]
        passed = sum(one.get("level") == "pass" for one in results)
        return "; ".join([f"{passed} of {len(results)} checks passed", *bad])
    texts = []
    for name, value in event.items():
        if name not in ("kind", "step", "unix_s", "segment") and value is not None and value != "":
            held = f"({len(value)})" if isinstance(value, dict | list) else value_text(value)
            texts.append(f"{name} {held}" if len(event) > 5 or name != "text" else held)
    return ", ".join(texts)


def _how_many(things: Sequence[Any]) -> str:
    return f"all {len(things)}" if len(things) <= _NUM_LAST else f"last {_NUM_LAST} of {len(things)}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")


def sparkline(values: Sequence[Any]) -> str:
    """A curve as one line of text; x where a value is not finite."""
    numbers = [float(value) for value in values if is_number(value)][-60:]
    finite = [value for value in numbers if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] if math.isfinite(v) else "x" for v in numbers)


def _print_metrics(run: Run, has_all: bool) -> None:
    """What the evals above do not show: the few that one looks for, or all."""
    found = {name: one for name, one in run.summary(_progress()).items() if not name.startswith("eval/")}
    if not found:
        return
    parts = {name.rpartition("/")[2] for event in run.evals() for name in event}

    def is_usual(name: str, one: Summary) -> bool:
        return name in _USUAL or name in parts or bool(one.num_non_finite) or (name == "skipped" and one.max != 0)

    # What one looks for comes first, what was asked of the model now and then comes last.
    last = {"look": 101, "logits": 101, "probe": 102}
    ordered = sorted(found, key=lambda n: _USUAL.index(n) if n in _USUAL else last.get(n.partition("/")[0], 100))
    shown = [name for name in ordered if has_all or is_usual(name, found[name])] or ordered[:10]
    echo(f"\nmetrics ({len(shown)} of {len(found)})" if len(shown) < len(found) else f"\nmetrics ({len(found)})")
    has_bad = any(found[name].num_non_finite for name in shown)

    def figure(value: float | None, is_whole: bool) -> str:
        return "-" if value is None else str(int(value)) if is_whole and math.isfinite(value) else value_text(value)

    rows = []
    for name in shown:
        one = found[name]
        ends = [(one.min, one.min_step), (one.max, one.max_step)]
        cells = [text for value, step in ends for text in (figure(value, one.is_whole), value_text(step))]
        bad = [str(one.num_non_finite)] if has_bad else []
        rows.append([name, figure(one.last, one.is_whole), *cells, str(one.count), *bad])
    head = ["metric", "last", "min", "at", "max", "at", "values", *(["not finite"] if has_bad else [])]
    print_table(head, rows, numeric=range(1, len(head)), keep=(0, 1))
    if len(shown) < len(found):
        echo(f"{len(found) - len(shown)} more: rung show {ref(run.path, run.id)} --all")


def _progress() -> Progress | None:
    """Shows a person how far the first reading of a long run is; nobody else."""
    if not sys.stderr.isatty():
        return None

    def report(done: int, total: int) -> None:
        if total > 50e6:
            echo(f"\rreading {size(total)} of rows {100 * done // total} %\033[K", nl=done >= total, err=True)

    return report


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any) -> str:
    """A value with all its digits."""
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value).replace("nan", "NaN")
    if value is None:
        return "-"
    if isinstance(value, list):
        return "[" + ", ".join(number(v) for v in value) + "]"
    return one_line(value)
