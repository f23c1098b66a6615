"""`rung show`: one run on one page, from the record alone. Works without torch and numpy."""

from __future__ import annotations

import math
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from rung.cli.ls import summary
from rung.cli.options import print_json, runs_option
from rung.errors import RunError
from rung.report.table import age, one_line, print_table, printable
from rung.runs.columns import Progress
from rung.runs.fields import verdict_word
from rung.runs.files import read_json
from rung.runs.paths import inside
from rung.runs.query import Run, open_run, ref
from rung.text import echo
from rung.units import size

_NUM_LAST = 10  # notes, evals and events
_NUM_SAMPLES = 8
_BARS = "▁▂▃▄▅▆▇█"


@click.command("show", short_help="Show one run.")
@click.argument("run")
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON: all evals and events, with all digits.")
def command(run: str, root: Path, as_json: bool) -> None:
    """Show RUN: what it was, what it changed, how it stands, its metrics, evals, notes, samples, checkpoints, events.

    RUN is piano/7, piano or piano/last for the latest, piano/best for the lowest eval loss, or a path.

    \b
    Examples:
      rung show piano/7
      rung show piano/best
      rung show runs/piano/7 --json
    """
    found = open_run(run, root)
    if as_json:
        document = {
            **found.document,
            **summary(found),
            "config": found.config(),
            "sources": found.sources(),
            "data": found.data(),
            "environment": found.environment(),
            "metrics": {name: msgspec.to_builtins(one) for name, one in found.summary(_progress()).items()},
            "evals": found.evals(),
            "notes": found.notes(),
            "pinned": found.pinned(),
            "changed": _changed(found),
            "events": list(found.events()),
            "samples": [path.relative_to(found.path).as_posix() for path in found.samples()],
            "checkpoints": found.checkpoints(),
            "disk_bytes": found.disk_bytes(),
        }
        print_json(document)
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
        print_table(["key", "value", "set by"], rows)

    if evals := found.evals():
        shown = evals[-_NUM_LAST:]
        names = [name for event in shown for name in event if name not in ("step", "set") and is_number(event[name])]
        columns = sorted(dict.fromkeys(names), key=lambda name: name != "loss")
        rows = [[str(e["step"]), str(e.get("set", "")), *(number(e.get(name)) for name in columns)] for e in shown]
        echo(f"\nevals ({_how_many(evals)})")
        print_table(["step", "set", *columns], rows, numeric=(0, *range(2, len(columns) + 2)))
        for name in dict.fromkeys(str(event.get("set")) for event in evals) if sys.stdout.isatty() else ():
            losses = [event.get("loss") for event in evals if str(event.get("set")) == name]
            echo(f"{one_line(name)} loss  {sparkline(losses)}")

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
        echo(f"  {one_line(event.get('weights'))}: {', '.join(texts)}  {printable(str(file))}")

    _print_metrics(found)

    samples, checkpoints = found.samples(), found.checkpoints()
    captions = {str(event.get("path")): event.get("caption") for event in found.events("sample")}
    if samples:
        echo(f"\nsamples ({len(samples)})")
    for path in samples[-_NUM_SAMPLES:]:
        name = path.relative_to(found.path).as_posix()
        first = (str(captions.get(name) or "").splitlines() or [""])[0]
        echo(f"  {printable(name)}  {one_line(first)}".rstrip())
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
            fields = {name: value for name, value in event.items() if name not in ("kind", "step", "unix_s", "segment")}
            text = "  ".join(f"{name} {number(value)}" for name, value in fields.items() if value is not None)
            step = "-" if event.get("step") is None else str(event["step"])
            rows.append([step, str(event.get("kind")), text if len(text) <= 200 else f"{text[:197]}..."])
        print_table(["step", "kind", "what"], rows, numeric=(0,))

    is_ours = found.document.get("recipe") != "own loop" and not found.document.get("imported")
    if is_ours and found.status not in ("running", "finished"):
        name = ref(found.path, found.id)
        if checkpoints:
            echo(f"\nto continue: rung resume {name} (from step {checkpoints[-1]})")
        else:
            echo(f"\nnothing was saved; to start again: rung train --from {name}")


def _print_header(run: Run) -> None:
    doc = run.document
    recipe = one_line(" ".join(filter(None, [doc.get("recipe"), doc.get("preset")])))
    echo(printable(f"{run.id}  {recipe}  {run.status_text}"))
    versions = "  ".join(f"{name} {version}" for name, version in (doc.get("versions") or {}).items() if version)
    best, ab, verdict = run.best or {}, doc.get("ab"), doc.get("verdict")
    best_at = f"loss {number(best.get('loss'))} on {best.get('set')} at {best.get('step')}" if best else ""
    verdict_text = str(verdict.get("text") or "") if isinstance(verdict, dict) else ""
    arm = []
    if isinstance(ab, dict):
        changes = " ".join(map(str, ab.get("overrides") or []))
        arm = [f"{ab.get('arm')} of {ab.get('id')}", f"base {ab.get('base')}", changes]
    lines = {
        "from": " ".join(filter(None, [str(doc.get("parent") or ""), _changed(run)])),
        "why": doc.get("why"),
        "verdict": ": ".join(filter(None, [verdict_word(run), verdict_text])),
        "tags": " ".join(map(str, doc.get("tags") or [])),
        "ab": ", ".join(filter(None, arm)),
        "command": shlex.join(map(str, doc.get("command") or [])),
        "started": f"{doc.get('created')} ({age(doc.get('created'))} ago), seed {doc.get('seed')}",
        "ended": doc.get("ended"),
        "step": None if run.step is None else str(run.step),
        "reason": doc.get("reason"),
        "best": f"{best_at}, checkpoint {best['checkpoint']}" if best.get("checkpoint") else best_at,
        "versions": versions,
        "code": _code(doc.get("code") or {}),
    }
    for name, text in lines.items():
        if text:
            echo(f"  {name:<9}{one_line(text)}")
    derived = {name: value for name, value in (doc.get("derived") or {}).items() if not isinstance(value, dict | list)}
    if derived:
        text = ", ".join(f"{name} {number(value)}" for name, value in derived.items())
        echo(textwrap.fill(printable(text), 118, initial_indent=f"  {'derived':<9}", subsequent_indent=" " * 11))


def _changed(run: Run) -> str:
    """What changed against the parent, in one line; in brackets why it is not known."""
    if not run.document.get("parent"):
        return ""
    from rung.compare.lineage import find_parent, short_change

    try:
        link = find_parent(run)
        link.has_rows = False  # for one line they need not be read
        text = short_change(link)
    except (RunError, OSError) as error:
        return f"({error})"
    return text or (f"({link.problem})" if link.problem else "")


def _code(code: Mapping[str, Any]) -> str:
    if code.get("kind") == "git":
        changed = code.get("num_changed", len(code.get("changed") or []))
        head = str(code.get("head") or "no commit")[:12]
        state = f"{head} with {changed} file{'s' if changed != 1 else ''} changed" if code.get("dirty") else head
        text = f"{state}, kept as {code.get('ref')}"
    elif code.get("kind") == "tar":
        text = f"{code.get('num_files')} files of {code.get('root')} in {code.get('file')}"
    else:
        text = "not kept"
    left_out = code.get("left_out") or []
    text += f"; left out: {', '.join(left_out[:3])}{' ...' if len(left_out) > 3 else ''}" if left_out else ""
    because = code.get("warning") or code.get("reason")
    return f"{text} ({because})" if because else text


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


def _print_metrics(run: Run) -> None:
    """What the evals above do not show."""
    found = {name: one for name, one in run.summary(_progress()).items() if not name.startswith("eval/")}
    if not found:
        return
    echo(f"\nmetrics ({len(found)})")
    has_bad = any(one.num_non_finite for one in found.values())
    rows = []
    # What one looks for comes first, what was asked of the model now and then comes last.
    first, last = {"loss": 0, "norm": 1, "norm_clipped": 2, "lr": 3}, {"look": 5, "logits": 5, "probe": 6}

    def figure(value: float | None, is_whole: bool) -> str:
        if value is None or (is_whole and math.isfinite(value)):
            return "-" if value is None else str(int(value))
        return f"{value:.6g}" if math.isfinite(value) else number(float(value))

    for name, one in sorted(found.items(), key=lambda item: first.get(item[0], last.get(item[0].partition("/")[0], 4))):
        ends = [(one.min, one.min_step), (one.max, one.max_step)]
        cells = [text for value, step in ends for text in (figure(value, one.is_whole), number(step))]
        bad = [str(one.num_non_finite)] if has_bad else []
        rows.append([name, figure(one.last, one.is_whole), *cells, str(one.count), *bad])
    head = ["metric", "last", "min", "at", "max", "at", "values", *(["not finite"] if has_bad else [])]
    print_table(head, rows, numeric=range(1, len(head)))


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
