"""If this fails, a run is shown below a parent it does not have, or a change that was taken back seems to hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.compare.lineage import chain, change_spans, find_parent, find_parents, settings, short_change, tree_lines
from rung.report.blocks import inline
from rung.runs import query
from rung.runs.query import Run, list_runs, open_run
from rung.runs.record import amend, read_document
from tests.compare.made import CONFIG, changed

Make = Callable[..., Run]


def states(run: Run) -> dict[str, str]:
    """The settings of a page as text -> state, without those of the first run."""
    found = [one for one in settings(chain(run)) if not one.is_start]
    return {f"{one.run} {one.difference.name}": one.state for one in found}


def test_a_chain_leads_to_the_first_run(make: Make) -> None:
    make()
    make(parent="piano/1")
    last = make(parent="piano/2")
    assert [link.run.id for link in chain(last)] == ["piano/1", "piano/2", "piano/3"]


def test_a_parent_that_is_gone_is_told(make: Make) -> None:
    make()
    run = make(parent="piano/1")
    shutil.rmtree(run.path.parent / "1")
    found = chain(run)
    assert [link.run for link in found] == [run]
    assert "piano/1 is not among the runs" in found[0].problem
    assert tree_lines([run])[0] == "[piano/1]"
    assert "piano/2" in tree_lines([run])[1]


def test_parents_in_a_cycle_end(make: Make) -> None:
    first = make()
    second = make(parent="piano/1")
    document = json.loads((second.path / "run.json").read_text())
    amend(first.path, parent="piano/2", created=document["created"])
    run = open_run("piano/2", first.path.parent.parent)
    found = chain(run)
    assert [link.run.id for link in found] == ["piano/1", "piano/2"]
    assert "cycle" in found[0].problem
    lines = tree_lines(list_runs(first.path.parent.parent))
    assert sorted(line.split()[0].strip("└") or line.split()[1] for line in lines) == ["piano/1", "piano/2"]
    assert "cycle" in lines[0]


def test_a_run_that_is_its_own_parent(make: Make) -> None:
    run = make()
    amend(run.path, parent="piano/1")
    again = open_run(run.path, run.path.parent.parent)
    assert [link.run.id for link in chain(again)] == ["piano/1"]
    assert len(tree_lines([again])) == 1


def test_a_damaged_parent_is_told(make: Make) -> None:
    first = make()
    run = make(parent="piano/1")
    (first.path / "run.json").write_text("{")
    assert "cannot be read" in find_parent(run).problem
    (first.path / "run.json").write_text(json.dumps({"schema": 99, "id": "piano/1"}))
    assert "newer rung" in find_parent(run).problem
    assert str(run.path.parent.parent) not in find_parent(run).problem


def test_a_namesake_that_is_younger_is_no_parent(make: Make) -> None:
    """Two runs folders may both have a piano/1; one that began after its child is another run."""
    first = make()
    run = make(parent="piano/1")
    amend(first.path, created="2099-01-01T00:00:00.000Z")
    amend(run.path, parent_uid=None)  # as an older rung wrote it; else the uid tells
    found = find_parent(open_run(run.id, run.path.parent.parent))
    assert found.parent is None
    assert "began after" in found.problem


def test_a_parent_that_was_moved_is_found(make: Make) -> None:
    first = make()
    make(parent="piano/1")
    moved = first.path.parent.parent / "bach" / "4"
    moved.parent.mkdir()
    shutil.move(first.path, moved)
    found = find_parent(open_run("piano/2", moved.parent.parent))
    assert found.parent is not None
    assert (found.parent.path, found.parent.id, found.problem) == (moved, "bach/4", "")


def test_another_run_of_the_name_of_the_parent_is_not_the_parent(make: Make) -> None:
    first = make()
    run = make(parent="piano/1")
    amend(first.path, uid="0" * 32)  # as where the child was brought to a folder that had a piano/1
    found = find_parent(open_run(run.id, run.path.parent.parent))
    assert found.parent is None
    assert "not among the runs" in found.problem


def test_settings_are_new_held_replaced_or_reverted(make: Make) -> None:
    make()
    make(parent="piano/1", config=changed(CONFIG, optimizer__grad_clip=10.0, lr__learning_rate=0.001))
    third = make(parent="piano/2", config=changed(CONFIG, optimizer__grad_clip=5.0, lr__learning_rate=0.001))
    assert states(third) == {
        "piano/2 optimizer.grad_clip": "replaced",
        "piano/2 lr.learning_rate": "holds",
        "piano/3 optimizer.grad_clip": "new",
    }
    fourth = make(parent="piano/3", config=changed(CONFIG, optimizer__grad_clip=5.0))
    assert states(fourth) == {
        "piano/2 optimizer.grad_clip": "replaced",
        "piano/2 lr.learning_rate": "reverted",
        "piano/3 optimizer.grad_clip": "holds",
        "piano/4 lr.learning_rate": "new",
    }


def test_what_the_first_run_set_is_part_of_the_list(make: Make) -> None:
    make(sources={"optimizer.grad_clip": "preset tiny", "lr.learning_rate": "default"})
    run = make(parent="piano/1", config=changed(CONFIG, optimizer__grad_clip=10.0))
    first = [one for one in settings(chain(run)) if one.is_start]
    assert [(one.difference.name, one.difference.after, one.state, one.by) for one in first] == [
        ("optimizer.grad_clip", 1.0, "replaced", "piano/2")
    ]


def test_code_that_was_taken_back_is_struck(make: Make, repo: Path) -> None:
    make(code_root=repo)
    (repo / "model.py").write_text("WIDTH = 64\nDEPTH = 2\n")
    (repo / "new.py").write_text("x = 1\n")
    second = make(parent="piano/1", code_root=repo)
    assert states(second) == {"piano/2 model.py": "new", "piano/2 new.py": "new"}
    (repo / "model.py").write_text("WIDTH = 32\nDEPTH = 2\n")
    (repo / "new.py").write_text("x = 2\n")
    third = make(parent="piano/2", code_root=repo)
    assert states(third) == {
        "piano/2 model.py": "reverted",
        "piano/2 new.py": "holds",
        "piano/3 model.py": "new",
        "piano/3 new.py": "new",
    }


def test_a_change_in_words(make: Make, tmp_path: Path) -> None:
    make()
    link = find_parent(make(parent="piano/1", config=changed(CONFIG, optimizer__grad_clip=0.5)))
    assert inline(change_spans(link.changes[0])) == "`optimizer.grad_clip` `1.0` → `0.5`"
    assert short_change(link) == "grad_clip 1.0 → 0.5, code unknown"
    (link.run.path / "config.yaml").write_text("a: [")
    assert "cannot be read" in short_change(find_parent(open_run(link.run.path, tmp_path)))


def test_the_tree(make: Make, repo: Path) -> None:
    make(code_root=repo)
    make(parent="piano/1", config=changed(CONFIG, optimizer__grad_clip=0.5), code_root=repo)
    run = make(parent="piano/2", losses=(4.0, float("nan")), every=20, code_root=repo)
    make(parent="piano/1", config=changed(CONFIG, lr__learning_rate=0.1), status="crashed", code_root=repo)
    amend(run.path, verdict={"word": "refuted", "text": "no\nuse \x1b[31m", "unix_s": 1.0})
    root = run.path.parent.parent
    assert tree_lines(list_runs(root)) == [
        "piano/1      finished  2.4000",
        "├ piano/2    finished  2.4000  grad_clip 1.0 → 0.5",
        "│ └ piano/3  finished     NaN  grad_clip 0.5 → 1.0  (refuted)",
        "└ piano/4    crashed   2.4000  learning_rate 0.002 → 0.1",
    ]


def test_a_very_long_chain(make: Make, tmp_path: Path) -> None:
    """Deeper than Python's own stack."""
    runs: list[Run] = []
    root = tmp_path / "long"
    for number in range(1, 1501):
        document: dict[str, Any] = {
            "schema": 1,
            "id": f"long/{number}",
            "parent": f"long/{number - 1}" if number > 1 else None,
        }
        path = root / "long" / str(number)
        path.mkdir(parents=True)
        (path / "run.json").write_text(json.dumps({**document, "status": "finished"}))
        runs.append(Run(path, {**document, "status": "finished"}))
    assert len(chain(runs[-1])) == 1500
    assert len(tree_lines(runs[:1200])) == 1200


@pytest.mark.parametrize("parent", ["../../etc", "/etc/passwd", "a\x00b", "x" * 5000, "piano", "", 7, ["piano/1"]])
def test_an_odd_parent_is_not_followed(make: Make, parent: Any) -> None:
    run = make()
    amend(run.path, parent=parent)
    again = open_run(run.path, run.path.parent.parent)
    assert find_parent(again).parent is None
    assert tree_lines([again])


def test_many_runs_whose_parents_are_gone_are_looked_for_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        make("piano", losses=(), parent=f"gone/{number}")
    root = make("bach").path.parent.parent
    calls: list[Path] = []

    def counting(path: Path) -> dict[str, Any]:
        calls.append(path)
        return read_document(path)

    monkeypatch.setattr(query, "read_document", counting)
    assert len(tree_lines(list_runs(root, "piano"))) == 8
    assert len(calls) == 4 + 5, "those that were asked for, and once all"
    calls.clear()
    assert len(tree_lines(list_runs(root))) == 9
    assert len(calls) == 5


def test_a_tree_reads_no_rows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    make(parent="piano/1", config=changed(CONFIG, optimizer__grad_clip=0.5))
    monkeypatch.setattr(Run, "metrics", lambda *_: pytest.fail("rows were read"))
    lines = tree_lines(list_runs(make(parent="piano/2").path.parent.parent))
    assert "grad_clip 1.0 → 0.5" in lines[1]


def test_a_parent_is_the_run_that_was_listed(make: Make) -> None:
    """Else its config and its evals are read once for each child."""
    runs = [make(), make(parent="piano/1"), make(parent="piano/1")]
    assert [link.parent for link in find_parents(runs)] == [None, runs[0], runs[0]]


def test_one_damaged_run_does_not_end_the_tree(make: Make) -> None:
    first = make()
    second = make(parent="piano/1")
    amend(second.path, segments=[{"number": None, "first_step": "x"}], status="\x1b[31m")
    lines = tree_lines(list_runs(first.path.parent.parent))
    assert [line.split()[0] for line in lines] == ["piano/1", "└"]
    assert "piano/2" in lines[1]
    assert not any("\x1b" in line for line in lines)
