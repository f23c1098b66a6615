"""If this fails, runs of an older rung, whose parents and git refs go by name, are lost or cannot be moved.

old_lab.json holds the run.json of three runs as rung 0.1.0 of November 2026 wrote them, before references had uids:
piano/1 (resumed once), piano/2 from it, and other/1 from piano/2 with piano/1 as the base of its A/B.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rung.compare.lineage import chain
from rung.runs.maintenance import moving, trash
from rung.runs.maintenance.cleaning import clean, refs_of
from rung.runs.maintenance.selection import select, state_of
from rung.runs.maintenance.trash import reasons_to_keep
from rung.runs.query import list_runs, open_run
from rung.runs.record import Record, read_document
from tests.runs.maintenance.made import git, refs, remove

OLD_LAB = Path(__file__).with_name("old_lab.json")


@pytest.fixture(params=["with uids", "without uids"])
def old(request: pytest.FixtureRequest, root: Path, repo: Path) -> Path:
    """The runs on disk, and their code under refs of the old names."""
    commit = git(repo, "rev-parse", "HEAD").strip()
    for name, document in json.loads(OLD_LAB.read_text()).items():
        for part in (document, *document["segments"]):
            if "code" in part:
                part["code"] |= {"root": str(repo), "commit": commit}
                git(repo, "update-ref", part["code"]["ref"], commit)
        if request.param == "without uids":
            del document["uid"]
        (root / name / "metrics").mkdir(parents=True)
        (root / name / "run.json").write_text(json.dumps(document))
        (root / name / "config.yaml").write_text("a: {b: 1}\n")
        (root / name / "metrics/000.ndjson").write_text('{"step":0,"loss":1.0}\n')
    return root


def names(root: Path) -> dict[str, tuple[Any, Any]]:
    """Who comes from whom, and is compared with whom."""
    return {run.id: (run.document["parent"], run.document.get("ab", {}).get("base")) for run in list_runs(root)}


def test_an_old_lab_opens(old: Path, repo: Path) -> None:
    assert names(old) == {"other/1": ("piano/2", "piano/1"), "piano/1": (None, None), "piano/2": ("piano/1", None)}
    assert [link.run.id for link in chain(open_run("other/1", old))] == ["piano/1", "piano/2", "other/1"]
    for run in list_runs(old):
        assert {(ref.ref, ref.commit) for ref in refs_of(run.document)} <= set(refs(repo).items())


def test_its_runs_move_and_are_still_found(old: Path, repo: Path) -> None:
    before = refs(repo)
    assert moving.move("piano/1", "bach", old) == {"piano/1": "bach/1"}
    assert names(old) == {"bach/1": (None, None), "other/1": ("piano/2", "bach/1"), "piano/2": ("bach/1", None)}
    moving.move("bach/1", "old/9", old)
    moving.move("piano", "chopin", old)
    assert names(old) == {"chopin/2": ("old/9", None), "old/9": (None, None), "other/1": ("chopin/2", "old/9")}
    assert [link.run.id for link in chain(open_run("other/1", old))] == ["old/9", "chopin/2", "other/1"]
    assert open_run("chopin/2", old).document["parent"] == "old/9"
    assert refs(repo) == before, "a ref keeps the name that run.json has"
    assert list(reasons_to_keep([state_of(one) for one in select(["old/9"], old)])) == [
        "chopin/2 comes from old/9", "other/1 is compared with old/9",
    ]  # fmt: skip


def test_its_code_goes_with_it(old: Path, repo: Path) -> None:
    moving.move("piano/1", "bach", old)
    remove(old, "bach/1")
    assert {ref.ref for ref in clean(old, is_real=True).refs} == {"refs/rung/piano/1", "refs/rung/piano/1.1"}
    assert set(refs(repo)) == {"refs/rung/piano/2", "refs/rung/other/1"}


def test_it_can_be_resumed_and_removed_and_come_back(old: Path, repo: Path) -> None:
    Record.reopen(old / "piano/2", command=["rung"]).finish("finished")
    document = read_document(old / "piano/2")
    name = document["segments"][1]["code"]["ref"]
    assert name == f"refs/rung/{document.get('uid', 'piano/2')}.1"
    assert name in refs(repo)
    remove(old, "piano/2")
    trash.restore(old, [])
    assert names(old)["other/1"] == ("piano/2", "piano/1")
