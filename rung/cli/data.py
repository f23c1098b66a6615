"""rung data"""

from __future__ import annotations

import json
from pathlib import Path

import click

from rung.cli.progress import reporter
from rung.cli.resolve import Resolved, json_option, resolve
from rung.errors import DataError
from rung.units import size


class DataVerbs(click.Group):
    """`rung data RECIPE` prepares; `rung data show` and `rung data verify` look at what is there."""

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found = super().get_command(ctx, name)
        if found is not None:
            return found
        prepare_one = click.Command(
            name, params=list(prepare.params), help=prepare.help, callback=lambda **given: run_prepare(name, **given)
        )
        return prepare_one


@click.group(cls=DataVerbs, short_help="Prepare, describe or verify a data set.", no_args_is_help=True)
def command() -> None:
    """Prepare the data of a recipe (rung data RECIPE), or look at data that is prepared (show, verify).

    \b
    rung data RECIPE [--from WHERE] [--name NAME] [--replace] [--report] [KEY=VALUE]...
      --from WHERE  a folder or file of your own; without it the data that comes embedded
      --name NAME   what to call it; default: what the recipe's config names
      --replace     prepare it again if it is there already
      --report      look at what is prepared: a page with pictures beside it
      --max-examples-per-split N, --full   so many documents of each split at most, or all

    \b
    Examples:
      rung data piano                                   the embedded default
      rung data piano --from ~/maestro --name maestro   a folder of your own
      rung data world --report                          is it fit to train on?
      rung data text --from papers --name papers        text, JSONL or Parquet
      rung data show maestro                            what it holds
      rung data verify maestro                          hash every byte
    """


@command.command(hidden=True)
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--from",
    "source",
    metavar="WHERE",
    help="A folder or file of your own, or a Hugging Face data set (text, piano); default: the embedded data.",
)
@click.option("--name", help="What to call it; default: what the recipe's config names.")
@click.option("--replace", is_flag=True, help="Prepare it again if it is there already.")
@click.option("--report", "is_report", is_flag=True, help="Look at what is prepared: a page with pictures beside it.")
@click.option(
    "--max-examples-per-split",
    "most",
    type=click.IntRange(min=1),
    metavar="N",
    help="So many documents of each split at most; the same as dataset.max_examples_per_split=N.",
)
@click.option("--full", "is_full", is_flag=True, help="All documents, whatever the preset says.")
@json_option
def prepare(**given: object) -> None:
    """Prepare data.

    \b
    Examples:
      rung data piano
      rung data piano --from ~/maestro --name maestro
      rung data piano --from maestro-v3.0.0-midi.zip --name maestro dataset.sustain=true
      rung data piano --replace dataset.pause_detection_threshold=2
      rung data world --report
      rung data text --max-examples-per-split 50
      rung data text --from ccdv/arxiv-classification --name arxiv --full
    """


def run_prepare(
    recipe: str,
    words: tuple[str, ...],
    source: str | None,
    name: str | None,
    replace: bool,
    is_report: bool,
    most: int | None,
    is_full: bool,
    as_json: bool,
) -> None:
    if most is not None and is_full:
        raise DataError(f"--max-examples-per-split {most} contradicts --full, which takes all; give one of them")
    if most is not None or is_full:
        words = (*words, f"dataset.max_examples_per_split={0 if is_full else most}")
    if source == "":  # a variable of a script that is not set
        raise DataError("--from is empty; name a folder or a file, or . for this folder")
    resolved = resolve(recipe, words)
    if is_report:
        if source is not None or replace:
            raise DataError("--report looks at data that is prepared; prepare it first, without --report")
        run_report(recipe, resolved, name, as_json)
        return
    cfg, seed = resolved.config.view("recipe"), resolved.config.view("engine").seed
    report, close = reporter()
    try:
        path, summary = resolved.recipe_class.prepare(
            cfg, seed, None if source is None else Path(source), name, replace, report
        )
    finally:
        close()
    click.echo(json.dumps({"path": str(path), "summary": summary}) if as_json else f"{summary}\nin {path}")


def run_report(recipe: str, resolved: Resolved, name: str | None, as_json: bool) -> None:
    from rung.data.store import place

    cfg = resolved.config.view("recipe")
    path = place(name or cfg.dataset.base_dataset_name)
    if not (path / "manifest.json").is_file():
        named = f" --name {name}" if name else ""
        raise DataError(f"no data at {path} to report on; prepare it first: `rung data {recipe}{named}`")
    out = path.parent / f"{path.name}-report"
    report, close = reporter()
    try:
        summary = resolved.recipe_class.survey(cfg, path, out, report)
    finally:
        close()
    figures = out / "report.json"
    if as_json:
        found = json.loads(figures.read_text("utf-8")) if figures.is_file() else {}
        click.echo(json.dumps({"path": str(out), "summary": summary, **found}))
    else:
        click.echo(f"{summary}\nin {out / 'report.md'}")


@command.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Describe a prepared data set: what it holds, by split, and what was left out.

    \b
    Examples:
      rung data show piano
      rung data show data/piano --json
    """
    from rung.data.store import Store, place

    store = Store.open(place(name))
    if as_json:
        click.echo(json.dumps({**store.manifest, "fingerprint": store.fingerprint}, indent=1))
        return
    total = sum(spec["bytes"] for spec in store.manifest["files"].values())
    click.echo(f"{store.path}  {store.manifest['kind']}  {size(total)}  fingerprint {store.fingerprint}")
    for array, spec in store.manifest["arrays"].items():
        click.echo(f"  {array}: {spec['rows']} x {spec['row_shape'] or 1} {spec['dtype']}")
    for split, number in store.manifest["splits"].items():
        click.echo(f"  {split}: {number} records, {int(store.lengths[store.split(split)].sum())} rows")
    if "summary" in store.info:
        click.echo(store.info["summary"])


@command.command()
@click.argument("names", nargs=-1, required=True)
def verify(names: tuple[str, ...]) -> None:
    """Hash every byte of prepared data and compare with its manifest.

    \b
    Example:
      rung data verify piano
    """
    from rung.data.store import Store, place

    for name in names:
        store = Store.open(place(name))
        problems = store.verify()
        if problems:
            raise DataError(f"{store.path} is damaged: {'; '.join(problems)}; prepare it again with --replace")
        click.echo(f"{store.path} is whole: {len(store.manifest['files'])} files, fingerprint {store.fingerprint}")
