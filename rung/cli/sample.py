"""rung sample"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from rung.cli.resolve import json_option, recipe_of, runs_option, schema_of
from rung.errors import UserError

KEYS = {  # option -> the key that it sets
    "prompt": "sampling.prompt",
    "task": "sampling.task",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "num": "sampling.num_samples",
}


@click.command(short_help="Make samples from a run.")
@click.argument("run")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--prompt", metavar="FILE|TEXT", help="What to begin with: a MIDI file, or words where a run writes text."
)
@click.option("--task", metavar="NAME", help="What to do with the prompt, such as top_line; default: continue it.")
@click.option("--num", type=int, metavar="N", help="How many to make.")
@click.option("--temperature", type=float, metavar="T", help="Below 1 is safer, above 1 wilder; 0 the likeliest.")
@click.option("--top-k", type=int, metavar="K", help="Choose among the K likeliest tokens only; 0 = all.")
@click.option(
    "--top-p", type=float, metavar="P", help="Choose among the likeliest tokens of this probability; 1 = all."
)
@click.option("--at", type=int, help="The save to sample from; default: the best one, else the last.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to put them; default: ./samples/RUN/STEP-seed-N, and a mark of the keys where some are given.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed gives other samples.")
@json_option
@runs_option
def command(
    run: str, words: tuple[str, ...], at: int | None, out: Path | None, seed: int, as_json: bool, runs_root: Path,
    **given: str | int | float | None,
) -> None:  # fmt: skip
    """Make samples from the weights of RUN. The run itself is not touched.

    The options from --prompt to --top-p are short for keys of the same names, such as sampling.top_p=0.9; which of them
    a run has depends on its recipe (`rung config RECIPE` lists them).

    \b
    Examples:
      rung sample piano/7
      rung sample piano/7 --temperature 0.9 --num 4 --seed 3
      rung sample piano/7 --prompt "my tune.mid"
      rung sample piano/8 --prompt left-hand.mid --task top_line
      rung sample piano/8 --prompt song.mid --task infill "sampling.parameters=[20, 8]"
      rung sample text/3 --prompt "Once upon a time"
      rung sample piano/7 --at 1000 --out /tmp/listen
    """
    import numpy as np

    from rung.cli.eval import open_weights
    from rung.files import write_whole
    from rung.recipe import Draw
    from rung.runs.query import open_run
    from rung.text import printable

    words = (*words, *_as_words(run, given, runs_root))
    setup, step = open_weights(run, words, at, runs_root)
    out = out or Path("samples") / open_run(run, runs_root).id / f"{step}-seed-{seed}{_mark(words)}"
    made = setup.samples(Draw(seed, step, np.arange(1)))
    if not made:
        raise UserError(f"the recipe of {run} makes no samples")
    rows = []
    for sample in made:
        path = out / sample.name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, sample.data)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another place with --out") from error
        rows.append({"path": str(path), "caption": sample.caption})
        if not as_json:
            click.echo(f"{printable(str(path))}  {printable(sample.caption)}")
    if as_json:
        click.echo(json.dumps(rows, indent=1))


def _as_words(run: str, given: Mapping[str, str | int | float | None], runs_root: Path) -> list[str]:
    """The options that were given, as words that set the run's keys."""
    from rung.recipes import find_recipe
    from rung.runs.query import open_run

    asked = {name: value for name, value in given.items() if value is not None}
    if not asked:
        return []
    found = open_run(run, runs_root)
    recipe = recipe_of(found)
    known = schema_of(recipe, find_recipe(recipe)).keys
    for name in asked:
        if KEYS[name] not in known:
            has = ", ".join(key for key in known if key.startswith("sampling.")) or "none"
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{option} is not for {found.id}: {recipe} has no {KEYS[name]} (its keys of samples: {has})"
            )
    return [f"{KEYS[name]}={_quoted(value) if isinstance(value, str) else value}" for name, value in asked.items()]


def _mark(words: Sequence[str]) -> str:
    """Other keys go to another folder, so that samples of one prompt do not take the place of those of another."""
    return f"-{hashlib.sha256(repr(sorted(words)).encode()).hexdigest()[:6]}" if words else ""


def _quoted(text: str) -> str:
    """Text as YAML that means this very text, whatever is in it."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"the name {text} is not UTF-8; give the file another name")
    if "${" in text:
        raise UserError(
            f"{text} has ${{ in it, which would stand for a key; give the file another name, or other words"
        )
    plain = (c if c.isascii() and c.isprintable() and c not in '"\\' else f"\\U{ord(c):08X}" for c in text)
    return f'"{"".join(plain)}"'
