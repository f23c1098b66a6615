"""If this fails, rung tells somebody to type a command that does not exist, fails, or does not do what was said.

What a finding, a check, a verdict or an error advises is taken from its fields and typed, on the run that produced it:
of a recipe and of a script. Budgets are shortened; nothing else is changed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import rung
from rung.advice import commands, in_own_words, located
from rung.cli import VERBS, cli
from rung.doctor.diagnose import diagnose
from rung.doctor.finding import Finding
from rung.doctor.history import flat, read
from rung.random import Draw
from rung.recipe import Stream
from rung.recipes import CATALOG, find_recipe
from rung.resolve import schema_of
from rung.runs.query import Run, open_run, ref
from tests.cases.case import Trained
from tests.cases.catalog import cases
from tests.cases.running import run_case
from tests.cases.tiny import Tiny
from tests.forensics.failing import train
from tests.test_docs import PAGES, SHELL, blocks
from tests.test_transcripts import FOLDER as TRANSCRIPTS
from tests.test_transcripts import READING

PACKAGE = Path(rung.__file__).parent
SHORT = ("optimizer.max_iters=30", "lr.warmup_iters=2", "eval_interval=10")


def typed(command: str) -> Result:
    words = shlex.split(command)
    assert words[0] == "rung"
    return CliRunner().invoke(cli, words[1:])


def advised(finding: Finding, run: Run) -> list[str]:
    found = finding.at(run.id, ref(run.path, run.id))
    own = [found.command(ref(run.path, run.id))]
    return [c for text in (found.probe, found.remedy, *own) for c in commands(text)]


def assert_does_what_it_says(command: str, run: Run) -> None:
    verb = command.split()[1]
    if verb == "train":
        short = [word for word in SHORT if f" {word.partition('=')[0]}=" not in command]
        done = typed(f"{command} {' '.join(short)} --no-check")
        assert done.exit_code == 0, (command, done.output, done.exception)
        child = open_run(run.id.rpartition("/")[0], run.path.parent.parent)
        assert child.document["parent"] == run.id
        keys = [word for word in shlex.split(command)[4:] if "=" in word and not word.startswith("-")]
        config = dict(flat(child.config()))
        for word in keys:
            key, _, value = word.partition("=")
            now = str(config[key]).partition(" ")[0]  # a budget says its unit
            assert float(now) == pytest.approx(float(value)) if _is_number(value) else now == value
    elif verb == "replay":
        done = typed(command + " --json")
        assert done.exit_code == 0, (command, done.output, done.exception)
        told = json.loads(done.stdout)
        assert "origin" in told or told["is_equal"]  # a cause, or the same step once more
    elif verb == "check":
        done = typed(command + " --quick --json")
        assert done.exit_code in (0, 1), (command, done.output)
        assert json.loads(done.stdout)["results"], done.exception
    elif verb == "resume":
        assert typed(command).exit_code in (0, 1)
    else:
        done = typed(command)
        assert done.exit_code == 0, (command, done.output, done.exception)


# One sick run of a recipe for each rule that can be made sick in a few seconds.
SICK = [
    ("N1", "nan feature"), ("N3", "broken weight"), ("N6", "no labels"), ("O1", "rate x 300"), ("O2", "rate / 100"),
    ("O3", "no warm-up"), ("O4", "always, adam"), ("O6", "eps 0.1"), ("O7", "twelve sigmoids"), ("O8", "slow layer"),
    ("O9", "detached"), ("A3", "attention scaled up"), ("E1", "eval of a copy of step 0"), ("C1", "control-times-0"),
    ("C3", "gain-1.6"), ("N2", "root of zero"), ("A2", "targets that a tanh cannot reach"),
]  # fmt: skip


@pytest.mark.parametrize("fault", SICK, ids=" ".join)
def test_what_findings_of_a_recipe_advise_is_typed(
    fault: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in cases() if (case.rule, case.name) == fault)
    assert isinstance(case.sick, Trained)
    monkeypatch.chdir(tmp_path)
    run = run_case(case.sick.recipe, Path("runs"), *case.sick.overrides)
    findings = diagnose(read(run))
    assert case.rule in {finding.rule for finding in findings}
    for command in dict.fromkeys(c for finding in findings for c in advised(finding, run)):
        assert_does_what_it_says(command, run)


@pytest.mark.parametrize("words", [("lr.learning_rate=1e4",), ("lr.learning_rate=10", "system.dtype=float16")])
def test_what_a_verdict_advises_heals(words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = train(Tiny, Path("runs"), "optimizer.max_iters=40", *words)
    assert run.status == "diverged"
    told = json.loads(typed(f"rung replay {run.id} --json").stdout)
    done = typed(told["command"] + " --no-check")
    assert done.exit_code == 0, done.output
    child = open_run("case", Path("runs"))
    assert (child.status, child.document["parent"]) == ("finished", run.id)
    losses = [loss for loss in child.metrics(["loss"])["loss"] if loss is not None]
    assert losses[-1] < 4.0  # 3.5 is a uniform guess


class Crashes(Tiny):
    """Its data ends after ten steps, as a file that was cut off does."""

    def streams(self) -> Mapping[str, Stream]:
        streams = dict(super().streams())
        gather = streams["train"].gather

        def cut_off(ids: np.ndarray, draw: Draw) -> dict[str, np.ndarray]:
            if draw.step >= 10:
                raise OSError("the file ends here")
            return gather(ids, draw)

        streams["train"].gather = cut_off  # type: ignore[method-assign]
        return streams


@pytest.mark.parametrize("saves", [0, 5])
def test_after_a_crash_the_command_continues_or_starts_again(
    saves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = train(Crashes, Path("runs"), "optimizer.max_iters=20", f"checkpoint.every={saves}")
    assert run.status == "crashed"
    [finding] = [finding for finding in diagnose(read(run)) if finding.rule == "R6"]
    [command] = advised(finding, run)
    assert command.split()[1] == ("resume" if saves else "train")
    monkeypatch.setattr(Crashes, "streams", Tiny.streams)  # somebody fixed the error
    done = typed(command)
    assert done.exit_code == 0, done.output
    assert open_run("case", Path("runs")).status == "finished"


SCRIPT = """
    import sys
    import torch
    import rung
    from torch import nn

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
        fault = sys.argv[1]
        lr = 1e18 if fault == "rate" else 1e-3
        if fault == "half":
            model = model.half()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=0.1 if fault == "eps" else 1e-8)
        def loss(batch):
            return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
        return model, optimizer, loss

    if __name__ == "__main__":
        fault = sys.argv[1]
        model, optimizer, loss = build()
        run = rung.init("mine", config={"lr": optimizer.param_groups[0]["lr"]}, code=False)
        guard = run.guard(model, optimizer, loss)
        for step in range(150):
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
            y = x[:, :10].argmax(1)
            if fault == "nan" and step == 20:
                x[3, 2] = float("nan")
            batch = (x.half() if fault == "half" else x, y)
            value = loss(batch)
            optimizer.zero_grad()
            value.backward()
            try:
                guard.step(value, batch)
            except rung.Diverged:
                run.finish("diverged")
                raise
            run.log({"loss": value.item()}, step=step)
        guard.wait()
        run.finish()
"""
OF_A_RECIPE = re.compile(r"rung (train|check|eval|sample|resume)|\b(lr|optimizer|system|data)\.[a-z_]+")


@pytest.mark.parametrize("fault", ["nan", "rate", "half", "eps"])
def test_what_findings_of_a_script_advise_is_typed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.setattr(sys, "argv", ["mine.py", fault])
    with contextlib.suppress(rung.Diverged):
        runpy.run_path("mine.py", run_name="__main__")
    run = open_run("mine", Path("runs"))
    findings = diagnose(read(run))
    assert findings
    typed_any = False
    for finding in findings:
        assert not OF_A_RECIPE.search(" ".join([finding.probe, finding.remedy])), finding
        assert finding.command(run.id) == ""
        for command in advised(finding, run):
            done = typed(command.replace("FILE:FUNCTION", "mine.py:build"))
            assert done.exit_code == 0, (command, done.output, done.exception)
            typed_any = True
    assert typed_any or fault == "eps"


def test_a_loop_without_a_guard_is_not_sent_to_a_replay(tmp_path: Path) -> None:
    run = rung.init("plain", config={}, runs=tmp_path, code=False)
    for step in range(30):
        run.log({"loss": float("nan") if step >= 20 else 1.0}, step=step)
    run.finish(quiet=True)
    findings = diagnose(read(open_run(run.id, tmp_path)))
    [finding] = [f for f in findings if f.rule == "N1"]
    assert finding.probe == ""
    assert commands(finding.remedy) == []
    assert "run.guard(" in finding.remedy


# What stands in the code, whether a test provokes it or not.


def strings() -> Iterator[tuple[str, str]]:
    """Each string of the package, with X where a value goes, and where it stands."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                text = node.value
            else:
                continue
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}", text
    for path in sorted((PACKAGE / "web" / "page" / "src").rglob("*.ts")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for text in re.findall(r"[\"`](rung [^\"`]*)[\"`]", line):
                yield f"{path.relative_to(PACKAGE)}:{number}", re.sub(r"\$\{[^}]*\}", "X", text)


def _of(text: str) -> list[str]:
    """In backticks, a string that is a command and nothing else, at the end of a sentence, or an example of --help."""
    quoted = re.findall(r"`(rung [a-z][^`]*)`", text)
    examples = re.findall(r"^ +(rung [a-z]+ .*?)(?: {2,}.*| \| .*)?$", text, re.M)
    is_one = re.fullmatch(r"rung [a-z]+( [\w@./:=-]+| \"[^\"]*\")*", text) is not None
    last = re.findall(r"(?:: |; )(rung [a-z]+ [^`():]*)(?: \(|$)", text) if "\n" not in text else []
    found = [*(quoted or ([text] if is_one else last)), *examples]
    parts = [part for command in found for part in command.split(" && ")]
    return [part for part in parts if part.split()[1] in (*VERBS, "X")]


COMMANDS = sorted(
    {(" ".join(command.split()), where) for where, text in strings() for command in _of(text) if "\n" not in command}
)
IDS = [where for _, where in COMMANDS]


def _words(command: str) -> list[str]:
    """Of a command as it is written, without what is optional or left out, and without `rung`."""
    command = re.sub(r"\[[^]=]*\]|(?<!=)\.\.\.|< .*|\|\| .*", "", re.sub(r"\[[^][]*\]", "", command))
    for text in (command, command.rstrip("'\" "), re.sub(r"['\"]", "", command)):
        with contextlib.suppress(ValueError):  # the end of another quotation, or one that goes on in the next string
            return shlex.split(text)[1:]
    raise AssertionError(command)


GROUPS = [verb for name in VERBS if isinstance(verb := cli.get_command(click.Context(cli), name), click.Group)]
OF_GROUPS = {name for group in GROUPS for name in group.commands}


def _verb(words: Sequence[str]) -> tuple[click.Command, click.Context, str, list[str]]:
    """What click makes of these words: the command, its context, its name with that of its group, the rest."""
    context = click.Context(cli)
    verb, rest, name = cli.get_command(context, words[0]), list(words[1:]), words[0]
    assert verb is not None, f"there is no rung {words[0]}"
    inner = click.Context(verb, parent=context, info_name=name)
    if isinstance(verb, click.Group) and rest and not rest[0].startswith("-"):
        named = verb.get_command(inner, rest[0])
        if named is not None:
            verb, rest, name = named, rest[1:], f"{name} {rest[0] if rest[0] in OF_GROUPS else 'RECIPE'}"
        else:  # a word of the user's own: rung data RECIPE, rung sweep FILE
            _, other, rest = verb.resolve_command(inner, rest)
            assert other is not None, words
            verb, name = other, f"{name} FILE"
        inner = click.Context(verb, parent=inner, info_name=words[1])
    return verb, inner, name, rest


def _options(verb: click.Command, context: click.Context, rest: Sequence[str]) -> set[str]:
    """The options among these words, by their first names; fails at one that does not exist."""
    known = {
        option: param.opts[0]
        for param in verb.get_params(context)
        for option in (*param.opts, *param.secondary_opts)
        if isinstance(param, click.Option)
    }
    given = [word.partition("=")[0] for word in rest[: rest.index("--") if "--" in rest else None] if word[:1] == "-"]
    given = [word for word in given if word != "-" and context.info_name != "tag"]  # - is a file, -old a tag
    unknown = set(given) - set(known)
    assert not unknown, f"rung {context.info_name} has no {', '.join(unknown)}"
    return {known[option] for option in given}


def test_there_are_commands_to_look_at() -> None:
    assert len(COMMANDS) > 200
    assert {where.partition(":")[0].rpartition(".")[2] for where in IDS} == {"py", "ts"}


@pytest.mark.parametrize(("command", "where"), COMMANDS, ids=IDS)
def test_a_command_that_is_written_anywhere_exists(command: str, where: str) -> None:
    words = _words(command)
    if words[0] == "X":
        return
    verb, context, name, rest = _verb(words)
    if isinstance(verb, click.Group) and not rest:
        return
    _options(verb, context, rest)
    rest = [] if name == "tag" else rest  # -TAG takes one away
    _, left, _ = verb.make_parser(context).parse_args(list(rest)) if _is_whole(rest, verb, context) else (0, [], 0)
    assert not left, f"too many arguments: {left}"
    known = _keys()
    keys = [word.partition("=")[0] for word in rest if re.match(r"[a-z_]+\.[a-z_.0-9]+=", word)]
    assert set(keys) <= known, f"no recipe has {set(keys) - known}"


@functools.cache
def _keys() -> set[str]:
    """Of all recipes, and what stands for several of them."""
    schemas = [schema_of(name, find_recipe(name)) for name in CATALOG]
    return {"preset"}.union(*({*schema.keys, *schema.aliases} for schema in schemas))


ELSEWHERE = {  # typed by tests that put the options together in other ways
    "replay": ["--build", "--debug"],  # tests/script/test_trainers.py, tests/forensics/test_replay.py
    "eval": ["--weights"], "ab": ["--on"],  # tests/cli/test_eval.py, tests/cli/test_ab.py
    "train": ["--nproc"], "resume": ["--nproc"],  # tests/engine/test_parallel.py
}  # fmt: skip


@functools.cache
def _typed() -> dict[str, set[str]]:
    """The options of every command that transcripts, pages of the guide and tests type, by verb."""
    typed = [
        *READING,
        *(line for file in TRANSCRIPTS.glob("*.txt") for line in re.findall(r"^\$ (rung .*)", file.read_text(), re.M)),
    ]
    shown = [block for page in PAGES for block in blocks(page) if block.is_run and block.kind in SHELL]
    typed += [shlex.join(words) for block in shown for words in block.commands()]
    for path in sorted(PACKAGE.parent.glob("tests/**/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
            said = [ast.literal_eval(p) if isinstance(p, ast.Constant) else "X" for p in parts]
            text = " ".join(str(part) for part in said)
            typed += [f"rung {text.removeprefix('rung ')}"] if parts and isinstance(said[0], str) else []
    found = {verb: set(options) for verb, options in ELSEWHERE.items()}
    for line in typed:
        # A list that begins with a verb's name and is no command of it, or a mistake that a transcript shows.
        with contextlib.suppress(AssertionError, click.UsageError, ValueError, IndexError):
            verb, context, name, rest = _verb(shlex.split(line)[1:])
            found.setdefault(name, set()).update(_options(verb, context, rest))
    return found


@pytest.mark.parametrize(("command", "where"), COMMANDS, ids=IDS)
def test_a_command_that_is_written_anywhere_is_typed_somewhere(command: str, where: str) -> None:
    """Its verb with each of its options: what they do is what that test is about."""
    words = _words(command)
    if words[0] == "X":
        return
    verb, context, name, rest = _verb(words)
    if not isinstance(verb, click.Group):
        assert name in _typed(), f"nothing types rung {name}"
        left = _options(verb, context, rest) - _typed()[name]
        assert not left, f"nothing types rung {name} {left}"


def _is_whole(rest: Sequence[str], verb: click.Command, context: click.Context) -> bool:
    """Whether the last option has its value: it may come from the next string."""
    takes = {o for p in verb.get_params(context) if isinstance(p, click.Option) and not p.is_flag for o in p.opts}
    return not rest or rest[-1] not in takes


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_keys_are_put_in_the_words_of_a_script() -> None:
    assert in_own_words("start it with lr.learning_rate=0.01") == "start it with the learning rate = 0.01"
    assert in_own_words("lower optimizer.beta2, or clip") == "lower beta2, or clip"
    assert in_own_words("`rung replay mine/1@3`: data.batch_size") == "`rung replay mine/1@3`: the batch size"


def test_runs_are_named_as_they_are_found_from_here() -> None:
    assert located("`rung replay a/1@3`, of a/1", "a/1", "x/a/1") == "`rung replay x/a/1@3`, of a/1"
    assert located("rung check a/1", "a/1", "x/a/1") == "rung check x/a/1"
    assert located("rung check a/12", "a/1", "x/a/1") == "rung check a/12"
