"""If this fails, one odd file in a run folder ends `rung ls` or another reading verb in a traceback, hides the other
runs, or steers the reader's terminal."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.cli import main
from rung.runs.record import Record
from tests.fuzz.mutate import as_json, damaged, documents, fuzzed

RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
VERBS = [
    ["ls"], ["ls", "--json"], ["ls", "--tree"], ["ls", "--changed"], ["ls", "--group"], ["ls", "--group", "--json"],
    ["ls", "--where", "lr.learning_rate>1e-5", "--sort", "min:loss"],
    ["ls", "--columns", "status,derived.num_steps,tags,why"],
    ["show", "a/1"], ["show", "a/1", "--json"], ["metrics", "a/1"], ["metrics", "a/1", "--json"],
    ["metrics", "a/1", "loss"], ["metrics", "a/1", "--evals"], ["diff", "a/1", "a/2"], ["diff", "a/2", "a/1", "--json"],
    ["doctor", "a/1", "--all"], ["doctor", "a/1", "--json"], ["report", "a/1", "--stdout"], ["report", "a", "--stdout"],
    ["du"], ["du", "--json"], ["tag"], ["gc"], ["gc", "--checkpoints", "--derived", "--json"], ["verdict", "a/1"],
    ["pin", "a/1"], ["note", "a/1"], ["rm", "a/1", "--dry-run"],
    *(["sql", f"from {name}"] for name in ("runs", "config", "summaries", "evals", "events", "notes", "metrics")),
]  # fmt: skip


def make_runs(root: Path) -> None:
    config = {"lr": {"learning_rate": 1e-4, "schedule": "cosine"}, "stage": "train", "seed": 7}
    for why in ("a base", "a change"):
        record = Record.create(
            root, "a", recipe="piano", preset="tiny", command=["rung", "train"], seed=7, config=config,
            sources={"lr.learning_rate": "command line"}, data={"train": {"fingerprint": "7c1e", "rows": 100}},
            derived={"targets_per_step": 4096, "num_steps": 40, "parameters": 1000, "device": "cpu", "epoch_rows": 100},
            definitions={"eval/val": {"mask": "all", "set": "val"}}, initial_weights={"w": {"shape": [2], "sum": 1.0}},
            why=why, tags=["base"], parent=None if why == "a base" else "a/1",
        )  # fmt: skip
        for step in range(40):
            record.log(step, {"loss": 5 - step / 20, "norm": 1.0, "lr": 1e-4, "step_s": 0.1, "targets": 9})
            if step % 10 == 0:
                record.event("eval", step, results={"val": {"loss": 5 - step / 20, "loss_se": 0.1, "targets": 100}})
                record.table("tensors", step, ["w", "b"], {"grad": [1.0, 2.0], "update_ratio": [1e-3, 2e-3]})
        record.event("finding", 3, rule="N1", severity="warn", title="t", what="w", since=3, evidence=["e"])
        record.event("note", text="a note")
        record.event("spike", 5, signal="norm", value=3.0, score=9.0)
        record.add_sample(5, "a.txt", b"a sample", caption="a caption")
        save = record.path / "checkpoints" / "00000030"
        save.mkdir(parents=True)
        (save / "manifest.json").write_text('{"step": 30, "files": {}}')
        (save.parent / "best").write_text("30\n")
        best = {"step": 30, "set": "val", "loss": 3.5}
        record.finish("finished", best=best, reason="", totals={"step": 40, "targets": 360, "elapsed_s": 4.0})


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("valid") / "runs"
    make_runs(root)
    return root


def call(root: Path, words: Sequence[str]) -> tuple[int, str, str]:
    """rung as the command line calls it; whatever is neither an answer nor a sentence is raised."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["rung", *words])
        patch.setenv("RUNG_RUNS", str(root))
        patch.chdir(root.parent)
        try:
            main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


def check(root: Path, words: Sequence[str]) -> None:
    code, out, err = call(root, words)
    assert code in (0, 1, 2), (words, code)
    raw = RAW.search(out + err)
    assert raw is None, (words, (out + err)[max(0, raw.start() - 60) : raw.start() + 20])
    if code == 2:
        assert err.startswith("rung: "), err
    if words[0] in ("ls", "du", "tag", "sql", "gc") and "--where" not in words:
        assert code == 0, (words, err)
    if words == ["ls", "--json"]:
        assert "a/2" in [row["id"] for row in json.loads(out)]


def fuzz_file(valid: Path, folder: Path, name: str, data: bytes, verbs: Sequence[Sequence[str]]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(valid, folder / "runs")
    (folder / "runs" / "a" / "1" / name).write_bytes(data)
    for words in verbs:
        check(folder / "runs", words)
    assert sorted(path.name for path in folder.iterdir()) == ["runs"]
    assert sorted(path.name for path in (folder / "runs").iterdir() if not path.name.startswith(".")) == ["a"]


def as_lines(rows: Any) -> bytes:
    return b"".join(as_json(row) + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


DOCUMENTS = ["run.json", "config.sources.json", "data.json", "definitions.json", "init.json", "env.json"]
LINES = ["events.ndjson", "metrics/000.ndjson", "tables/000.ndjson"]
OTHERS = ["config.yaml", "checkpoints/best", "metrics/columns/index.json", ".config.json"]
# What the fuzzer, or a person, has found.
FOUND: dict[str, list[tuple[bytes, list[list[str]]]]] = {
    "run.json": [(b"[" * 5000, [["ls"]]), (b"[]", [["ls"]]), (b"3", [["ls"]]), (b"null", [["du"]]), (b"{}", [["tag"]])],
    "config.sources.json": [
        (b'{"lr.learning_rate": {"a": 1}}', [["show", "a/1"]]),
        (b"[" * 5000, [["diff", "a/1", "a/2"]]),
    ],
    "config.yaml": [(b"", [["diff", "a/1", "a/2"], ["show", "a/1"]]), (b"a: &a [*a]", [["ls", "--changed"]])],
    "tables/000.ndjson": [
        (b'{"kind":"tensors","names":["w","b"]}\n{"kind":"tensors","step":3,"grad":[1.0]}\n', [["doctor", "a/1"]])
    ],
    "metrics/000.ndjson": [
        (b'{"step":1,"loss":' + b"[" * 5000 + b"\n", [["metrics", "a/1", "loss"], ["sql", "from metrics"]])
    ],
}
some_verbs = st.lists(st.sampled_from(VERBS), min_size=1, max_size=2)


@pytest.mark.parametrize("name", [*DOCUMENTS, *LINES, *OTHERS])
def test_no_file_of_a_run_ends_a_verb_in_a_traceback(name: str, valid: Path, tmp_path: Path) -> None:
    call(valid, ["ls", "--where", "lr.learning_rate>0", "--sort", "min:loss"])  # leaves the derived files
    data = (valid / "a" / "1" / name).read_bytes()
    if name in DOCUMENTS:
        changed = st.one_of(documents(json.loads(data)).map(as_json), damaged(data))
    elif name in LINES:
        rows = [json.loads(line) for line in data.splitlines()]
        changed = st.one_of(documents(rows).map(as_lines), damaged(data))
    else:
        changed = damaged(data)

    @fuzzed(40)  # each calls one or two verbs
    @given(changed, some_verbs)
    def run(data: bytes, verbs: list[list[str]]) -> None:
        fuzz_file(valid, tmp_path / "f", name, data, verbs)

    for found, verbs in FOUND.get(name, ()):
        fuzz_file(valid, tmp_path / "f", name, found, verbs)
    run()
