"""rung sample"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import click

from rung.cli.options import json_option, runs_option, trust_option
from rung.errors import UserError
from rung.text import echo, echo_json

KEYS = {  # option -> the key that it sets
    "prompt": "sampling.prompt",
    "audio": "sampling.audio",
    "question": "sampling.question",
    "task": "sampling.task",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "num": "sampling.num_samples",
}


@click.command(short_help="Make samples from a run.")
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--prompt",
    metavar="FILE|TEXT",
    help="What to begin with: a MIDI file, text for a run that writes text, what music should sound like, or the sound "
    "file that speech is to write down.",
)
@click.option("--question", metavar="TEXT", help="What to ask about the sound; default: what is said in it.")
@click.option("--audio", metavar="FILE", help="A sound file that music should continue.")
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
@trust_option
@runs_option
def command(
    run: str, overrides: tuple[str, ...], at: int | None, out: Path | None, seed: int, as_json: bool, root: Path,
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
      rung sample music/2 --prompt "slow harpsichord in G minor" --audio start.wav
      rung sample speech/4 --prompt question.wav --question "Who is speaking?"
      rung sample piano/7 --at 1000 --out /tmp/listen
    """
    from rung import api
    from rung.recipes import find_recipe
    from rung.resolve import recipe_of, schema_of
    from rung.runs.query import open_run
    from rung.sweep.space import override
    from rung.text import printable

    asked = {name: value for name, value in given.items() if value is not None}
    if asked:
        found = open_run(run, root)
        recipe = recipe_of(found, root)
        known = schema_of(recipe, find_recipe(recipe)).keys
    for name, value in asked.items():
        if KEYS[name] not in known:
            has = ", ".join(key for key in known if key.startswith("sampling.")) or "none"
            option = f"--{name.replace('_', '-')}"
            message = f"{option} is not for {found.id}: {recipe} has no {KEYS[name]} (its keys of samples: {has})"
            raise UserError(message, code="no-key")
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise UserError(f"the name {value} is not UTF-8; give the file another name", code="bad-name")
        if "${" in str(value):
            message = f"{value} has ${{ in it, the syntax of a reference; give the file another name, or another text"
            raise UserError(message, code="bad-value")
    overrides = (*overrides, *(override(KEYS[name], value) for name, value in asked.items()))
    # Other keys go to another folder, so that samples of one prompt do not replace those of another.
    mark = f"-{hashlib.sha256(repr(sorted(overrides)).encode()).hexdigest()[:6]}" if overrides else ""
    loaded = api.load(run, overrides, at=at, runs=root)
    made = loaded.sample(seed=seed)
    paths = made.write(out or Path("samples") / loaded.run.id / f"{loaded.step}-seed-{seed}{mark}")
    if as_json:
        rows = [{"path": str(path), "caption": one.caption} for path, one in zip(paths, made, strict=True)]
        echo_json(json.dumps(rows, indent=1))
        return
    for path, one in zip(paths, made, strict=True):
        echo(f"{printable(str(path))}  {printable(one.caption)}")
