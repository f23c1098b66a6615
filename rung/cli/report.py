"""`rung report`: the page of a run, or of a whole experiment, as Markdown or HTML. Works without torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.errors import RunError, UserError

if TYPE_CHECKING:
    from rung.compare.page import Written


@click.command("report", short_help="Write the page of a run, or of an experiment.")
@click.argument("target", required=False)
@click.option("--html", "html_file", is_flag=False, flag_value="", metavar="[FILE]",
              help="Write one HTML file with plots and samples in it instead; report.html, or FILE.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Write into this folder instead of beside the record.")  # fmt: skip
@click.option("--stdout", "is_stdout", is_flag=True, help="Print the page and write nothing.")
@click.option("--runs", "root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
              type=click.Path(path_type=Path), help="Folder of the runs.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the paths that were written as JSON.")
def command(
    target: str | None, html_file: str | None, out: Path | None, is_stdout: bool, root: Path, as_json: bool
) -> None:
    """Write the page of TARGET from its record, and print where it is.

    TARGET is a run (piano/7, piano/last, piano/best, or its folder) or an experiment: `piano` is the page of all its
    runs. A page is report.md with loss.svg and lr.svg beside it, in the folder of the run or of the experiment.
    The same record gives the same page, byte for byte.

    \b
    Examples:
      rung report piano/7
      rung report piano
      rung report piano/best --html
      rung report piano/7 --html piano-7.html
      rung report piano/7 --stdout | less
    """
    from rung.runs.files import to_json

    if target is None and html_file:  # `rung report --html piano/7`: the word was meant as the target
        target, html_file = html_file, ""
    if target is None:
        raise UserError("rung report needs a run such as piano/7, or an experiment such as piano (rung ls lists them).")
    is_html = html_file is not None
    file = (out or Path()) / html_file if html_file else None
    folder = file.parent if file is not None else out
    written, home = _made(target, root, folder, is_html)
    if is_stdout:
        sys.stdout.write(_text(written, is_html))
        return
    name = file.name if file is not None else "report.html" if is_html else "report.md"
    paths = _write(written, folder or home, name, is_html)
    if as_json:
        click.echo(to_json([str(path) for path in paths]).decode())
    else:
        click.echo(paths[0])


def _made(target: str, root: Path, folder: Path | None, is_html: bool) -> tuple[Written, Path]:
    """The page, and the folder that it belongs into."""
    from rung.compare.book import experiment_page
    from rung.compare.page import run_page
    from rung.runs.query import experiments, list_runs, open_run

    name = target.rstrip("/")
    if name in experiments(root):
        problems: list[str] = []
        return experiment_page(name, list_runs(root, name, problems), problems, folder), root / name
    run = open_run(target, root)
    return run_page(run, folder, has_files=is_html), run.path


def _text(written: Written, is_html: bool) -> str:
    from rung.compare.blocks import markdown
    from rung.compare.html import to_html

    return to_html(written.page) if is_html else markdown(written.page)


def _write(written: Written, folder: Path, name: str, is_html: bool) -> list[Path]:
    """The drawings first, so that a page never points to one that is not there yet."""
    from rung.files import write_whole
    from rung.runs.files import refused

    files = {} if is_html else {drawing: text.encode() for drawing, text in written.drawings.items()}
    files[name] = _text(written, is_html).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            if (folder / file).is_dir():
                raise RunError(f"{folder / file} is a folder; name another file or --out folder.")
            write_whole(folder / file, data)
    except OSError as error:
        raise refused(f"{folder}{os.sep}{name}", error) from error
    return [folder / file for file in reversed(files)]
