"""If this fails, a command, a Python example or a link in the README or the guide does not do what the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from rung.cli import VERBS, cli, main
from tests.recipes.music.songs import write_songs
from tests.recipes.speech.stores import write_tones

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("rung/recipes/*/README.md")]
)
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
SHELL = ("bash", "console", "sh")
FENCE = re.compile(r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
FILE_NAME = re.compile(r"# ([\w./-]+\.\w+)\n")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
MOST_NOT_RUN = 24  # blocks in all pages that no test runs; think before raising it


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the comment on the line before it."""

    kind: str
    text: str
    note: str
    line: int

    @property
    def is_run(self) -> bool:
        return not self.note.startswith("not run: ")

    @property
    def exit_code(self) -> int:
        return int(self.note.removeprefix("exits ")) if self.note.startswith("exits ") else 0

    def commands(self) -> list[list[str]]:
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
        return [command for command in words if command]


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found = FENCE.finditer(text)
    return [Block(m["kind"], m["text"], m["note"] or "", text.count("\n", 0, m.start("kind")) + 1) for m in found]


@pytest.fixture
def folder(tmp_path: Path, piano_data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a reader of the guide stands: prepared data in data/piano, and some MIDI files of their own."""
    from rung.recipes.piano import midi, notes

    shutil.copytree(piano_data, tmp_path / "data" / "piano")
    (tmp_path / "my_midi").mkdir()
    for number in range(4):
        start = np.arange(40) * 0.25
        tune = notes.make(start, start + 0.2, 50 + (np.arange(40) * (number + 1)) % 30, 64)
        (tmp_path / "my_midi" / f"tune{number}.mid").write_bytes(midi.write_midi(tune))
    make_drive(tmp_path / "my_drive")
    write_songs(tmp_path / "my_songs", 4)
    write_tones(tmp_path / "my_speech", 12)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # no test of the docs downloads anything; a cached sound font is used
    for name in ("RUNG_RUNS", "RUNG_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]  # a recipe that the page wrote


def make_drive(folder: Path) -> None:
    """A short synthetic film as pictures with a table, as somebody's own camera would leave it."""
    from PIL import Image

    from tests.recipes.world.synthetic import film

    made = film(240, seed=0)
    folder.mkdir()
    with (folder / "frames.jsonl").open("w") as table:
        for number, frame in enumerate(made.frames):
            Image.fromarray(frame).save(folder / f"{number:04d}.png")
            row = {"image": f"{number:04d}.png", "t": made.times[number], "pose": made.poses[number].ravel().tolist()}
            table.write(json.dumps(row) + "\n")


def to_run(name: str) -> list[Block]:
    return [block for block in blocks(ROOT / name) if block.is_run and block.kind in (*SHELL, "python", "yaml")]


@pytest.mark.parametrize("name", [name for name in NAMES if to_run(name)])
def test_what_the_page_shows_can_be_done(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in to_run(name):
        where = f"{name}:{block.line}"
        if block.kind in SHELL:
            for command in block.commands():
                code, output = call(command, monkeypatch, capsys)
                assert code == block.exit_code, f"{where}: {shlex.join(command)}\n{output}"
                assert "Traceback" not in output, f"{where}: {shlex.join(command)}\n{output}"
                assert not re.search(r"samples at step \d+ failed", output), f"{where}: {shlex.join(command)}\n{output}"
        elif file := FILE_NAME.match(block.text):
            (folder / file[1]).write_text(block.text, "utf-8")
        elif block.kind == "python":
            exec(compile(block.text, where, "exec"), {"__name__": "page"})


def call(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """What a shell would do, in this process: seconds of importing torch are saved with each command."""
    assert command[0] == "rung"
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out + said.err


@pytest.mark.parametrize("name", NAMES)
def test_shell_blocks_are_run_or_say_why_not(name: str) -> None:
    for block in blocks(ROOT / name):
        if block.kind in SHELL and block.is_run:
            others = [shlex.join(words) for words in block.commands() if words[0] != "rung"]
            assert not others, f"{name}:{block.line} is not run; say why with <!-- not run: reason --> before it"
        elif block.kind in SHELL:
            assert len(block.note) > len("not run: ") + 5, f"{name}:{block.line} gives no reason"


def test_few_blocks_are_left_out() -> None:
    left_out = [f"{page.name}:{b.line} {b.note}" for page in PAGES for b in blocks(page) if not b.is_run]
    assert len(left_out) <= MOST_NOT_RUN, left_out


def test_left_out_commands_still_parse() -> None:
    """A page may not name a verb, an option or a key that does not exist, also where it cannot be run."""
    for page in PAGES:
        for block in blocks(page):
            for words in block.commands() if block.kind in SHELL and not block.is_run else ():
                if "rung" not in words[:5] or words[0] == "git":
                    continue
                verb, *rest = words[words.index("rung") + 1 :]
                assert verb in VERBS, f"{page.name}:{block.line} {verb}"
                options = {option for param in command_of(verb, rest).params for option in param.opts}
                assert {w for w in rest if w.startswith("-")} <= options, f"{page.name}:{block.line}"
                keys = [w for w in rest if "=" in w and not w.startswith("-")]
                named = (one for one in ("world", "music", "speech") if any(w.startswith(one) for w in rest))
                recipe = next(named, "piano")
                assert CliRunner().invoke(cli, ["config", recipe, *keys]).exit_code == 0, f"{page.name}:{block.line}"


def command_of(verb: str, rest: list[str]) -> click.Command:
    """The command of a verb, or of the word after it, as in `rung data show`."""
    context = click.Context(cli)
    found = cli.get_command(context, verb)
    if isinstance(found, click.Group) and rest:
        found = found.get_command(context, rest[0])
    assert found is not None
    return found


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in LINK.findall(re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)):
        if "://" in target:
            continue
        file = (page.parent / target.partition("#")[0]).resolve()
        assert file.exists(), f"{name} links to {target}"
        assert file.is_relative_to(ROOT), f"{name} links outside the project: {target}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    for page in ROOT.glob("docs/*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_explained(verb: str) -> None:
    assert any(f"rung {verb}" in page.read_text("utf-8") for page in PAGES), f"no page mentions rung {verb}"
    helped = CliRunner().invoke(cli, [verb, "--help"])
    assert helped.exit_code == 0
    assert "Example" in helped.output, f"rung {verb} --help has no example"


def test_every_recipe_has_a_page_that_the_readme_names() -> None:
    from rung.recipes import CATALOG

    readme = (ROOT / "README.md").read_text("utf-8")
    for name in CATALOG:
        assert f"rung/recipes/{name}/README.md" in readme


def test_the_readme_names_the_test_command_that_ci_runs() -> None:
    shown = [words for block in blocks(ROOT / "README.md") if block.kind in SHELL for words in block.commands()]
    assert ["make", "test"] in shown
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_examples_name_keys_that_exist() -> None:
    """Words such as `lr.min_lr` in running text are keys; one that was renamed must not stay behind in the guide."""
    from rung.recipes import CATALOG, find_recipe
    from rung.resolve import schema_of

    schemas = [schema_of(name, find_recipe(name)) for name in CATALOG]
    known = {name for schema in schemas for name in (*schema.keys, *schema.aliases, *schema.sections)}
    groups = "|".join({section for schema in schemas for section in schema.sections})
    for page in PAGES:
        for word in re.findall(rf"`((?:{groups})\.[a-z_0-9.]+)[`=]", page.read_text("utf-8")):
            assert word in known or word.endswith((".py", ".json", ".pt", ".svg")), f"{page.name} names {word}"
