"""If this fails, a verb no longer prints what tests/transcripts/VERB.txt shows: a bug, or a sentence that improved.

A transcript is a session in a small lab: a line `$ rung ...`, below it what that prints, and its exit code unless that
is 0. The commands are read from the file too: to add one, write its line. `make transcripts`, which is
RUNG_WRITE_TRANSCRIPTS=1 pytest tests/test_transcripts.py, writes what they print now; read the diff before committing.

Prose is asserted here and nowhere else. What changes from machine to machine is made equal by `normal`; line breaks and
runs of spaces are written but not compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from rung.cli import VERBS, cli, main
from rung.recipes.piano.render import Rendered
from rung.runs.record import amend, append_event
from rung.sweep.plan import keep, read_plan
from tests.compare.arms import make

FOLDER = Path(__file__).parent / "transcripts"
IS_WRITING = bool(os.environ.get("RUNG_WRITE_TRANSCRIPTS"))

TINY = """\
model: {n_layer: 1, n_head: 1, n_embd: 16, positions: learned, sounding_keys: false}
data: {context_size: 32, batch_size: 4}
lr: {warmup_iters: 2}
eval_interval: 4
sampling: {num_tokens: 60}
system: {device: cpu, threads: 1}
"""
SWEEP = """\
recipe: piano
config: [tiny.yaml]
grid: {lr.learning_rate: [1e-3, 2e-3], seed: [0, 1]}
why: which rate?
"""

AMOUNT = r"(?<![\w.-])[-+]?\d+(?:\.\d+)?(?: ?(?:[kMGT]?i?B|bytes|ms|µs|s|m|h|d|min|days|%)|x)(?!\w)"
RULES = {  # in this order
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|\+00:00)?)?": "<date>",
    r"(?<=[ (])\d+\.\d+\.\d+(?:\+\w+)?": "<version>",
    r"/\S+/rung/(\S+\.py):\d+": r"rung/\1:<line>",
    r"\d+(\s+)packages": r"<some>\1packages",
    r"\d+(\s+)executed files": r"<some>\1executed files",
    r"\d+ notes": "<some> notes",  # of samples, where one digit may decide what is drawn
    r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?[kMG]? (?:targets|steps)/s": "<rate>",
    rf"{AMOUNT}(?: \d+ (?:s|m|h)\b)?": "<amount>",
    r"(?<![\w.])[-+]?(?:\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+|inf)\b|\bNaN\b": "<number>",
    r"\bby (at most )?0\b": r"by \1<number>",  # a difference, which is exactly 0 on some processors
    r"(?<![\w.])(?=[0-9a-f]*\d)[0-9a-f]{6,}\b": "<hash>",  # uids, hashes, keys of points, names of saves
}


def normal(text: str) -> str:
    """Text without what depends on the machine, the day or the last digits: paths, dates, hashes, amounts, floats."""
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/lab\w+", "<lab>", text)
    for pattern, name in RULES.items():
        text = re.sub(pattern, name, text)
    return "\n".join(re.sub(r"(?<=\S) {2,}", "  ", line).rstrip() for line in text.splitlines())


def call(line: str, is_normal: bool = True) -> str:
    """What a shell shows of `rung ...`, in this process; `| head -N` cuts what is long."""
    words = shlex.split(line)
    most = int(words[-1][1:]) if words[-3:-1] == ["|", "head"] else None
    words = words[: -3 if most else None]
    # click remembers -h or not from the first call of a command, which another test may have made without `rung`.
    commands = [cli.get_command(click.Context(cli), words[1])] if words[1:] and words[1] in VERBS else []
    for command in commands:
        assert command is not None
        command._help_option = None
        commands += command.commands.values() if isinstance(command, click.Group) else []
    out = io.StringIO()
    before, sys.argv = sys.argv, words
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = before
    shown = normal(out.getvalue()) if is_normal else out.getvalue()
    shown = "\n".join(shown.splitlines()[:most])
    return shown + (f"\n(exits with {code})" if code else "")


def silent(*_: object, **__: object) -> Rendered:
    """In place of a sound font, which may have to be downloaded."""
    return Rendered(b"", "nobody")


@contextlib.contextmanager
def empty_lab() -> Iterator[Path]:
    """Not a folder of pytest's: those have dashes in their names, at which a long line is broken."""
    with tempfile.TemporaryDirectory(prefix="lab") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def lab(piano_data: Path) -> Iterator[Path]:
    """Two trained runs of piano, the second of which diverged; runs of bach and chopin that were only written; a sweep
    that is trained; data, config files, nothing else."""
    with empty_lab() as folder, contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr("rung.recipes.piano.samples.to_wav", silent)
        patch.setattr("rung.runs.executed._main", lambda: "script")  # a worker of pytest-xdist was typed, with -c
        shutil.copytree(piano_data, Path("data/piano"))
        Path("tiny.yaml").write_text(TINY)
        Path("lr.yaml").write_text(SWEEP)
        call("rung train piano -c tiny.yaml optimizer.max_iters=8 --why 'a first look' --no-check")
        call("rung train --parent piano/1 lr.learning_rate=1e25 lr.warmup_iters=0 --why 'too much?' --no-check")
        runs = Path("runs").absolute()

        def write(experiment: str, seed: int, loss: float, key: float = 0.1, **fields: Any) -> str:
            run = make(runs, seed, loss, key, experiment=experiment, **fields)
            amend(run.path, best={"set": "val", "step": 100, "loss": loss})
            return run.id

        for seed in (7, 8, 9):
            control = write("bach", seed, 1.50 + seed / 1000)
            change = {"parent": control, "why": "a higher rate", "tags": ["candidate"]}
            write("bach", seed, 1.40 + seed / 800, key=0.2, **change)
        append_event(runs / "bach/1", "note", unix_s=1.7e9, text="the norm sits at 1.0")
        make(runs, losses=(), num_steps=20, status="crashed", experiment="chopin")
        amend(runs / "chopin/1", reason="RuntimeError: out of memory")
        sweep = keep(read_plan(Path("lr.yaml"), runs))
        for number, point in enumerate(sweep.points):
            of = {"name": "lr", "point": point.key, "varies": dict(point.varies)}
            write("lr", point.varies["seed"], 1.5 + number / 10, sweep=of)
        yield folder


@pytest.fixture
def folder(lab: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A lab of its own for each verb."""
    with empty_lab() as folder:
        shutil.copytree(lab, folder, symlinks=True, dirs_exist_ok=True)
        monkeypatch.chdir(folder)
        yield folder


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_prints_its_transcript(verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.recipes.piano.samples.to_wav", silent)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TRACKIO_DIR", "trackio")
    for name in ("RUNG_RUNS", "RUNG_DATA", "RUNG_REMOTE"):
        monkeypatch.delenv(name, raising=False)
    if verb in ("play", "serve"):  # the page is built by `make page`, which a test of words does not need
        for name, module in (("world.html", "play"), ("lab.html", "lab")):
            (folder / name).touch()
            monkeypatch.setattr(f"rung.web.{module}.STATIC", folder)
        (folder / "assets").mkdir()
        monkeypatch.delenv("RUNG_TOKEN", raising=False)
    file = FOLDER / f"{verb}.txt"
    sessions = re.split(r"^\$ ", file.read_text("utf-8"), flags=re.M)[1:]
    assert sessions, f"{file} has no line `$ rung {verb} ...`"
    lines = [session.partition("\n")[0] for session in sessions]
    printed = [call(line) for line in lines]
    if IS_WRITING:
        file.write_text("".join(f"$ {line}\n{text}\n\n" for line, text in zip(lines, printed)).rstrip() + "\n", "utf-8")
        return
    for line, text, session in zip(lines, printed, sessions):
        expected = session.partition("\n")[2]
        assert text.split() == expected.split(), f"$ {line}\n{text}"


READING = (
    "rung ls", "rung ls --changed", "rung ls --tree", "rung ls --group",
    "rung ls --columns status,best,min:loss,seed,age",
    "rung show bach/1", "rung show piano/1", "rung show piano/2 --all", "rung diff bach/1 bach/2",
    "rung diff piano/1 piano/2", "rung doctor piano/2", "rung check piano -c tiny.yaml --quick", "rung replay piano/2",
    "rung replay piano/1@5", "rung ab --judge bach/1 bach/3 bach/5 -- bach/2 bach/4 bach/6", "rung du", "rung recipes",
    "rung config piano", "rung sweep show lr", "rung sweep ls", "rung sql", "rung sql 'select * from runs'",
    "rung data show piano", "rung eval piano/1", "rung pin piano/1", "rung tag", "rung note bach/1",
    "rung verdict bach/2", "rung gc",
)  # fmt: skip
RUNS = ("bach/1", "bach/6", "chopin/1", "lr/4", "piano/2")
NAMED = {  # what names a row, and what came of it
    "rung ls": (*RUNS, "crashed", "loss"),
    "rung ls --changed": (*RUNS, "crashed", "loss", "lr.learning_rate"),
    "rung ls --tree": (*RUNS, "crashed"),
    "rung ls --group": ("bach/1,3,5", "bach/2,4,6", "chopin/1", "lr/1,2,3,4", "piano/2", "crashed", "best"),
    "rung ls --columns status,best,min:loss,seed,age": (*RUNS, "crashed", "best"),
    "rung du": (*RUNS, "total"),
    "rung diff piano/1 piano/2": ("piano/1", "piano/2", "lr.learning_rate", "lr.warmup_iters", "factor"),
    "rung check piano -c tiny.yaml --quick": ("schedule", "pass", "skip"),
    "rung replay piano/2": ("piano/2", "OPTIMIZER", "blocks.0.norm1"),
    "rung recipes": ("music", "piano", "speech", "text", "world", "tiny"),
    "rung sweep show lr": ("lr/1", "lr/4", "0.002", "finished"),
    "rung sql 'select * from runs'": ("id", *RUNS, "crashed"),
}
TO_COPY = ("rung ", "to continue: rung ")  # a command stays in one piece


@pytest.mark.parametrize("line", READING)
def test_a_narrow_terminal_breaks_nothing(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word and number at 80 columns is one at 120, no line of several words stands over, and runs are named."""
    for name in ("RUNG_RUNS", "RUNG_DATA", "RUNG_REMOTE"):
        monkeypatch.delenv(name, raising=False)
    words = {}
    for width in (120, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        printed = call(line, is_normal=False)
        assert "(exits with 2)" not in printed, printed
        words[width] = set(re.sub(r"\d", "0", printed.replace("# ", "")).split())  # ages differ between two calls
        too_long = [one for one in printed.splitlines() if len(one) > width and " " in one.strip()]
        assert not [one for one in too_long if not one.lstrip().startswith(TO_COPY)], too_long
    note = printed.partition("… not shown")[2]
    assert words[80] - words[120] <= set(note.split()) | {"…", "not", "shown,", "#"}
    assert set(NAMED.get(line, ())) <= set(printed.split())


def test_every_transcript_is_of_a_verb() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(VERBS)
