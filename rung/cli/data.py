"""rung data"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from rung import parse
from rung.cli.options import GroupWithDefault, json_option
from rung.data.store import Store, note_command, place
from rung.errors import ConfigError, DataError, UserError
from rung.progress import reporter
from rung.recipe import Prepares, Reports
from rung.recipes import CATALOG, find_recipe
from rung.report.table import hanging
from rung.resolve import resolve, schema_of
from rung.text import echo, echo_json
from rung.units import size


@click.group(cls=GroupWithDefault, short_help="Prepare, describe or verify a data set.", no_args_is_help=True)
def command() -> None:
    """Prepare the data of a recipe (rung data RECIPE), or look at data that is prepared (show, verify).

    \b
    rung data RECIPE [--from WHERE] [--name NAME] [--replace] [--report] [KEY=VALUE]...
      --from WHERE  a folder or file of your own; without it the data that comes embedded
      --name NAME   what to call it; default: what the recipe's config names
      --replace     prepare it again even if it exists
      --report      look at what is prepared: a page with pictures beside it
      --max-examples-per-split N, --full   so many documents of each split at most, or all
      --fit-codec   fit the codec of music anew, even if the data that is replaced has one
      --device DEVICE   where a recipe that encodes its data with a model runs it

    \b
    Examples:
      rung data piano                                   the embedded default
      rung data piano --from ~/maestro --name maestro   a folder of your own
      rung data world --report                          is it fit to train on?
      rung data text --from papers --name papers        text, JSONL or Parquet
      rung data show maestro                            what it holds
      rung data verify maestro                          hash every byte
    """


@click.command()
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--from", "source", metavar="WHERE",
              help="Your own folder or file, or a Hugging Face data set (text, piano); "
                   "default: the embedded data.")  # fmt: skip
@click.option("--name", help="What to call it; default: what the recipe's config names.")
@click.option("--replace", is_flag=True, help="Prepare it again even if it exists.")
@click.option("--report", "is_report", is_flag=True, help="Look at what is prepared: a page with pictures beside it.")
@click.option("--max-examples-per-split", "most", type=click.IntRange(min=1), metavar="N",
              help="So many documents of each split at most; short for dataset.max_examples_per_split=N.")  # fmt: skip
@click.option("--full", "is_full", is_flag=True, help="All documents, whatever the preset says.")
@click.option("--fit-codec", is_flag=True,
              help="Fit the codec of music anew, even if the data that is replaced has one.")  # fmt: skip
@click.option("--device", default="auto", show_default=True,
              help="Where a recipe that encodes its data with a model runs it: "
                   "auto, cpu, cuda, cuda:1, mps.")  # fmt: skip
@json_option
def prepare(
    recipe: str, overrides: tuple[str, ...], source: str | None, name: str | None, replace: bool, is_report: bool,
    most: int | None, is_full: bool, fit_codec: bool, device: str, as_json: bool,
) -> None:  # fmt: skip
    """Prepare data.

    \b
    Examples:
      rung data piano
      rung data piano --from ~/maestro --name maestro
      rung data piano --from maestro-v3.0.0-midi.zip --name maestro dataset.sustain=true
      rung data piano --replace dataset.pause_detection_threshold=2
      rung data music --from ~/recordings --name mine --fit-codec
      rung data world --report
      rung data text --max-examples-per-split 50
      rung data text --from ccdv/arxiv-classification --name arxiv --full
    """
    if most is not None and is_full:
        message = f"--max-examples-per-split {most} contradicts --full, which takes all; give one of them"
        raise DataError(message, code="options-conflict")
    if most is not None or is_full:
        overrides = (*overrides, f"dataset.max_examples_per_split={0 if is_full else most}")
    if fit_codec:
        if recipe in CATALOG and "codec.fit" not in schema_of(recipe, find_recipe(recipe)).keys:
            raise UserError(f"--fit-codec: {recipe} has no codec, music has; leave it out", code="not-supported")
        overrides = (*overrides, "codec.fit=true")
    if source == "":  # a variable of a script that is not set
        raise DataError("--from is empty; name a folder or a file, or . for this folder", code="missing-option")
    if source is not None and os.path.exists(source) and not (os.path.isfile(source) or os.path.isdir(source)):
        message = f"--from {source} is a pipe or a device, which may keep a reader waiting; name a folder or a file"
        raise DataError(message, code="not-a-file")
    if device != "auto":  # what auto is, only a recipe that needs one has to find out: torch takes seconds to import
        from rung.engine.precision import choose_device

        try:
            choose_device(device)
        except ConfigError as error:
            raise ConfigError(str(error).replace("system.device=", "--device "), code="no-device") from None
    resolved = resolve(recipe, overrides)
    recipe_class, cfg = resolved.recipe_class, resolved.config.view("recipe")
    if is_report and (source is not None or replace):
        message = "--report looks at data that is prepared; prepare it first, without --report"
        raise DataError(message, code="options-conflict")
    found: dict[str, object] = {}
    report, close = reporter()
    try:
        if is_report:
            data = place(name or cfg.dataset.base_dataset_name)
            if not (data / "manifest.json").is_file():
                named = f" --name {name}" if name else ""
                message = f"no data at {data} to report on; prepare it first: `rung data {recipe}{named}`"
                raise DataError(message, code="no-data")
            if not issubclass(recipe_class, Reports):
                describe = f"`rung data show {data.name}` describes it"
                message = f"{recipe_class.__name__} has no report on its data; {describe}"
                raise UserError(message, code="not-supported")
            path = data.parent / f"{data.name}-report"
            summary = recipe_class.survey(cfg, data, path, report)
            if (path / "report.json").is_file():
                found = parse.loose_json(parse.read_bytes(path / "report.json"))
        elif not issubclass(recipe_class, Prepares):
            message = f"{recipe_class.__name__} has no data to prepare: its streams make their own"
            raise UserError(message, code="not-supported")
        else:
            seed, folder = resolved.config.view("engine").seed, None if source is None else Path(source)
            path, summary = recipe_class.prepare(cfg, seed, folder, name, replace, report, device)
            words = ["--from", source] if source is not None else []
            words += ["--name", name] if name is not None else []
            note_command(path, ["rung", "data", recipe, *words, *overrides])
    finally:
        close()
    if as_json:
        echo_json(json.dumps({"path": str(path), "summary": summary, **found}))
    else:
        echo(f"{summary}\nin {path / 'report.md' if is_report else path}")


command.default = prepare


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
    store = Store.open(place(name))
    if as_json:
        echo_json(json.dumps({**store.manifest, "fingerprint": store.fingerprint}, indent=1))
        return
    total = sum(spec["bytes"] for spec in store.manifest["files"].values())
    echo(f"{store.path}  {store.manifest['kind']}  {size(total)}  fingerprint {store.fingerprint}")
    for array, spec in store.manifest["arrays"].items():
        echo(f"  {array}: {spec['rows']} x {spec['row_shape'] or 1} {spec['dtype']}")
    for split, number in store.manifest["splits"].items():
        echo(f"  {split}: {number} records, {int(store.lengths[store.split(split)].sum())} rows")
    if "summary" in store.info:
        for line in str(store.info["summary"]).splitlines():
            echo(hanging(line))


@command.command()
@click.argument("names", nargs=-1, required=True)
def verify(names: tuple[str, ...]) -> None:
    """Hash every byte of prepared data and compare with its manifest.

    \b
    Example:
      rung data verify piano
    """
    for name in names:
        store = Store.open(place(name))
        problems = store.verify()
        if problems:
            raise DataError(
                f"{store.path} is damaged: {'; '.join(problems)}; prepare it again with --replace", code="data-damaged"
            )
        echo(f"{store.path} is whole: {len(store.manifest['files'])} files, fingerprint {store.fingerprint}")
