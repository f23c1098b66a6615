"""`rung ls`: the runs, one line each, with their true status.

Works without torch and numpy. A plain listing reads one small file per run; config keys and metrics are read when they
are asked for, out of derived files after the first time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rung.cli.options import print_json, runs_option
from rung.errors import RunError, UserError
from rung.report.table import age, loss_text, one_line, print_table, value_text
from rung.runs.fields import changed_keys, check_names, find, group_rows, sort_runs, summary, value_of
from rung.runs.query import ALL_STATUSES, Run
from rung.text import echo
from rung.units import size

_USUAL = ("status", "step", "loss", "age", "story")


@click.command("ls", short_help="List runs.")
@click.argument("experiments", nargs=-1, metavar="[EXPERIMENT]...")
@click.option("--status", "statuses", multiple=True, type=click.Choice(ALL_STATUSES), help="Only runs of this status.")
@click.option("--where", multiple=True, metavar="CONDITION",
              help="Only runs that fulfil it: NAME, one of = != < > <= >= ~ (a regular expression), VALUE. "
                   "NAME as for --columns. Several have to hold together.")  # fmt: skip
@click.option("--sort", metavar="NAME", help="Lowest first: best, last, created, min:METRIC, a config key ...")
@click.option("--reverse", is_flag=True, help="Highest first; with --sort.")
@click.option("--columns", metavar="A,B,..",
              help="What to show: fields, config keys, derived.NAME, min:METRIC, max:METRIC, last:METRIC.")  # fmt: skip
@click.option("--changed", is_flag=True, help="Show also the config keys that are not the same in all listed runs.")
@click.option("--group", is_flag=True, help="One line for runs that differ in their seed alone: mean, sd and number.")
@click.option("--tree", is_flag=True, help="Show each run below its parent, with what changed.")
@click.option("-n", "--last", "num_last", type=click.IntRange(min=1), help="Only the N runs that started last.")
@runs_option
@click.option("--remote", "url", is_flag=False, flag_value="", metavar="[URL]",
              help="List what is in object storage, at URL or $RUNG_REMOTE: runs and data sets.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all digits.")
def command(root: Path, as_json: bool, url: str | None, **asked: Any) -> None:
    """List runs, all of them or those of some EXPERIMENTs.

    The loss is that of the best eval; the step is the last that was logged. A run whose process is gone without a
    trace is shown as vanished, one on a machine that cannot be seen from here, and that gave no sign of life for 30
    seconds, as silent.

    \b
    Examples:
      rung ls
      rung ls piano --status running --status vanished
      rung ls --where "lr.learning_rate>1e-4" --where tag=baseline --where "why~accum"
      rung ls piano --sort min:loss --columns status,best,min:loss,lr.learning_rate
      rung ls piano --changed
      rung ls piano --group
      rung ls -n 5 --json
      rung ls piano --remote s3://bucket/lab
    """
    if url is not None:
        _remote(url, asked, as_json)
        return
    if asked["tree"] and asked["group"]:
        raise RunError("--tree and --group show runs in different ways; keep one.", code="options-conflict")
    problems: list[str] = []
    statuses, num_last = asked["statuses"], asked["num_last"]
    runs = find(root, asked["experiments"], asked["where"], problems=problems)
    runs = [run for run in runs if not statuses or run.status in statuses]
    if num_last is not None:
        newest = {id(run) for run in sorted(runs, key=lambda run: str(run.document.get("created")))[-num_last:]}
        runs = [run for run in runs if id(run) in newest]
    if asked["sort"]:
        runs = sort_runs(runs, asked["sort"], asked["reverse"])
    elif asked["reverse"]:
        runs.reverse()

    if asked["tree"] and as_json:
        print_json([{"id": run.id, "parent": run.document.get("parent")} for run in runs])
    elif asked["tree"]:
        from rung.compare.lineage import tree_lines

        for line in tree_lines(runs):
            echo(line)
    elif not runs and not as_json:
        echo(f"no {'such ' if statuses or asked['where'] else ''}runs under {root}")
    else:
        columns = _columns(runs, asked)
        if asked["group"]:
            names = [name for name in columns or ("best", "step") if name not in ("age", "story", "status")]
            _print_groups(runs, names, as_json)
        elif as_json:
            rows = []
            for run in runs:
                more = {name: value_of(run, name) for name in columns if name not in _SHOWN}
                rows.append({**summary(run), **({"columns": more} if more else {})})
            print_json(rows)
        else:
            _print_runs(runs, columns or list(_USUAL))
    for problem in problems:
        echo(problem, err=True)


def _columns(runs: Sequence[Run], asked: Mapping[str, Any]) -> list[str]:
    """The columns that were asked for; none: the usual ones."""
    names = [name.strip() for name in (asked["columns"] or "").split(",") if name.strip()]
    check_names([name for name in names if name not in _SHOWN], runs)
    if asked["sort"] and asked["sort"] not in (*names, "best", "loss", "created", "run", "id") and not names:
        names = [*_USUAL[:3], asked["sort"], *_USUAL[3:]]
    if asked["changed"] and len(runs) > 1:
        changed = [key for key in changed_keys(runs) if key not in names]
        names = [*(names or _USUAL[:3]), *changed, *([] if names else _USUAL[3:])]
    return names


def _print_runs(runs: Sequence[Run], columns: Sequence[str]) -> None:
    def is_numeric(name: str) -> bool:
        if name in _SHOWN:
            return name in ("step", "loss", "best")
        values = [value for run in runs if (value := value_of(run, name)) is not None]
        return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)

    rows = [
        [run.id, *(_SHOWN[name](run) if name in _SHOWN else value_text(value_of(run, name)) for name in columns)]
        for run in runs
    ]
    numeric = [i + 1 for i, name in enumerate(columns) if is_numeric(name)]
    keep = [0, *(i + 1 for i, name in enumerate(columns) if name in ("status", "loss", "best"))]
    print_table(["run", *("why" if name == "story" else name for name in columns)], rows, numeric, keep)


def _story(run: Run) -> str:
    document = run.document
    story = [f"from {document['parent']}" if document.get("parent") else "", one_line(document.get("why") or "")]
    return ": ".join(filter(None, story))


_SHOWN: dict[str, Callable[[Run], str]] = {
    "status": lambda run: run.status,
    "step": lambda run: "-" if run.step is None else str(run.step),
    "loss": lambda run: loss_text((run.best or {}).get("loss")),
    "best": lambda run: loss_text((run.best or {}).get("loss")),
    "age": lambda run: age(run.document.get("created")),
    "story": _story,
    "why": lambda run: one_line(run.document.get("why") or ""),
}


def _print_groups(runs: Sequence[Run], names: Sequence[str], as_json: bool) -> None:
    """One line per group: its runs, and mean, sd and n of each number; texts where all agree."""
    groups = group_rows(runs, names)
    if as_json:
        print_json(groups)
        return

    def spread(value: Any, num_runs: int) -> str:
        """mean ± sd; with the number of finite values where that is not the number of runs."""
        if not isinstance(value, dict) or "mean" not in value:
            return value_text(value)
        if value["mean"] is None:
            return "-"
        text = f"{value['mean']:.6g}" + ("" if value["sd"] is None else f" ± {value['sd']:.2g}")
        return text if value["n"] == num_runs else f"{text} (n {value['n']})"

    rows = []
    for group in groups:
        numbers: dict[str, list[str]] = {}  # each experiment is named once
        for ref in group["runs"]:
            numbers.setdefault(ref.rpartition("/")[0], []).append(ref.rpartition("/")[2])
        ids = [f"{name}/{','.join(found)}" for name, found in numbers.items()]
        rows.append([
            " ".join(ids), str(group["n"]), " ".join(dict.fromkeys(group["statuses"])),
            *(spread(group[name], group["n"]) for name in names), one_line(group["why"] or ""),
        ])  # fmt: skip
    print_table(["runs", "n", "status", *names, "why"], rows, [1, *range(3, 3 + len(names))], keep=range(4))


def _remote(url: str, asked: Mapping[str, Any], as_json: bool) -> None:
    """Runs and data sets at a place, by what their manifests say."""
    from rung.remote.bucket import Bucket
    from rung.remote.manifest import data_there, runs_there

    url = url or os.environ.get("RUNG_REMOTE", "")
    if not url:
        raise UserError("where? Add a URL, as in `rung ls --remote URL`, or set RUNG_REMOTE.", code="missing-url")
    if other := [name for name, value in asked.items() if value and name not in ("experiments", "statuses")]:
        raise UserError(
            f"--{other[0].removeprefix('num_')} looks at runs here; --remote takes EXPERIMENTs and --status.",
            code="options-conflict",
        )
    bucket, problems = Bucket(url), list[str]()
    runs = runs_there(bucket, asked["experiments"], problems)
    runs = [run for run in runs if not asked["statuses"] or run.document.get("status") in asked["statuses"]]
    data = [] if asked["experiments"] or asked["statuses"] else data_there(bucket, problems)
    if as_json:
        plain = {
            kind: [{**one.document, "name": one.name, "uid": one.uid, "bytes": one.num_bytes, "pushed": one.created,
                    "num_files": len(one.entries), "url": bucket.at(one.place)} for one in items]
            for kind, items in (("runs", runs), ("data", data))
        }  # fmt: skip
        print_json({"url": bucket.url, **plain})
    elif not runs and not data:
        echo(f"no runs and no data sets at {bucket.url}")
    if runs and not as_json:
        rows = []
        for run in runs:
            doc = run.document
            loss = loss_text(doc["best"].get("loss") if isinstance(doc.get("best"), dict) else None)
            cells = [run.name, value_text(doc.get("status")), value_text(doc.get("step")), loss, size(run.num_bytes)]
            rows.append([*cells, f"{age(run.created)} ago", one_line(doc.get("why") or "")])
        print_table(["run", "status", "step", "loss", "size", "pushed", "why"], rows, [2, 3, 4], keep=(0, 1, 3))
    if data and not as_json:
        rows = [[one.name, size(one.num_bytes), f"{age(one.created)} ago",
                 one_line(one.document.get("summary") or "")] for one in data]  # fmt: skip
        print_table(["data", "size", "pushed", "what"], rows, [1])
    for problem in problems:
        echo(problem, err=True)
