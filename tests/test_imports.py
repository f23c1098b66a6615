"""If this fails, a part of rung has come to depend on one it must not know, or a reading verb needs torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(path for path in (ROOT / "rung").rglob("*.py"))
LEAVES = {
    "errors",
    "units",
    "text",
    "parse",
    "files",
    "secrets",
    "robust",
    "random",
    "report",
    "advice",
    "lab",
}  # what everybody may use, and what uses nobody

# part -> the parts it may import besides itself and the leaves; imports inside functions count
ALLOWED = {
    "cli": None,  # everything
    "api": None,  # everything but cli, which nobody but itself may know
    "resolve": {"config", "engine", "recipe", "recipes", "runs"},
    "training": {
        "config",
        "engine",
        "recipe",
        "doctor",
        "doctor.preflight",
        "runs",
        "trackers",
        "remote",
        "resolve",
        "progress",
    },
    "evaluation": {"engine", "recipe", "runs"},
    "ranks": {"engine"},
    "progress": set(),
    "wandb": {"script"},
    "recipes": {"nn", "data", "recipe", "config"},
    "engine": {"data", "runs", "config", "recipe"},
    "nn": {"recipe"},  # for named random keys
    "data": {"recipe"},
    "recipe": {"data"},  # for the default order of rows, inside a function
    "config": set(),
    "runs": set(),
    "doctor": {"runs"},
    "doctor.preflight": {"engine", "data", "recipe", "config", "runs", "doctor"},  # looks at a model, not at a record
    "compare": {"runs", "doctor"},  # doctor: a sick run gets no verdict, and its page says so
    "trackers": {"runs"},
    "web": {"runs", "compare", "doctor", "data", "recipe"},  # data: MIDI files; recipe: the types of what is played
    "forensics": {"engine", "runs", "data", "recipe", "doctor"},  # the record of a run, which weighs rival causes
    "bench": None,  # measures everything
    "script": {"engine", "forensics", "runs", "data", "recipe", "doctor", "trackers"},  # the last two on demand
    "sweep": {"config", "runs"},
    "remote": {"runs"},
    **{leaf: set() for leaf in LEAVES},
}
WITHOUT_TORCH = {"runs", "compare", "trackers", "doctor", "web", "sweep", "remote", "config", *(LEAVES - {"random"})}


def part_of(module: str) -> str:
    first, second = [*module.split("."), "", ""][1:3]
    return f"{first}.{second}" if f"{first}.{second}" in ALLOWED else first


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, wherever in it: `from rung import config` is rung.config."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: rung imports by full names"
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "rung" else [str(node.module)]
            yield from ((node.lineno, name) for name in names)


def complaints(path: Path) -> Iterator[str]:
    own_name = name_of(path)
    own = part_of(own_name)
    if own in ("", "__main__"):
        return
    allowed = ALLOWED.get(own, set())
    for line, module in imports(path):
        if module.partition(".")[0] != "rung" or module == "rung.__version__":
            continue
        part = part_of(module)
        if part == "cli" != own:
            yield f"{own_name}:{line} imports {module}; only the command line knows the command line"
        if allowed is None:
            continue
        if part not in {own, *allowed, *LEAVES}:
            yield f"{own_name}:{line} imports {module}, but {own} may only know {', '.join(sorted(allowed | LEAVES))}"
        inside = own_name.split(".")[2:3]
        if own == part == "recipes" and module.split(".")[2:3] != inside:
            yield f"{own_name}:{line} imports {module}; recipes do not know each other, nor the catalog"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    assert list(complaints(path)) == []


def test_the_rule_sees_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these would be a fault; a rule that finds none of them proves nothing."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    faults = {
        "rung/engine/a.py": "def f():\n    from rung.nn.attention import Rope",
        "rung/engine/b.py": "import rung.recipes.piano.model",
        "rung/recipes/piano/a.py": "from rung.recipes.text import model",
        "rung/recipes/piano/b.py": "from rung import engine",
        "rung/recipes/piano/c.py": "from rung.recipes import CATALOG",
        "rung/runs/a.py": "from rung.engine.config import Engine",
        "rung/units.py": "if TYPE_CHECKING:\n    from rung.config import key",
        "rung/api.py": "def f():\n    from rung.cli.train import command",
    }
    right = {
        "rung/recipes/piano/d.py": "from rung.recipes.piano import model\nfrom rung.nn import rope\nimport numpy",
        "rung/recipes/__init__.py": "from rung.recipe import Recipe",
        "rung/runs/b.py": "from rung import __version__",
        "rung/cli/a.py": "from rung.recipes.piano import model\nfrom rung import api",
    }
    for name, text in (faults | right).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {name: list(complaints(tmp_path / name)) for name in faults | right}
    assert {name for name, lines in found.items() if lines} == set(faults)


def test_every_part_has_a_rule() -> None:
    parts = {part_of(name_of(path)) for path in MODULES} - {"", "__main__"}
    assert parts <= set(ALLOWED), f"say in tests/test_imports.py what {sorted(parts - set(ALLOWED))} may import"


@pytest.mark.parametrize("path", [p for p in MODULES if part_of(name_of(p)) in WITHOUT_TORCH], ids=name_of)
def test_no_torch_where_runs_are_read(path: Path) -> None:
    assert [module for _, module in imports(path) if module.partition(".")[0] == "torch"] == []


def run(code: str, cwd: Path) -> str:
    """Runs code in a fresh interpreter and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("words", [["--help"], ["ls", "--help"], ["show", "--help"]], ids=" ".join)
def test_help_imports_neither_torch_nor_numpy(words: list[str], tmp_path: Path) -> None:
    code = f"""
import contextlib, io, sys
from rung.cli import main
sys.argv = ["rung", *{words!r}]
with contextlib.redirect_stdout(io.StringIO()) as out:
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
assert "Usage" in out.getvalue()
print([name for name in ("torch", "numpy") if name in sys.modules])
"""
    assert run(code, tmp_path).strip() == "[]"


def test_reading_verbs_work_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = None
from click.testing import CliRunner
from rung.cli import cli
for words in (["ls"], ["recipes"], ["config", "piano"], ["config", "--markdown"], ["train", "--help"]):
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
print("fine")
"""
    assert run(code, tmp_path).strip() == "fine"


def test_importing_every_module_does_nothing_else(tmp_path: Path) -> None:
    """It prints nothing, leaves no file, seeds nothing, and edits neither the path nor the environment."""
    names = [name for name in map(name_of, MODULES) if name != "rung.__main__"]
    code = f"""
import os, random, sys, threading, warnings
import numpy, torch
def world():
    return (list(sys.path), dict(os.environ), random.getstate(), str(numpy.random.get_state()),
            torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_default_dtype(),
            threading.active_count(), list(warnings.filters), os.getcwd())
before = world()
import importlib
for name in {names!r}:
    importlib.import_module(name)
    assert world() == before, name
"""
    assert run(code, tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_only_text_and_progress_print() -> None:
    """What is printed elsewhere would reach the terminal as somebody else wrote it."""
    found = []
    for path in MODULES:
        if name_of(path) in ("rung.text", "rung.progress"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write") or called == "print":
                    found.append((name_of(path), node.lineno, called))
    assert [(name, called) for name, _, called in found] == [("rung.script.never_raise", "sys.stderr.write")], found


def test_only_parse_decodes_what_others_wrote() -> None:
    decoders = {"json.loads", "json.load", "yaml.load", "yaml.safe_load", "msgspec.json.decode"}
    found = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in decoders and name_of(path) != "rung.parse":
                found.add((name_of(path), ast.unparse(node.func)))
    assert found == {
        ("rung.web.walk", "msgspec.json.decode"),  # into its own type, 64 kB at most
        ("rung.data.store", "json.loads"),  # what it has just written; so has the next
        ("rung.engine.build", "json.loads"),
        ("rung.runs.sql", "json.loads"),  # DuckDB's own plan
        ("rung.recipes.world.walk.recorder", "json.loads"),  # our own child's job
        ("rung.recipes.speech.sources.synthesiser", "json.loads"),
    }
