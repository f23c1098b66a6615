"""`rung report`: the page of a run, or of a whole experiment, as Markdown or HTML. Works without torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from rung.cli.options import print_json, runs_option
from rung.errors import RunError, UserError
from rung.text import echo, write


@click.command("report", short_help="Write the page of a run, or of an experiment.")
@click.argument("target", required=False)
@click.option("--html", "html_file", is_flag=False, flag_value="", metavar="[FILE]",
              help="Write one HTML file with plots and samples in it instead; report.html, or FILE.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Write into this folder instead of beside the record.")  # fmt: skip
@click.option("--stdout", "is_stdout", is_flag=True, help="Print the page and write nothing.")
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print the paths that were written as JSON.")
def command(
    target: str | None, html_file: str | None, out: Path | None, is_stdout: bool, root: Path, as_json: bool
) -> None:
    """Write the page of TARGET from its record, and print where it is.

    TARGET is a run (piano/7, piano/last, piano/best, or its folder) or an experiment: `piano` is the page of all its
    runs. A page is report.md with loss.svg and lr.svg beside it, in the folder of the run or of the experiment; a run
    of one epoch or more also gets epochs.json. The same record gives the same page, byte for byte.

    \b
    Examples:
      rung report piano/7
      rung report piano
      rung report piano/best --html
      rung report piano/7 --html piano-7.html
      rung report piano/7 --stdout | less
    """
    from rung.compare.page import experiment_page, run_page
    from rung.files import write_whole
    from rung.report.blocks import markdown
    from rung.report.html import to_html
    from rung.runs.files import refused
    from rung.runs.query import experiments, list_runs, open_run

    if target is None and html_file:  # `rung report --html piano/7`: the word was meant as the target
        target, html_file = html_file, ""
    if target is None:
        raise UserError(
            "rung report needs a run such as piano/7, or an experiment such as piano (rung ls lists them).",
            code="missing-run",
        )
    is_html = html_file is not None
    file = (out or Path()) / html_file if html_file else None
    folder = file.parent if file is not None else out
    if (experiment := target.rstrip("/")) in experiments(root):
        problems: list[str] = []
        runs = list_runs(root, experiment, problems)
        report, home = experiment_page(experiment, runs, problems, folder), root / experiment
    else:
        run = open_run(target, root)
        report, home = run_page(run, folder, has_files=is_html), run.path
    text = to_html(report.page) if is_html else markdown(report.page)
    if is_stdout:
        write(sys.stdout, text)
        return

    # The page last, so that it never points to a file that is not there yet.
    folder = folder or home
    name = file.name if file is not None else "report.html" if is_html else "report.md"
    files = {**({} if is_html else report.files), name: text}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            if (folder / path).is_dir():
                message = f"{folder / path} is a folder; name another file or --out folder."
                raise RunError(message, code="bad-path")
            write_whole(folder / path, content.encode())
    except OSError as error:
        raise refused(f"{folder}{os.sep}{name}", error) from error
    paths = [folder / path for path in reversed(files)]
    if as_json:
        print_json([str(path) for path in paths])
    else:
        echo(paths[0])
