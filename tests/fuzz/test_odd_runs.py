"""If this fails, a run that holds text which steers a terminal steers it, or a folder that cannot be read hides the
runs beside it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rung.runs.files import to_json
from rung.script import current
from tests.fuzz.mutate import STEERS, nested
from tests.fuzz.test_run_files import RAW, VERBS, call, check, make_runs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_runs(tmp_path / "runs")
    return tmp_path / "runs"


def steering(value: object, keep: frozenset[str] = frozenset({"id", "kind", "status", "created", "ended"})) -> object:
    """The same document with every text that is free in it followed by what steers a terminal."""
    if isinstance(value, dict):
        return {
            k if k in WORDS else f"{k}{STEERS}": v if k in keep else steering(v) for k, v in value.items()
        }  # fmt: skip
    if isinstance(value, list):
        return [steering(one) for one in value]
    return f"{value}{STEERS}" if isinstance(value, str) else value


WORDS = {
    "schema", "uid", "id", "experiment", "number", "parent", "parent_uid", "why", "verdict", "tags", "recipe", "preset",
    "status", "command", "seed", "created", "ended", "versions", "process", "best", "last_step", "derived", "code",
    "segments", "step", "unix_s", "kind", "segment", "results", "loss", "names", "set", "rule", "severity", "title", "what",  # noqa: E501
    "since", "evidence", "text", "signal", "path", "caption", "reason", "totals", "host", "pid", "first_step", "env",
    "num_steps", "parameters", "targets_per_step", "device", "fingerprint", "lr", "learning_rate", "stage", "checkpoint",  # noqa: E501
}  # fmt: skip


def test_no_text_of_a_run_steers_the_terminal(root: Path) -> None:
    for number in ("1", "2"):
        run = root / "a" / number
        for name in ("run.json", "config.sources.json", "data.json", "definitions.json", "init.json", "env.json"):
            (run / name).write_bytes(to_json(steering(json.loads((run / name).read_bytes()))))
        for name in ("events.ndjson", "metrics/000.ndjson", "tables/000.ndjson"):
            rows = [steering(json.loads(line)) for line in (run / name).read_bytes().splitlines()]
            (run / name).write_bytes(b"".join(to_json(row) + b"\n" for row in rows))
        config = {"lr": {"learning_rate": 1e-4}, f"stage{STEERS}": STEERS, "why": f"{STEERS}{number}"}
        (run / "config.yaml").write_text(json.dumps(config))  # which is YAML too
        (run / "samples" / "00000005" / f"x{STEERS}.txt").write_text(STEERS)
        (run / "checkpoints" / f"y{STEERS}").mkdir()
    for words in VERBS:
        check(root, words)
    shown = call(root, ["show", "a/1"])[1]
    assert "␛[31m" in shown and "[U+202E]" in shown  # noqa: PT018
    rows = json.loads(call(root, ["ls", "--json"])[1])
    assert rows[0]["why"].endswith(STEERS)  # the same text, escaped


def test_errors_and_the_names_of_folders_do_not_steer_it_either(root: Path) -> None:
    (root / f"b{STEERS}" / "1").mkdir(parents=True)
    (root / f"b{STEERS}" / "1" / "run.json").write_text("{")
    for words in (*VERBS, ["show", f"no{STEERS}"], ["show", str(root / f"b{STEERS}" / "1")], ["ls", "--where", STEERS]):
        code, out, err = call(root, words)
        assert code in (0, 1, 2)
        assert not RAW.search(out + err), words


def loop(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.symlink_to(folder.name)


def deep(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(b"[" * 100_000)


def deep_fields(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"schema": 1, "id": "b/1", "tags": nested(90)}))


def looping_file(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").symlink_to("run.json")


def pipe(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.mkfifo(folder / "run.json")


def a_folder(folder: Path) -> None:
    (folder / "run.json").mkdir(parents=True)


@pytest.mark.parametrize("spoil", [loop, deep, deep_fields, looping_file, pipe, a_folder])
@pytest.mark.parametrize("where", ["b/1", "b"])
def test_a_bad_folder_is_named_and_hides_no_other(spoil: Callable[[Path], None], where: str, root: Path) -> None:
    if where == "b" and spoil is not loop:
        pytest.skip("is about the folder of a run")
    spoil(root / where)
    for words in VERBS:
        if words[0] in ("ls", "du", "tag", "sql", "gc") or words[:2] == ["report", "a"]:
            code, _, err = call(root, words)
            assert code == 0, (words, err)
            if (
                words[0] != "report"
                and words != ["gc"]
                and words[:2] != ["sql", "from notes"]
                and "--json" not in words
            ):
                assert f"{where}" in err or words[0] == "du", (words, err)
    assert [row["id"] for row in json.loads(call(root, ["ls", "--json"])[1])] == ["a/1", "a/2"]
    assert "a/2" in call(root, ["du"])[1]


@pytest.mark.parametrize("where", ["b", "b/1"])
def test_a_folder_that_may_not_be_opened_hides_no_other(
    where: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "b" / "1").mkdir(parents=True)
    (root / "b" / "1" / "run.json").write_bytes((root / "a" / "1" / "run.json").read_bytes())
    closed = os.fspath(root / where)

    def guarded(real: Callable[..., object], is_opening: bool) -> Callable[..., object]:
        """As for another user and mode 700; root, as whom tests may run, is let in everywhere."""

        def call(path: object = ".", *more: object, **named: object) -> object:
            name = os.path.abspath(os.fspath(path)) if isinstance(path, str | os.PathLike) else ""
            if name.startswith(closed + "/") or (is_opening and name == closed):
                raise PermissionError(13, "Permission denied", name)
            return real(path, *more, **named)

        return call

    for name in ("open", "scandir", "listdir"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name), True))
    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name), False))
    for words in VERBS:
        if words[0] in ("ls", "du", "tag", "sql", "gc") or words[:2] == ["report", "a"]:
            code, _, err = call(root, words)
            assert code == 0, (words, err)
    code, out, err = call(root, ["ls"])
    assert "a/2" in out
    assert where in err


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_recipe_that_leaves_is_no_success(has_begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after rung.init, which wraps sys.exit."""
    if has_begun:
        current._note_exits()
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "asks.py").write_text("exit()\n")
    (tmp_path / "starves.py").write_text("def load():\n    raise MemoryError\n\nload()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in (("leaves", "exited"), ("asks", "exited"), ("starves", "out-of-memory")):
        ended, _, err = call(tmp_path / "runs", ["config", f"{name}:Recipe"])
        assert ended == 2
        assert err.strip().endswith(f"[{code}]")
        assert f"{name}.py, line" in err
        sys.modules.pop(name, None)
