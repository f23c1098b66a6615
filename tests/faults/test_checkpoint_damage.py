"""If this fails, a damaged or foreign checkpoint is used, or the message does not name the file and what is whole."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data.store import _hash_of
from rung.engine.checkpoint import Checkpoints, problem_of, to_delete
from rung.files import sha256
from rung.runs.query import Run

from .lives import Lives, assert_same_end, but, is_one_sentence, saves_of, the_run


def cut(save: Path) -> None:
    file = save / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip(save: Path) -> None:
    data = bytearray((save / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (save / "model.safetensors").write_bytes(data)


def lose_optimizer(save: Path) -> None:
    (save / "optimizer.pt").unlink()


def garble_manifest(save: Path) -> None:
    (save / "manifest.json").write_bytes(b'{"step": 12, "fil\xff')


def empty_manifest(save: Path) -> None:
    (save / "manifest.json").write_text('{"step": 12, "files": {}}')


DAMAGE: dict[Callable[[Path], None], str] = {
    cut: r"model.safetensors has (\d+) bytes, the manifest says (\d+);",
    flip: r"model.safetensors has hash (\w{4})\.\., the manifest says (\w{4})\.\.;",
    lose_optimizer: r"optimizer.pt is missing;",
    garble_manifest: r"manifest.json cannot be read;",
    empty_manifest: r"manifest.json cannot be read;",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_every_reader_refuses_a_damaged_save(
    lives: Lives, args: list[str], half: Path, whole: Run, damage: Callable[[Path], None]
) -> None:
    saves = saves_of(the_run(half))
    *_, other, last = saves.steps()
    damage(saves.at(last))
    before = (half / "runs/piano/1/run.json").read_bytes()
    readers: list[list[object]] = [
        ["resume", "piano/1"],
        ["eval", "piano/1", "--at", last],
        ["sample", "piano/1", "--at", last, "--out", half / "made"],
        [*args, f"init_from={saves.at(last)}"],
    ]
    for reader in readers:
        life = lives.rung(*reader, cwd=half)
        assert is_one_sentence(life), life.err + life.out
        found = re.search(DAMAGE[damage], life.err)
        assert found, life.err
        assert len(set(found.groups())) == len(found.groups()), "what is and what should be read alike"
        assert f"checkpoints/{last:08d}" in life.err
        assert f"`--at {other}`" in life.err
    assert (half / "runs/piano/1/run.json").read_bytes() == before, "a refusal changes nothing"
    assert not (half / "runs/piano/2").exists()
    assert not (half / "made").exists()
    life = lives.rung("resume", "piano/1", "--at", other, cwd=half)
    assert life.code == 0, life.err
    assert_same_end(the_run(half), whole)
    for step in saves.steps():
        assert problem_of(saves.at(step)) is None, "the damaged save was taken for the one that should be there"


def test_other_saves_can_still_be_read(lives: Lives, half: Path) -> None:
    saves = saves_of(the_run(half))
    *_, other, last = saves.steps()
    flip(saves.at(last))
    for reader in (["eval", "piano/1"], ["sample", "piano/1", "--out", half / "made"]):
        life = lives.rung(*reader, "--at", other, cwd=half)
        assert life.code == 0, life.err
    assert list((half / "made").glob("*.mid"))


def test_a_save_without_manifest_does_not_count(lives: Lives, half: Path, args: list[str], whole: Run) -> None:
    saves = saves_of(the_run(half))
    *_, other, last = saves.steps()
    (saves.at(last) / "manifest.json").unlink()
    assert saves.steps()[-1] == other
    life = lives.rung(*args, f"init_from={saves.at(last)}", cwd=half)
    assert is_one_sentence(life), life.err
    assert "it has no manifest.json" in life.err
    assert f"`--at {other}`" in life.err
    for reader in ("eval", "resume"):
        life = lives.rung(reader, "piano/1", "--at", last, cwd=half)
        assert is_one_sentence(life)
        assert f"has no save at step {last}; it has" in life.err
    life = lives.rung("resume", "piano/1", cwd=half)
    assert life.code == 0, life.err
    assert f"resumes at step {other}" in life.out
    assert_same_end(the_run(half), whole)


def test_when_nothing_is_whole(lives: Lives, half: Path) -> None:
    saves = saves_of(the_run(half))
    for step in saves.steps():
        cut(saves.at(step))
    life = lives.rung("resume", "piano/1", cwd=half)
    assert is_one_sentence(life)
    assert "there is no other whole save" in life.err


def test_a_mark_that_cannot_be_read(lives: Lives, half: Path) -> None:
    (saves_of(the_run(half)).folder / "best").write_text("fourteen\n")
    life = lives.rung("eval", "piano/1", cwd=half)
    assert is_one_sentence(life), life.err
    assert "checkpoints/best is damaged" in life.err


def test_another_vocabulary(lives: Lives, args: list[str], half: Path) -> None:
    saves = saves_of(the_run(half))
    save = saves.at(saves.steps()[-1])
    state, manifest = (json.loads((save / name).read_text()) for name in ("state.json", "manifest.json"))
    tokenizer, state["identity"]["tokenizer"] = state["identity"]["tokenizer"], "a tokenizer of long ago"
    (save / "state.json").write_text(json.dumps(state))
    manifest["files"]["state.json"] = {
        "bytes": (save / "state.json").stat().st_size,
        "sha256": sha256(save / "state.json"),
    }
    (save / "manifest.json").write_text(json.dumps(manifest))
    for reader in (["resume", "piano/1"], ["eval", "piano/1", "--at", save.name], [*args, f"init_from={save}"]):
        life = lives.rung(*reader, cwd=half)
        assert is_one_sentence(life), life.err
        assert f"trained with tokenizer a tokenizer of long ago, this config has {tokenizer};" in life.err


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.n_embd=32", r"is \d+x16 there and \d+x32 here"),
        ("model.n_layer=2", r"lacks \S+ \(\d+ missing, 0 extra\)"),
    ],
)
def test_another_shape(lives: Lives, args: list[str], half: Path, key: str, message: str) -> None:
    life = lives.rung(*but(args, key), "init_from=piano/1", cwd=half)
    assert is_one_sentence(life), life.err
    assert re.search(message, life.err), life.err
    assert not (half / "runs/piano/2").exists()


def test_data_changed_under_a_run(lives: Lives, args: list[str], whole: Run, piano_data: Path, tmp_path: Path) -> None:
    data = tmp_path / "tunes"
    shutil.copytree(piano_data, data)
    changed = but(args, f"dataset.base_dataset_name={data}")
    life = lives.rung(*changed, cwd=tmp_path, tear={"name": "optimizer.pt", "at": 4})
    assert life.code < 0
    splits, manifest = (json.loads((data / name).read_text()) for name in ("splits.json", "manifest.json"))
    splits["train"].reverse()
    (data / "splits.json").write_text(json.dumps(splits))
    manifest["files"]["splits.json"]["sha256"] = sha256(data / "splits.json")
    manifest["sha256"] = _hash_of(manifest)
    (data / "manifest.json").write_text(json.dumps(manifest))
    life = lives.rung("resume", "piano/1", cwd=tmp_path)
    assert is_one_sentence(life), life.err
    found = re.search(r"was trained on data (\S+), the data here is (\S+);", life.err)
    assert found, life.err
    assert found[1] == the_run(tmp_path).data()["train"]["fingerprint"]
    assert found[2] != found[1]
    assert the_run(tmp_path).status == "vanished", "a refused resume must not look like one"


STEPS = st.lists(st.integers(0, 200), unique=True, max_size=30)


@given(steps=STEPS, keep=st.integers(0, 6), data=st.data())
def test_rotation_never_takes_what_is_protected(steps: list[int], keep: int, data: st.DataObject) -> None:
    protected = data.draw(st.lists(st.sampled_from(steps), unique=True)) if steps else []
    gone = set(to_delete(steps, keep, protected))
    left = set(steps) - gone
    assert gone <= set(steps)
    assert not gone & set(protected)
    assert not steps or max(steps) in left
    if keep == 0:
        assert not gone
    else:
        assert len(left) >= min(keep, len(steps))
        assert len(left - set(protected)) <= keep
        assert not gone or max(gone) < min(sorted(steps)[-keep:]), "a newer one went before an older one"


ACTIONS = st.lists(st.tuples(st.sampled_from(["save", "best", "pin", "clean"]), st.integers(0, 10**6)), max_size=40)


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS, keep=st.integers(0, 4))
def test_any_order_of_saving_marking_and_cleaning(
    actions: list[tuple[str, int]], keep: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    saves = Checkpoints(tmp_path_factory.mktemp("saves"))
    last = 0
    for action, number in actions:
        steps = saves.steps()
        chosen = steps[number % len(steps)] if steps else None
        if action == "save":
            last += 1 + number % 5
            saves.at(last).mkdir()
            (saves.at(last) / "manifest.json").write_text("{}")
        elif action == "best" and chosen is not None:
            saves.mark_best(chosen)
        elif action == "pin" and chosen is not None:
            saves.pin(chosen)
        elif action == "clean":
            saves.clean(keep)
            left = saves.steps()
            assert {*saves.pinned, *([saves.best] if saves.best is not None else []), *steps[-1:]} <= set(left)
            assert len(left) >= (min(keep, len(steps)) if keep else len(steps))
    kept = saves.steps()
    saves.sweep()
    assert saves.steps() == kept, "sweeping may only take what is not whole"


def test_saves_of_a_future_that_will_not_happen_are_set_aside(tmp_path: Path) -> None:
    saves = Checkpoints(tmp_path)
    for step in (3, 4, 9):
        saves.at(step).mkdir()
        (saves.at(step) / "manifest.json").write_text("{}")
    saves.mark_best(9)
    saves.pin(3)
    saves.pin(9)
    assert saves.set_aside(after=4) == [9]
    assert saves.steps() == [3, 4]
    assert saves.best is None
    assert saves.pinned == [3]
    assert (tmp_path / "aside-1" / saves.at(9).name / "manifest.json").is_file()
    assert saves.set_aside(after=4) == []
