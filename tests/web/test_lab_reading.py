"""If this fails, the page of the lab says something else than the verbs do, or hides a run that cannot be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from rung.cli import cli
from rung.runs.record import amend, append_event
from tests.web.labs import ServedLab, start, write_book


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lab") / "runs"
    write_book(root, num_steps=60)
    return root


@pytest.fixture(scope="module")
def lab(root: Path) -> Iterator[ServedLab]:
    served = ServedLab(root)
    yield served
    served.stop()


def said(root: Path, *words: str) -> Any:
    """What a verb prints as JSON."""
    ended = CliRunner().invoke(cli, [*words, "--json", "--runs", str(root)])
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


def test_the_table_says_what_ls_says(lab: ServedLab, root: Path) -> None:
    rows = lab.get("/api/runs")["runs"]
    listed = said(root, "ls")
    assert [row["run"] for row in rows] == [one["id"] for one in listed]
    for row, one in zip(rows, listed, strict=True):
        for name in ("status", "best", "parent", "why", "tags", "seed", "recipe", "experiment", "number"):
            assert row[name] == one[name], name
        assert row["steps"] == one["step"]
        assert row["loss"] == (one["best"] or {}).get("loss")
    by_id = {row["run"]: row for row in rows}
    assert by_id["piano/2"]["changed"] == [["optimizer.grad_clip", 1.0, 0.5]]
    assert [by_id[f"piano/{n}"]["depth"] for n in (1, 2, 3, 4, 5)] == [0, 1, 2, 2, 1]
    assert by_id["piano/1"]["note"] == "the loss is **still** falling at the end"
    assert (by_id["piano/2"]["verdict"], by_id["piano/2"]["verdict_text"]) == ("supported", "lower")
    assert by_id["piano/1"]["wall_s"] == 12.5


@pytest.mark.parametrize(
    ("query", "runs"),
    [
        ("status=diverged", ["piano/5"]),
        ("optimizer.grad_clip<1 and seed=7", ["piano/2"]),
        ("tag=keep", ["piano/2"]),
        ("last:loss>0 and recipe=piano", ["piano/1", "piano/2", "piano/3", "piano/4"]),
        ("/higher|clip/", ["piano/2", "piano/5"]),
        ("still", ["piano/1"]),
        ("MNIST", ["mnist/1"]),
        ("/^mnist/", ["mnist/1"]),
    ],
)
def test_runs_are_found_by_conditions_expressions_and_words(lab: ServedLab, query: str, runs: list[str]) -> None:
    found = {row["run"] for row in lab.get(f"/api/runs?query={quote(query)}")["runs"]}
    assert found == set(runs)


def test_columns_sorting_and_groups(lab: ServedLab, root: Path) -> None:
    found = lab.get("/api/runs?experiment=piano&columns=lr.learning_rate,min:loss&sort=-min:loss&group=1")
    listed = said(root, "ls", "piano", "--columns", "lr.learning_rate,min:loss", "--sort", "min:loss", "--reverse")
    assert [row["run"] for row in found["runs"]] == [one["id"] for one in listed]
    assert [row["values"] for row in found["runs"]] == [one["columns"] for one in listed]
    order = ["--sort", "min:loss", "--reverse"]
    assert found["groups"] == said(root, "ls", "piano", "--group", "--columns", "lr.learning_rate,min:loss", *order)
    seeds = next(group for group in found["groups"] if group["n"] == 3)
    assert sorted(seeds["runs"]) == ["piano/1", "piano/3", "piano/4"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/api/runs?columns=lr.learning_rat", 400, "no-key"),
        ("/api/runs?sort=nothing", 400, "no-key"),
        ("/api/runs?query=/(/", 400, "bad-value"),
        ("/api/run/piano/99", 404, "no-run"),
        ("/api/curve?runs=piano/1", 400, "missing-metric"),
        ("/api/curve?metric=loss", 400, "missing-run"),
        ("/api/curve?metric=loss&runs=piano/1&points=x", 400, "bad-value"),
        ("/api/layers/piano/1?kind=none", 404, "no-metric"),
        ("/api/diff?a=piano/1", 400, "missing-run"),
        ("/api/ab?a=piano/1&b=piano/1", 400, "options-conflict"),
    ],
)
def test_a_mistake_is_a_sentence_with_a_code(lab: ServedLab, path: str, status: int, code: str) -> None:
    answer = lab.ask(path)
    assert (answer.status, answer.code) == (status, code)
    assert len(answer.json["error"]) > 10


@pytest.mark.parametrize("run", ["piano/1", "piano/5", "mnist/1"])
def test_a_run_and_its_findings_are_those_of_the_verbs(lab: ServedLab, root: Path, run: str) -> None:
    shown = said(root, "show", run)
    found = lab.get(f"/api/run/{run}")
    assert found["metrics"] == list(shown["metrics"])
    for name in ("disk_bytes",):  # copies that readers leave behind count
        shown.pop(name)
    assert {name: found[name] for name in shown if name != "metrics"} == {
        name: value for name, value in shown.items() if name != "metrics"
    }
    assert found["summary"] == shown["metrics"]
    findings = lab.get(f"/api/doctor/{run}")
    more = ("captures", "replays")
    assert {name: findings[name] for name in findings if name not in more} == said(root, "doctor", run)


def test_captures_come_with_their_command_and_what_a_replay_found(tmp_path: Path) -> None:
    record = start(tmp_path / "runs")
    for step in (20, 3):
        folder = record.path / "captures" / f"{step:08d}"
        folder.mkdir(parents=True)
        (folder / "facts.json").write_text("{}")
    record.finish("diverged")
    append_event(record.path, "replay", step=3, text="first look")
    append_event(record.path, "replay", step=3, text="overflow  sure  step 3")
    served = ServedLab(tmp_path / "runs")
    found = served.get("/api/doctor/piano/1")
    assert [(one["step"], one["files"]) for one in found["captures"]] == [
        (3, ["captures/00000003/facts.json"]),
        (20, ["captures/00000020/facts.json"]),
    ]
    assert found["captures"][0]["command"].endswith("piano/1@3")
    assert [(one["step"], one["text"]) for one in found["replays"]] == [(3, "overflow  sure  step 3")]
    served.stop()


def test_a_comparison_is_that_of_the_verbs(lab: ServedLab, root: Path) -> None:
    assert lab.get("/api/diff?a=piano/1&b=piano/2") == said(root, "diff", "piano/1", "piano/2")
    judged = said(root, "ab", "--judge", "piano/1", "--", "piano/2")
    assert lab.get("/api/ab?a=piano/1&b=piano/2") == judged


def test_a_damaged_run_is_named_and_hides_no_other(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for _ in range(3):
        start(root).finish("finished")
    (root / "piano" / "2" / "run.json").write_text("{")
    served = ServedLab(root)
    found = served.get("/api/runs")
    assert [row["run"] for row in found["runs"]] == ["piano/1", "piano/3"]
    assert ["piano/2" in one["message"] for one in found["errors"]] == [True]
    assert served.get("/api/lab")["experiments"] == [{"name": "piano", "num_runs": 2}]
    served.stop()


def test_a_lab_without_runs_is_empty_and_no_error(tmp_path: Path) -> None:
    served = ServedLab(tmp_path / "runs")
    assert served.get("/api/runs") == {"runs": [], "errors": []}
    about = served.get("/api/lab")
    assert (about["experiments"], about["columns"], about["can_write"]) == ([], {"config": [], "metrics": []}, True)
    served.stop()


def test_what_changes_on_disk_is_in_the_next_answer(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    start(root).finish("finished")
    served = ServedLab(root)
    assert served.get("/api/runs")["runs"][0]["tags"] == []
    amend(root / "piano" / "1", tags=["new"])
    assert served.get("/api/runs")["runs"][0]["tags"] == ["new"]
    start(root).finish("stopped")
    assert [row["status"] for row in served.get("/api/runs")["runs"]] == ["finished", "stopped"]
    shutil.rmtree(root / "piano" / "1")
    assert [row["run"] for row in served.get("/api/runs")["runs"]] == ["piano/2"]
    served.stop()


def test_the_step_clock_adds_up(tmp_path: Path) -> None:
    """Of a step of 100 ms 40 are waiting and 50 the model; every tenth step is followed by an eval of 500 ms."""
    record = start(tmp_path / "runs")
    for step in range(120):
        parts = {"step_s": 0.1, "wait_s": 0.04, "forward_backward_s": 0.05, "update_s": 0.01, "other_s": 0.0}
        record.log(step, {**parts, "eval_s": 0.5 if step % 10 == 0 else 0.0})
    record.finish("finished")
    served = ServedLab(tmp_path / "runs")
    found = served.get("/api/clock/piano/1")
    assert (found["num_steps"], found["num_left_out"]) == (100, 20)
    assert found["step_ms"] == pytest.approx(100)
    parts = {part["name"]: part for part in found["parts"]}
    assert parts["wait"]["mean_ms"] == pytest.approx(40)
    assert parts["wait"]["share"] == pytest.approx(0.4)
    assert sum(part["mean_ms"] for part in found["parts"] if part["is_of_step"]) == pytest.approx(100)
    # 10 s of steps and 5 s of evals: without waiting 11 s are left of 15, without evals 10.
    gains = {gain["name"]: gain["speedup"] for gain in found["gains"]}
    assert gains == {"eval": pytest.approx(1.5), "wait": pytest.approx(15 / 11)}
    served.stop()


def test_a_heat_map_shows_the_highest_of_the_steps_that_share_a_column(tmp_path: Path) -> None:
    record = start(tmp_path / "runs")
    for step in range(1000):
        record.table("tensors", step, ["a", "b"], {"grad": [99.0 if step == 777 else 1.0, float(step)]})
    record.finish("finished")
    served = ServedLab(tmp_path / "runs")
    found = served.get("/api/layers/piano/1")
    assert (found["kind"], found["metric"], found["layers"]) == ("tensors", "grad", ["a", "b"])
    assert len(found["steps"]) == len(found["values"][0]) == 400
    assert max(found["values"][0]) == 99.0
    assert (found["steps"][0], max(found["values"][1])) == (0, 999.0)
    served.stop()


def test_samples_of_every_kind_and_the_notes_of_a_tune(lab: ServedLab) -> None:
    found = lab.get("/api/samples?runs=piano/1,piano/2")["samples"]
    kinds = {(one["run"], one["name"]): one["kind"] for one in found}
    assert {name: kind for (run, name), kind in kinds.items() if run == "piano/1"} == {
        "sample.txt": "text", "tune.mid": "midi", "tune.wav": "audio", "sheet.png": "image", "walk.webp": "film",
    }  # fmt: skip
    tune = next(one for one in found if one["name"] == "tune.mid" and one["step"] == 30)
    # Quarter notes at 120 a minute, one after the other.
    assert tune["notes"] == [[0.0, 0.5, 66, 80], [0.5, 1.0, 64, 80], [1.0, 1.5, 67, 80]]
    text = next(one for one in found if one["name"] == "sample.txt" and one["step"] == 30)
    assert (text["text"], text["caption"]) == ("what it says at step 30\n", "a text")
    for one in found:
        assert len(lab.ask(f"/{one['url']}").body) == one["num_bytes"]
    part = lab.ask(f"/{next(one['url'] for one in found if one['kind'] == 'audio')}", Range="bytes=0-3")
    assert (part.status, part.body) == (206, b"RIFF")  # a player seeks in it


def test_tables_histograms_pictures_and_sounds_of_a_loop_of_ones_own(lab: ServedLab) -> None:
    found = {one["name"]: one for one in lab.get("/api/tables/mnist/1")}
    assert {name: one["kind"] for name, one in found.items()} == {
        "click.wav": "audio", "confusion": "table", "digit.png": "image", "weights": "histogram",
    }  # fmt: skip
    assert found["confusion"]["columns"] == ["digit", "right", "note"]
    assert found["confusion"]["rows"] == [[0, 0.9, "<b>round</b>"], [1, 0.97, "thin"]]
    assert (found["weights"]["edges"], found["weights"]["counts"]) == ([-1, 0, 1, 2], [3, 9, 4])


def test_a_sample_that_is_not_what_it_says_spoils_nothing(tmp_path: Path) -> None:
    record = start(tmp_path / "runs", recipe="own loop")
    record.add_sample(0, "torn.mid", b"MThd\0\0")
    record.add_sample(0, "odd.table.json", b'{"rows": 3}')
    record.add_sample(0, "odd.histogram.json", b"[")
    record.add_sample(0, "fine.txt", b"fine")
    record.finish("finished")
    served = ServedLab(tmp_path / "runs")
    found = {one["name"]: one for one in served.get("/api/samples?runs=piano/1")["samples"]}
    assert found["torn.mid"]["notes"] == []
    assert "MIDI" in found["torn.mid"]["problem"]
    assert found["fine.txt"]["text"] == "fine"
    assert ["problem" in one for one in served.get("/api/tables/piano/1")] == [True, True]
    served.stop()
