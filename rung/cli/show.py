"""`rung show`: one run on one page, from the record alone. Works without torch and numpy."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from rung.cli.ls import age, print_table, summary
from rung.runs.files import to_json
from rung.runs.query import Run, open_run, ref
from rung.units import size

_NUM_EVALS = 10
_NUM_EVENTS = 10
_NUM_SAMPLES = 8


@click.command("show", short_help="Show one run.")
@click.argument("run")
@click.option("--runs", "root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
              type=click.Path(path_type=Path), help="Folder of the runs.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON: all evals and events, with all digits.")
def command(run: str, root: Path, as_json: bool) -> None:
    """Show RUN: what it was, how it stands, its last evals, samples, checkpoints and events.

    RUN is piano/7, piano or piano/last for the latest, piano/best for the lowest eval loss, or a path.

    \b
    Examples:
      rung show piano/7
      rung show piano/best
      rung show runs/piano/7 --json
    """
    found = open_run(run, root)
    if as_json:
        click.echo(to_json(_everything(found)).decode())
        return
    for part in (_header, _config, _evals, _files, _events):
        part(found)
    _resume(found)


def _everything(run: Run) -> dict[str, Any]:
    return {
        **run.document,
        **summary(run),
        "config": run.config(),
        "sources": run.sources(),
        "data": run.data(),
        "environment": run.environment(),
        "evals": run.evals(),
        "events": list(run.events()),
        "samples": [path.relative_to(run.path).as_posix() for path in run.samples()],
        "checkpoints": run.checkpoints(),
        "disk_bytes": run.disk_bytes(),
    }


def _header(run: Run) -> None:
    doc = run.document
    recipe = " ".join(filter(None, [doc.get("recipe"), doc.get("preset")]))
    click.echo(f"{run.id}  {recipe}  {run.status_text}")
    versions = "  ".join(f"{name} {version}" for name, version in (doc.get("versions") or {}).items() if version)
    best = run.best
    lines = {
        "from": doc.get("parent"),
        "why": doc.get("why"),
        "verdict": doc.get("verdict"),
        "tags": " ".join(doc.get("tags") or []),
        "command": shlex.join(map(str, doc.get("command") or [])),
        "started": f"{doc.get('created')} ({age(doc.get('created'))} ago), seed {doc.get('seed')}",
        "ended": doc.get("ended"),
        "step": None if run.step is None else str(run.step),
        "reason": doc.get("reason"),
        "best": None if best is None else _best(best),
        "versions": versions,
        "code": _code(doc.get("code") or {}),
    }
    for name, text in lines.items():
        if text:
            click.echo(f"  {name:<9}{text}")
    derived = {name: value for name, value in (doc.get("derived") or {}).items() if not isinstance(value, dict | list)}
    if derived:
        text = ", ".join(f"{name} {number(value)}" for name, value in derived.items())
        click.echo(textwrap.fill(text, 118, initial_indent=f"  {'derived':<9}", subsequent_indent=" " * 11))


def _best(best: Mapping[str, Any]) -> str:
    words = [f"loss {number(best.get('loss'))} on {best.get('set')} at {best.get('step')}"]
    if best.get("checkpoint"):
        words.append(f"checkpoint {best['checkpoint']}")
    return ", ".join(words)


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


def _config(run: Run) -> None:
    """Only what somebody chose: a page of defaults hides the three keys that matter."""
    sources = run.sources()
    values = dict(_leaves(run.config()))
    rows = [[key, number(values.get(key)), source] for key, source in sources.items() if source != "default"]
    if rows:
        click.echo(f"\nconfig ({len(rows)} of {len(sources)} keys are not defaults)")
        print_table(["key", "value", "set by"], rows)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")


def _evals(run: Run) -> None:
    evals = run.evals()
    if not evals:
        return
    shown = evals[-_NUM_EVALS:]
    names = [name for event in shown for name in event if name not in ("step", "set") and _is_number(event[name])]
    columns = sorted(dict.fromkeys(names), key=lambda name: name != "loss")
    rows = [[str(e["step"]), str(e.get("set", "")), *(number(e.get(name)) for name in columns)] for e in shown]
    click.echo(f"\nevals ({'all' if len(shown) == len(evals) else f'last {len(shown)} of'} {len(evals)})")
    print_table(["step", "set", *columns], rows, numeric=(0, *range(2, len(columns) + 2)))


def _files(run: Run) -> None:
    samples, checkpoints = run.samples(), run.checkpoints()
    captions = {event.get("path"): event.get("caption") for event in run.events("sample")}
    if samples:
        click.echo(f"\nsamples ({len(samples)})")
        for path in samples[-_NUM_SAMPLES:]:
            name = path.relative_to(run.path).as_posix()
            first = (str(captions.get(name) or "").splitlines() or [""])[0]
            click.echo(f"  {name}  {first}".rstrip())
    if checkpoints:
        click.echo(f"\ncheckpoints ({len(checkpoints)}): {' '.join(checkpoints)}")
    click.echo(f"\non disk {size(run.disk_bytes())} in {run.path}")


def _events(run: Run) -> None:
    events = [event for event in run.events() if event.get("kind") not in ("eval", "sample")]
    if not events:
        return
    click.echo(f"\nevents ({'all' if len(events) <= _NUM_EVENTS else f'last {_NUM_EVENTS} of'} {len(events)})")
    rows = []
    for event in events[-_NUM_EVENTS:]:
        fields = {name: value for name, value in event.items() if name not in ("kind", "step", "unix_s", "segment")}
        text = "  ".join(f"{name} {number(value)}" for name, value in fields.items() if value is not None)
        step = "-" if event.get("step") is None else str(event["step"])
        rows.append([step, str(event.get("kind")), text if len(text) <= 200 else f"{text[:197]}..."])
    print_table(["step", "kind", "what"], rows, numeric=(0,))


def _resume(run: Run) -> None:
    if run.status in ("running", "finished"):
        return
    name = ref(run.path, run.id)
    if run.checkpoints():
        click.echo(f"\nto go on: rung resume {name} (goes on from {run.checkpoints()[-1]})")
    else:
        click.echo(f"\nnothing was saved; to start again: rung train --from {name}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any) -> str:
    """A value with all its digits."""
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value).replace("nan", "NaN")
    if value is None:
        return "-"
    if isinstance(value, list):
        return "[" + ", ".join(number(v) for v in value) + "]"
    return " ".join(str(value).split())
