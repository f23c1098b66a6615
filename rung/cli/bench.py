"""rung bench"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from rung.cli.options import GroupWithDefault, config_option, json_option, runs_option
from rung.errors import ConfigError
from rung.report.table import print_table
from rung.text import echo, echo_json

PARTS = ("step", "diagnostics", "loader", "generation", "logging")


class _Parts(GroupWithDefault):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Options may come without the name of a part: then all are measured."""
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args = ["all", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Parts, short_help="Measure this machine.")
def command() -> None:
    """Measure how fast rung is on this machine, and compare with what was measured here before.

    Parts are step (training with everything on against a bare PyTorch loop), diagnostics (what signals and the doctor
    cost), loader (windows a second, against torch's DataLoader), generation (tokens a second) and logging (CPU time of
    a logged step). `rung bench` runs all of them; `rung bench step loader` runs two. Generation on a CPU and logging
    are CPU time, the rest is wall time: use a quiet machine.

    Each call writes a page, a JSON file in ~/.cache/rung/bench ($RUNG_CACHE/bench), and is compared with the earlier
    pages of the same machine, device and torch. A figure that is worse by more than the noise is called slower.

    `rung bench data RECIPE` asks whether a recipe's data keeps up with its step.

    \b
    Options of all parts:
      --quick         Tiny sizes, to see that it works; the figures mean nothing.
      --device cuda   Where to measure; default: cpu.
      --pages FOLDER  Where pages are read and written.
      --json          Print JSON.

    \b
    Examples:
      rung bench
      rung bench step loader
      rung bench generation --device cuda --json
      rung bench data piano
      rung bench data text preset=small data.batch_size=64
    """


@click.command()
@click.argument("names", nargs=-1)
@click.option("--quick", "is_quick", is_flag=True, help="Tiny sizes, to see that it works; the figures mean nothing.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--pages", "folder", type=click.Path(path_type=Path, file_okay=False), help="Folder of the pages.")
@json_option
def _parts(name: str, names: tuple[str, ...], is_quick: bool, device: str, folder: Path | None, as_json: bool) -> None:
    """Measure these parts (step, diagnostics, loader, generation, logging), and compare with earlier pages."""
    chosen = PARTS if name == "all" else dict.fromkeys((name, *names))
    for one in chosen:
        if one not in PARTS:
            raise ConfigError(f"{one} is not a benchmark; choose one of {', '.join(PARTS)}, or data", code="bad-value")
    import torch

    from rung.bench.page import compare, earlier, keep, machine, page_of
    from rung.bench.parts import measure
    from rung.data.wheel import cache_folder

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU that torch can use; leave it out", code="no-device")
    folder = folder or cache_folder() / "bench"
    figures = []
    for one in chosen:
        echo(f"measuring {one} ...", err=True)
        figures += measure(one, device, is_quick)
    here = machine(device, is_quick)
    before = earlier(folder, here)
    page = page_of(here, figures)
    comparisons = {one.name: one for one in compare(page, before)}
    slower = [name for name, one in comparisons.items() if one.is_slower]
    page["compared"] = {
        name: {"before": one.before, "ratio": one.ratio, "noise": one.noise, "pages": one.num_pages}
        for name, one in comparisons.items()
    }
    page["slower"] = slower
    path = keep(page, folder)
    if as_json:
        echo_json(json.dumps({**page, "page": str(path)}, indent=1))
        return
    rows = []
    for figure in figures:
        low, high = min(figure.values), max(figure.values)
        row = [figure.name, f"{figure.median:.4g} [{low:.4g} {high:.4g}] {figure.unit}", "-", figure.about]
        if figure.name in comparisons:
            known = comparisons[figure.name]
            word = "slower" if known.is_slower else "faster" if known.is_faster else "within noise"
            row[2] = f"{known.ratio:.2f}x, {word}"
        rows.append(row)
    print_table(["figure", "median [min max]", "against before", "what"], rows, keep=(0, 1, 2))
    for known in (comparisons[name] for name in slower):
        figure = page["figures"][known.name]
        pages = "1 earlier page" if known.num_pages == 1 else f"{known.num_pages} earlier pages"
        echo(
            f"{known.name} is slower than before: {figure['median']:.4g} {figure['unit']} against {known.before:.4g}, "
            f"the median of {pages}; noise is {100 * known.noise:.0f} %"
        )
    if not before:
        echo("no earlier page of this machine to compare with")
    echo(f"page: {path}")


_Parts.default = _parts


@command.command("data")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[preset=NAME] [KEY=VALUE]...")
@config_option
@click.option("--steps", "num_steps", type=click.IntRange(min=1), default=20, show_default=True)
@json_option
@runs_option
def data(
    recipe: str, overrides: tuple[str, ...], files: tuple[Path, ...], num_steps: int, as_json: bool, root: Path
) -> None:
    """Time the stream of a recipe against its training step, on the prepared data.

    Nothing is recorded. A stream keeps up where gathering, divided by system.data_workers, takes less than the step;
    what a step waits is measured too.

    \b
    Examples:
      rung bench data piano
      rung bench data text preset=small data.batch_size=64
    """
    import statistics

    from rung.bench.data import stream_against_step
    from rung.engine.build import build
    from rung.resolve import resolve

    resolved = resolve(recipe, overrides, files, runs=root)
    setup = build(resolved.config, resolved.recipe_class, root)
    found: dict[str, Any] = stream_against_step(setup, num_steps)
    setup.world.leave()
    gather, wait, step = (statistics.median(found[name]) for name in ("gather_s", "wait_s", "step_s"))
    found |= {"wait_ratio": wait / (wait + step), "rows_per_s": found["rows_per_step"] / gather}
    if as_json:
        echo_json(json.dumps(found, indent=1))
        return
    rows = []
    for name, what in (("gather_s", "gathering"), ("wait_s", "waiting"), ("step_s", "the step")):
        values = [1e3 * value for value in found[name]]
        rows.append([what, f"{statistics.median(values):.3g} ms [{min(values):.3g} {max(values):.3g}]"])
    print_table(["of a step", "median [min max]"], rows, keep=(0, 1))
    echo(
        f"{found['rows_per_s']:.0f} rows/s in one thread; with system.data_workers={found['data_workers']} a step "
        f"waits {100 * found['wait_ratio']:.1f} % of its time for data"
    )
