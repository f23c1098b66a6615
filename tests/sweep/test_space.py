"""If this fails, a sweep trains another point than its file names, trains one twice, or forgets one that is trained."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.config import parse_overrides
from rung.errors import UserError
from rung.sweep.plan import add_points, find_sweep, keep, load, read_plan, sweeps
from rung.sweep.space import key_of, make_point, override, point_of
from tests.errors import raises_code
from tests.sweep.made import made_sweep, sweep_file

TEXT = st.text(max_size=8).filter(lambda text: "$" not in text and "?" not in text)
SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
NAMES = st.lists(st.sampled_from(["seed", "lr.learning_rate", "model.width", "why", "data.mix"]), unique=True)


@given(VALUES)
def test_a_word_is_read_back_as_the_value_it_was_made_of(value: Any) -> None:
    assert parse_overrides([override("a.b", value)]) == {"a": {"b": value}}


@given(NAMES, st.data())
def test_a_key_does_not_depend_on_the_order_of_the_words(names: list[str], data: st.DataObject) -> None:
    words = [override(name, data.draw(SCALARS)) for name in names]
    mixed = data.draw(st.permutations(words))
    assert key_of("piano", mixed) == key_of("piano", words)


def test_a_key_is_what_is_meant_and_not_how_it_is_spelled() -> None:
    assert key_of("piano", ["a.b=1e-3"]) == key_of("piano", ["a.b=0.001"])
    assert key_of("piano", ["a.b=3e5"]) == key_of("piano", ["a.b=300000"])
    assert key_of("piano", ["a={b: 1, c: 2}"]) == key_of("piano", ["a.c=2", "a.b=1"])
    assert key_of("piano", ["a.b=1"]) != key_of("piano", ["a.b=2"])
    assert key_of("piano", ["a.b=1"]) != key_of("world", ["a.b=1"])
    assert key_of("piano", ["a.b=1"]) != key_of("piano", ["a.b='1'"])
    assert key_of("piano", ["preset=small", "a.b=1"]) != key_of("piano", ["a.b=1"])


def test_a_config_file_counts_by_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("lr: {min_lr: 1}\n")
    (tmp_path / "b.yaml").write_text("# the same\nlr:\n  min_lr: 1\n")
    keys = [key_of("piano", ["-c", str(tmp_path / name)]) for name in ("a.yaml", "b.yaml")]
    assert keys[0] == keys[1]
    (tmp_path / "b.yaml").write_text("lr: {min_lr: 2}\n")
    assert key_of("piano", ["-c", str(tmp_path / "b.yaml")]) != keys[0]


@settings(max_examples=20)
@given(st.randoms(use_true_random=False))
def test_points_keep_their_keys_when_the_file_is_rearranged(tmp_path_factory: Any, order: random.Random) -> None:
    folder = tmp_path_factory.mktemp("plan")
    grid = {"lr.learning_rate": [1e-3, 1e-2, 0.1], "seed": [0, 1]}
    tree: dict[str, Any] = {"recipe": "piano", "set": {"model.n_embd": 8, "eval_interval": 5}, "grid": grid}
    before = {one.key: dict(one.varies) for one in read_plan(sweep_file(folder, tree), folder / "runs").points}

    def mixed(mapping: dict[str, Any]) -> dict[str, Any]:
        return {name: mapping[name] for name in order.sample(list(mapping), len(mapping))}

    again = mixed(
        {**tree, "set": mixed(tree["set"]), "grid": mixed({k: order.sample(v, len(v)) for k, v in grid.items()})}
    )
    again["grid"]["seed"] = [*again["grid"]["seed"], 7]
    after = {one.key: dict(one.varies) for one in read_plan(sweep_file(folder, again), folder / "runs").points}
    assert {key: after[key] for key in before} == before
    assert len(after) == 9


def test_points_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    tree = {"recipe": "piano", "points": [{"a": 1}, {"a": 2}], "grid": {"b": [1, 2], "seed": [0, 1]}}
    sweep = read_plan(sweep_file(tmp_path, tree), tmp_path / "runs")
    varies = [tuple(one.varies.values()) for one in sweep.points]
    assert varies[:5] == [(1, 1, 0), (1, 1, 1), (1, 2, 0), (1, 2, 1), (2, 1, 0)]
    assert len(varies) == 8
    assert sweep.points[0].words == ("a=1", "b=1", "seed=0")
    assert (sweep.name, sweep.experiment, sweep.retries, sweep.ranks) == ("grid", "grid", 1, 1)
    assert sweep.folder == tmp_path / "runs" / ".sweeps" / "grid"


def test_a_plan_that_is_kept_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("eval_interval: 5\n")
    tree = {
        "recipe": "piano", "preset": "tiny", "config": ["base.yaml"], "set": {"why": "a b \n\x1b[31m \u2028 é"},
        "grid": {"seed": [0, 1]}, "eval": "test", "retries": 3, "ranks": 2, "launch": {"slots": 3}, "name": "mine",
        "experiment": "series", "why": "does it?",
    }  # fmt: skip
    asked = read_plan(sweep_file(tmp_path, tree), tmp_path / "runs")
    kept = keep(asked)
    assert [one.key for one in kept.points] == [one.key for one in asked.points]
    assert kept == load(kept.folder) == find_sweep("mine", tmp_path / "runs")
    assert (kept.eval_split, kept.retries, kept.ranks, kept.launch) == ("test", 3, 2, {"slots": 3})
    assert (kept.experiment, kept.why, kept.points[1].varies) == ("series", "does it?", {"seed": 1})
    assert sweeps(tmp_path / "runs") == [kept.folder]
    (tmp_path / "base.yaml").write_text("eval_interval: 6\n")  # an edit in the middle of a sweep changes no point
    copy = Path(kept.points[0].words[2])
    assert copy.read_text() == "eval_interval: 5\n"
    (tmp_path / "runs").rename(tmp_path / "moved")
    moved = load(tmp_path / "moved" / ".sweeps" / "mine")
    assert Path(moved.points[0].words[2]).read_text() == "eval_interval: 5\n"
    assert moved.runs == tmp_path / "moved"


def test_a_plan_only_grows(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"recipe": "piano", "grid": {"seed": [0, 1]}}
    first = keep(read_plan(sweep_file(tmp_path, tree), tmp_path / "runs"))
    second = keep(read_plan(sweep_file(tmp_path, {**tree, "grid": {"seed": [1, 2]}}), tmp_path / "runs"))
    assert [one.varies["seed"] for one in second.points] == [1, 2]
    everything = load(second.folder, with_retired=True)
    assert everything.point(first.points[0].key).varies == {"seed": 0}  # somebody may be training it
    third = keep(read_plan(sweep_file(tmp_path, tree), tmp_path / "runs"))
    assert [one.varies["seed"] for one in third.points] == [0, 1]


def test_a_search_adds_points_to_the_plan(tmp_path: Path) -> None:
    sweep = made_sweep(tmp_path / "runs", seeds=(), search={"trials": 2, "metric": "val/loss"})
    new = point_of(sweep, {"lr.learning_rate": 0.1})
    grown = add_points(sweep, [new, new])
    assert [one.key for one in grown.points] == [new.key]
    assert [one.key for one in keep(sweep).points] == [new.key]  # starting it again forgets none
    assert new == make_point("toy", ["model.width=8"], {"lr.learning_rate": 0.1})


def test_a_point_is_found_by_key_by_its_beginning_and_by_its_place(tmp_path: Path) -> None:
    sweep = made_sweep(tmp_path / "runs")
    first, second = sweep.points
    assert sweep.point(first.key) == sweep.point("0") == first
    assert sweep.point(second.key[:7]) == second
    for wrong in ("2", "zz", ""):
        with raises_code("no-point"):
            sweep.point(wrong)


GOOD = {"recipe": "piano", "grid": {"seed": [0]}}
WRONG = [
    ({**GOOD, "gird": {}}, "gird .*grid"),
    ({**GOOD, "retries": -1}, "retries=-1 "),
    ({**GOOD, "retries": "many"}, "retries=many "),
    ({**GOOD, "ranks": 0}, "ranks=0 "),
    ({**GOOD, "launch": {"slot": 1}}, "slot .*slots"),
    ({"grid": {"seed": [0]}}, "  recipe "),
    ({"recipe": "piano"}, "a grid"),
    ({"recipe": "piano", "grid": {}}, "a grid"),
    ({"recipe": "piano", "grid": {"seed": []}}, "grid: seed "),
    ({"recipe": "piano", "grid": {"seed": 3}}, r"grid: seed .*\[3\]"),
    ({"recipe": "piano", "grid": [1]}, "grid "),
    ({"recipe": "piano", "points": [1]}, "points "),
    ({**GOOD, "set": {"seed": 1}}, "seed .* set .* grid"),
    ({**GOOD, "points": [{"seed": 1}]}, "seed .* grid .* points"),
    ({**GOOD, "preset": "tiny", "set": {"preset": "small"}}, "preset .* preset .* set"),
    ({**GOOD, "search": {"trials": 3}}, "a search "),
    ({"recipe": "piano", "grid": {"seed": [0, 1, 0]}}, r"points 1 and 3: seed=0"),
    ({"recipe": "piano", "grid": {"lr.learning_rate": [0.001, 1e-3]}}, r"points 1 and 2: lr.learning_rate=0.001"),
    ({"recipe": "piano", "grid": {"a b": [1]}}, "'a b'"),
    ({**GOOD, "name": "a/b"}, "a/b.*`name"),
    ({**GOOD, "experiment": "../x"}, r"\.\./x"),
    ({**GOOD, "config": ["gone.yaml"]}, "gone.yaml"),
    ({"recipe": "piano", "grid": {"seed": list(range(200)), "a": list(range(200))}}, "40000 points"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "said"), WRONG, ids=[said[:24] for _, said in WRONG])
def test_a_mistake_in_the_file_is_one_clear_sentence(tmp_path: Path, tree: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_plan(sweep_file(tmp_path, tree), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_words_that_yaml_takes_for_values_are_read_or_told(tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text("recipe: piano\ngrid: {seed: [0]}\nlaunch: {on: slurm}\n")  # a plain `on` is true
    assert read_plan(file, tmp_path / "runs").launch == {"on": "slurm"}
    for place in ("grid: {1: [2]}", "points: [{on: 1}]", "grid: {seed: [0]}\nset: {1.5: 1}"):
        file.write_text(f"recipe: piano\n{place}\n")
        with pytest.raises(UserError, match=r"(1|True|1\.5) is not a key"):
            read_plan(file, tmp_path / "runs")


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    tree = {"recipee": "piano", "grid": {"seed": [], "a": 1}, "launch": {"slot": 1}}
    with pytest.raises(UserError) as told:
        read_plan(sweep_file(tmp_path, tree), tmp_path / "runs")
    for part in ("recipee", "grid: seed", "grid: a", "launch: slot"):
        assert part in str(told.value)


def test_a_file_that_is_no_yaml_is_told(tmp_path: Path) -> None:
    for text in ("grid: [1", "just words", "\x00", "- a\n- b\n"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(UserError, match=r"bad\.yaml"):
            read_plan(tmp_path / "bad.yaml", tmp_path / "runs")


def test_a_name_that_another_recipe_has_is_refused(tmp_path: Path) -> None:
    keep(read_plan(sweep_file(tmp_path, GOOD), tmp_path / "runs"))
    other = sweep_file(tmp_path, {**GOOD, "recipe": "world"})
    with raises_code("sweep-exists"):
        keep(read_plan(other, tmp_path / "runs"))
    keep(read_plan(other, tmp_path / "runs", "another"))
    with raises_code("no-sweep"):
        find_sweep("anothr", tmp_path / "runs")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 1}', '{"schema": 1, "points": [{}]}', '{"schema": 9, "points": []}']
)
def test_a_damaged_plan_is_told_and_not_written_over(tmp_path: Path, text: str) -> None:
    sweep = made_sweep(tmp_path / "runs")
    (sweep.folder / "sweep.json").write_text(text)
    for act in (lambda: load(sweep.folder), lambda: keep(sweep)):
        with pytest.raises(UserError):
            act()
    assert (sweep.folder / "sweep.json").read_text() == text
