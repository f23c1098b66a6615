"""If this fails, a comparison of two changes is called an A/B of one, or a harmless difference spoils a good one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rung.compare.align import outcome
from rung.compare.factors import ABSENT, PARTS, WEIGHTS, Comparison, Difference, compare, strictness
from rung.errors import RunError
from rung.runs.query import Run, open_run
from rung.runs.record import Record, amend
from tests.compare import made
from tests.compare.made import CONFIG, DATA, DEFINITIONS, DERIVED, SOURCES, changed

Make = Callable[..., Run]


@pytest.fixture
def pair(make: Make, repo: Path) -> Callable[..., Comparison]:
    """Two runs of one repository; `fields` are what the second is made with."""

    def pair(first: dict[str, Any] | None = None, **fields: Any) -> Comparison:
        return compare(make(code_root=repo, **(first or {})), make(code_root=repo, **fields))

    return pair


def found(comparison: Comparison, name: str) -> Difference:
    """The one difference of this name."""
    (one,) = [difference for difference in comparison.differences if difference.name == name]
    return one


def weights(comparison: Comparison) -> dict[str, str]:
    return {difference.name: difference.weight for difference in comparison.differences}


def test_runs_alike_differ_in_nothing(pair: Callable[..., Comparison]) -> None:
    comparison = pair()
    assert comparison.differences == []
    told = "; ".join(comparison.same)
    for word in ("code", "data of train", "packages", "seed", "budget", "definition", "initial weights", "rows of all"):
        assert word in told
    strict = strictness(comparison)
    assert not strict.is_strict
    assert "nothing that was recorded differs" in strict.words


def test_one_key_is_a_strict_ab(pair: Callable[..., Comparison]) -> None:
    comparison = pair(
        config=changed(CONFIG, optimizer__grad_clip=0.5), sources={**SOURCES, "optimizer.grad_clip": "command line"}
    )
    assert weights(comparison) == {"optimizer.grad_clip": "factor"}
    strict = strictness(comparison)
    assert strict.is_strict
    assert strict.words == "strict A/B: optimizer.grad_clip 1.0 -> 0.5"
    assert strict.factor is not None
    assert strict.factor.source_after == "command line"


def test_two_keys_are_two_factors(pair: Callable[..., Comparison]) -> None:
    strict = strictness(pair(config=changed(CONFIG, optimizer__grad_clip=0.5, lr__learning_rate=1e-3)))
    assert not strict.is_strict
    assert strict.factor is None
    assert {d.name for d in strict.confounders} == {"optimizer.grad_clip", "lr.learning_rate"}
    assert "2 factors (optimizer.grad_clip, lr.learning_rate)" in strict.words


def test_an_edit_spoils_one_key_unless_it_is_allowed_or_declared(make: Make, repo: Path) -> None:
    a = make(code_root=repo)
    (repo / "model.py").write_text("WIDTH = 64\nDEPTH = 2\n")
    (repo / "README.md").write_text("words\n")
    b = make(code_root=repo, config=changed(CONFIG, optimizer__grad_clip=0.5))
    comparison = compare(a, b)
    assert weights(comparison) == {"optimizer.grad_clip": "factor", "model.py": "hidden", "README.md": "note"}
    strict = strictness(comparison)
    assert not strict.is_strict
    assert strict.words.startswith("not a strict A/B: 1 confounder (code: model.py) beside optimizer.grad_clip")
    assert strictness(comparison, ["code"]).is_strict
    assert strictness(comparison, ["model.py"]).is_strict
    assert [d.name for d in strictness(comparison, ["code"]).allowed] == ["model.py"]
    declared = strictness(comparison, declared="code")
    assert not declared.is_strict  # the key is a second factor
    assert len(declared.confounders) == 2
    assert strictness(compare(a, make(code_root=repo)), declared="code").is_strict


def test_what_was_declared_must_differ(pair: Callable[..., Comparison]) -> None:
    strict = strictness(pair(config=changed(CONFIG, optimizer__grad_clip=0.5)), declared="code")
    assert not strict.is_strict
    assert "code was declared as the change, and does not differ" in strict.words


def test_code_that_nobody_kept_is_a_confounder(make: Make) -> None:
    comparison = compare(make(), make(config=changed(CONFIG, optimizer__grad_clip=0.5)))
    assert found(comparison, "code").weight == "hidden"
    assert not strictness(comparison).is_strict


@pytest.mark.parametrize(
    ("key", "value", "weight"),
    [
        ("logging__log_interval", 1, "note"),
        ("system__threads", 2, "note"),
        ("eval_interval", "20", "note"),
        ("system__dtype", "bfloat16", "factor"),
        ("guard__policy", "skip", "factor"),
        ("eval_iters", 5, "metric"),
        ("optimizer__grad_clip", None, "factor"),
        ("optimizer__grad_clip", ..., "factor"),
        ("optimizer__grad_clip", True, "factor"),
    ],
)
def test_what_a_key_means(pair: Callable[..., Comparison], key: str, value: Any, weight: str) -> None:
    comparison = pair(config=changed(CONFIG, **{key: value}))
    assert weights(comparison) == {key.replace("__", "."): weight}


def test_evals_that_steer_the_rate_are_a_factor(pair: Callable[..., Comparison]) -> None:
    first = changed(CONFIG, lr__schedule="plateau")
    comparison = pair({"config": first}, config=changed(first, eval_interval="20"))
    assert weights(comparison) == {"eval_interval": "factor"}


def test_a_missing_key_is_not_a_null_one(pair: Callable[..., Comparison]) -> None:
    null = changed(CONFIG, optimizer__grad_clip=None)
    comparison = pair({"config": null}, config=changed(CONFIG, optimizer__grad_clip=...))
    assert found(comparison, "optimizer.grad_clip").source_after == ABSENT
    assert pair({"config": null}, config=null).differences == []


def test_nan_is_equal_to_nan(pair: Callable[..., Comparison]) -> None:
    odd = changed(CONFIG, optimizer__grad_clip=float("nan"), tasks=[float("nan"), 1])
    assert pair({"config": odd}, config=odd).differences == []


def test_another_horizon_is_never_one_change(pair: Callable[..., Comparison]) -> None:
    config = changed(CONFIG, optimizer__max_iters="80", lr__lr_decay_iters="80")
    comparison = pair(config=config, derived={**DERIVED, "num_steps": 80, "decay_steps": 80})
    assert weights(comparison) == {
        "optimizer.max_iters": "factor",
        "lr.lr_decay_iters": "follows",
        "num_steps": "hidden",
    }
    assert "schedules end at different steps" in found(comparison, "num_steps").detail
    assert not strictness(comparison).is_strict
    assert strictness(comparison, ["budget"]).is_strict
    assert any("did 40 of 80 planned steps" in note for note in comparison.notes)


def test_more_rows_a_step_are_more_targets_in_all(pair: Callable[..., Comparison]) -> None:
    comparison = pair(config=changed(CONFIG, data__batch_size=32), derived={**DERIVED, "rows_per_step": 32})
    assert weights(comparison) == {"data.batch_size": "factor", "targets": "hidden"}
    assert found(comparison, "targets").before == 40 * 16 * 100


def test_other_data_is_hidden_unless_a_key_explains_it(pair: Callable[..., Comparison]) -> None:
    store = changed(DATA, train={"fingerprint": "9999/train/windows-256", "rows": 90, "about": {"source": "mine"}})
    comparison = pair(data=store)
    assert found(comparison, "train").weight == "hidden"
    assert "source bach -> mine" in found(comparison, "train").detail
    wide = changed(DATA, train={"fingerprint": "7c1e/train/windows-512", "rows": 50})
    assert found(pair(config=changed(CONFIG, data__context_size=512), data=wide), "train").weight == "follows"
    # A longer context explains longer rows, not another store.
    assert found(pair(config=changed(CONFIG, data__context_size=512), data=store), "train").weight == "hidden"
    named = changed(CONFIG, dataset__base_dataset_name="mine")
    assert found(pair(config=named, data=store), "train").weight == "follows"
    assert found(pair(data={}), "train").weight == "hidden"
    assert found(pair({"data": {}}, data={}), "train").weight == "note"


def test_seeds(pair: Callable[..., Comparison]) -> None:
    comparison = pair(seed=8, config=changed(CONFIG, seed=8), weights={"wte.weight": [[8, 4], "zz"]}, salt=0.5)
    assert weights(comparison) == {"seed": "hidden"}
    assert "a repeat with another seed" in strictness(comparison).words
    both = pair(seed=8, config=changed(CONFIG, seed=8, optimizer__grad_clip=0.5))
    assert not strictness(both).is_strict
    assert strictness(both, ["seed"]).is_strict


def test_a_pair_that_is_none(pair: Callable[..., Comparison]) -> None:
    other = {**made.WEIGHTS, "head.weight": [[4, 8], "cc"]}
    comparison = pair(weights=other, salt=0.5)
    assert weights(comparison) == {"initial weights": "hidden", "batches": "hidden"}
    assert "1 of 2 parameters" in found(comparison, "initial weights").detail
    assert "40 of 40 shared steps, from step 0" in found(comparison, "batches").detail
    deeper = pair(config=changed(CONFIG, model__n_layer=3), weights=other)
    assert weights(deeper) == {"model.n_layer": "factor", "initial weights": "follows"}


def test_weights_that_came_from_elsewhere(pair: Callable[..., Comparison]) -> None:
    started = {"config": changed(CONFIG, init_from="piano/0"), "derived": {**DERIVED, "weights_from": {"step": 10}}}
    later = {**started, "derived": {**DERIVED, "weights_from": {"step": 20}}}
    assert weights(pair(started, **later)) == {"weights_from": "hidden"}
    assert weights(pair({}, **later)) == {"init_from": "factor", "weights_from": "follows"}


@pytest.mark.parametrize("key", ["mask", "ignored_ids", "eval set", "rows"])
def test_another_metric(pair: Callable[..., Comparison], key: str) -> None:
    other = {"eval/val": {**DEFINITIONS["eval/val"], key: "other"}}
    comparison = pair(definitions=other)
    assert found(comparison, "eval/val").weight == "metric"
    assert f"{key} " in found(comparison, "eval/val").detail
    assert not strictness(comparison).is_strict


def test_a_metric_that_is_not_explained(pair: Callable[..., Comparison]) -> None:
    assert found(pair(definitions={}), "eval/val").weight == "hidden"
    assert found(pair({"definitions": {}}, definitions={}), "eval/val").weight == "note"
    moved = changed(DATA, val={"fingerprint": "other", "rows": 10})
    assert found(pair({"definitions": {}}, definitions={}, data=moved), "eval/val").weight == "metric"


def test_a_metric_that_only_one_loop_defined(make: Make) -> None:
    own = {**DEFINITIONS, "val/loss": {"mask": "mine"}, "never/logged": {}}
    comparison = compare(make(definitions=own), make())
    assert found(comparison, "val/loss").weight == "hidden"
    assert found(comparison, "never/logged").weight == "note"


def test_evals_that_count_other_targets(start: Callable[..., Record], make: Make) -> None:
    a, record = make(), start()
    record.event("eval", step=10, results={"val": {"loss": 1.0, "targets": 999.0}})
    record.finish("finished")
    one = found(compare(a, open_run(record.path, a.path)), "targets of val")
    assert (one.weight, one.before, one.after) == ("metric", 1000.0, 999.0)


def edit(run: Run, file: str, **fields: Any) -> Run:
    path = run.path / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return open_run(run.path, run.path)


def test_packages_are_one_difference_and_torch_another(make: Make) -> None:
    a = edit(make(), "env.json", packages={"torch": "2.12", "numpy": "1", "old": "1"}, rung_sha256="aa", host="one")
    b = edit(make(), "env.json", packages={"torch": "2.13", "numpy": "2", "new": "3"}, rung_sha256="bb", host="two")
    comparison = compare(a, b)
    environment = {d.name: d.weight for d in comparison.differences if d.part == "environment"}
    assert environment == {"torch": "hidden", "packages": "hidden", "rung": "hidden", "host": "note"}
    assert found(comparison, "packages").detail == "numpy 1 -> 2, old 1 only in piano/1, new 3 only in piano/2"


def test_gpus_devices_and_ranks(make: Make) -> None:
    gpu = {"name": "H200", "driver": "550", "memory": "1"}
    a, b = edit(make(), "env.json", gpus=[gpu]), edit(make(derived={**DERIVED, "num_ranks": 2}), "env.json", gpus=[])
    hidden = {d.name for d in compare(a, b).of("hidden")}
    assert {"GPU", "driver", "num_ranks"} <= hidden


def test_a_resume_elsewhere_is_told(start: Callable[..., Record], make: Make) -> None:
    record = start()
    record.finish("stopped")
    Record.reopen(record.path, command=["rung", "resume"]).finish("finished")
    run = edit(open_run(record.path, record.path), "env.1.json", packages={"torch": "0.1"})
    assert "attempt 1 of piano/1" in found(compare(run, make()), "resume").detail
    assert found(compare(run, make()), "resume").weight == "hidden"


def test_runs_of_ones_own_loop(make: Make, repo: Path) -> None:
    own: dict[str, Any] = {
        "recipe": "own loop", "preset": None, "derived": {}, "data": {}, "definitions": {}, "sources": {},
        "weights": None, "code_root": repo,
    }  # fmt: skip
    comparison = compare(make(config={"lr": 1, "deep": {"er": []}}, **own), make(config={"lr": 2, "deep": {}}, **own))
    assert found(comparison, "lr").weight == "factor"
    assert found(comparison, "deep.er").source_after == ABSENT
    assert {d.weight for d in comparison.differences if d.part == "data"} == {"note"}
    shorter = compare(make(config={}, **own), make(config={}, losses=(3.0,), **own))
    assert found(shorter, "last_step").weight == "hidden"


def test_how_the_runs_stand(make: Make) -> None:
    comparison = compare(make(status="diverged"), make(status=None))
    assert any(note.startswith("piano/1 is diverged") for note in comparison.notes)
    assert any("piano/2 is " in note for note in comparison.notes)
    run = make()
    copy = shutil.copytree(run.path, run.path.parents[2] / "copied")
    assert any("same run" in note for note in compare(run, open_run(copy, copy)).notes)


@pytest.mark.parametrize("file", ["config.yaml", "data.json", "definitions.json", "env.json", "config.sources.json"])
def test_a_damaged_file_is_named(make: Make, file: str) -> None:
    a, b = make(), make()
    (a.path / file).write_text("{torn")
    with pytest.raises(RunError, match=file):
        compare(a, b)


@pytest.mark.parametrize(
    ("damage", "is_strict"),
    [
        ({}, True),
        ({"segments": None}, True),
        ({"derived": {"num_steps": "x"}}, False),
        ({"seed": None}, False),
        ({"segments": [{"env": "../../gone.json"}]}, False),
    ],
)
def test_a_run_json_of_odd_shape(make: Make, repo: Path, damage: dict[str, Any], is_strict: bool) -> None:
    a, b = make(code_root=repo), make(code_root=repo, config=changed(CONFIG, optimizer__grad_clip=0.5))
    amend(b.path, **damage)
    assert strictness(compare(a, open_run(b.path, b.path))).is_strict is is_strict


@pytest.mark.parametrize("damage", [{"best": "x"}, {"derived": 3}, {"code": []}])
def test_a_part_of_another_kind_is_refused_before_anything_is_compared(make: Make, damage: dict[str, Any]) -> None:
    run = make()
    amend(run.path, **damage)
    with pytest.raises(RunError, match=next(iter(damage))):
        open_run(run.path, run.path)


def test_an_empty_run(start: Callable[..., Record], make: Make) -> None:
    record = start()
    record.close()
    comparison = compare(open_run(record.path, record.path), make())
    assert comparison.notes


values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers()))
trees = st.dictionaries(st.sampled_from("abc"), st.one_of(values, st.dictionaries(st.sampled_from("xy"), values)))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=trees, other=trees)
def test_any_two_configs(tmp_path_factory: pytest.TempPathFactory, one: Any, other: Any) -> None:
    """The same differences from either side, none with itself, and every part and weight one of the words."""
    root = tmp_path_factory.mktemp("runs")
    runs = [made.make_run(root, losses=(), config=tree, sources={}) for tree in (one, other)]
    there, back = compare(*runs), compare(*reversed(runs))
    assert all(d.part in PARTS and d.weight in WEIGHTS for d in there.differences)
    assert {d.name for d in there.differences} == {d.name for d in back.differences}
    assert [d for d in compare(runs[0], runs[0]).differences if d.part == "config"] == []
    assert strictness(there).is_strict is False  # no code was kept


CUT = {"data": {"batch_size": 16}, "optimizer": {"gradient_accumulation_steps": 1}}


@pytest.mark.parametrize(("batch_size", "num_micros", "weight"), [(8, 2, "note"), (4, 4, "note"), (8, 1, "factor")])
def test_another_cut_of_the_same_rows_is_no_factor(
    make: Make, repo: Path, batch_size: int, num_micros: int, weight: str
) -> None:
    """The engine gives one loss and one gradient for 1 x 16, 2 x 8 and 4 x 4 rows; contract tests hold it to that."""
    cut = {"data": {"batch_size": batch_size}, "optimizer": {"gradient_accumulation_steps": num_micros}}
    comparison = compare(make(code_root=repo, config=CUT), make(code_root=repo, config=cut))
    assert found(comparison, "data.batch_size").weight == weight
    assert ("dropout" in found(comparison, "data.batch_size").detail) == (weight == "note")
    assert ("nothing that was recorded differs" in strictness(comparison).words) == (weight == "note")


def test_the_keys_of_a_script_mean_what_they_say(make: Make, repo: Path) -> None:
    """`logging.` is a section of the engine; in a script it may be the input."""
    for key in ("logging", "signals", "checkpoint", "eval_interval"):
        runs = [
            make(recipe="own loop", config={key: {"window": n}}, code_root=repo, derived={}, sources={}) for n in (1, 2)
        ]
        assert weights(compare(*runs))[f"{key}.window"] == "factor"
    cut = {"data": {"batch_size": 8}, "optimizer": {"gradient_accumulation_steps": 2}}
    runs = [make(recipe="own loop", config=tree, code_root=repo) for tree in (CUT, cut)]
    assert weights(compare(*runs))["data.batch_size"] == "factor"


@pytest.mark.parametrize(("key", "weight"), [("lr", "hidden"), ("width", "hidden"), ("data_dir", "follows")])
def test_other_data_of_a_script_is_explained_by_a_key_that_names_data(
    make: Make, repo: Path, key: str, weight: str
) -> None:
    runs = [
        make(recipe="own loop", config={key: n}, data={"train": {"fingerprint": f"{n}{n}"}}, code_root=repo)
        for n in (1, 2)
    ]
    assert found(compare(*runs), "train").weight == weight
    assert strictness(compare(*runs)).is_strict == (weight == "follows")


@pytest.mark.parametrize(
    ("seed", "key", "weight"),
    [(None, "width", "hidden"), (7, "lr", "hidden"), (7, "weight_decay", "hidden"), (7, "width", "follows")],
)
def test_a_script_without_a_seed_begins_anywhere(
    make: Make, repo: Path, seed: int | None, key: str, weight: str
) -> None:
    """Nobody seeded it, so the weights differ in every run: that does not follow from a learning rate."""
    runs = [
        make(recipe="own loop", seed=seed, config={key: n}, weights={"w": [[2], f"{n}{n}"]}, code_root=repo)
        for n in (1, 2)
    ]
    assert found(compare(*runs), "initial weights").weight == weight
    assert not any("None" in words for words in compare(*runs).same)


def test_a_key_that_a_script_changed_on_the_way(make: Make, repo: Path) -> None:
    """Both configs end with 0.1; one of the runs trained a while with something else."""
    runs = [
        make(recipe="own loop", config={"rate": 0.1, "width": n}, sources={"rate": source}, code_root=repo)
        for n, source in ((1, "script"), (2, "changed at step 20"))
    ]
    assert found(compare(*runs), "rate").weight == "hidden"
    assert "changed at step 20 of the second" in found(compare(*runs), "rate").detail
    assert not strictness(compare(*runs)).is_strict


def test_what_no_step_says_of_its_rows_is_told(make: Make, start: Callable[..., Record], repo: Path) -> None:
    record = start(code_root=repo)
    record.log(0, {"loss": 1.0})
    record.finish("finished", last_step=40)
    silent = open_run(record.path, record.path.parent.parent)
    assert "piano/1 does not say" in found(compare(silent, make(code_root=repo)), "batches").detail


def test_the_files_of_a_run_are_read_once(make: Make, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def count(name: str) -> None:
        plain = getattr(Run, name)

        def counting(run: Run, *words: Any) -> Any:
            read.append(f"{run.id} {name}")
            return plain(run, *words)

        monkeypatch.setattr(Run, name, counting)

    count("evals")
    count("metrics")
    a, b = make(code_root=repo), make(code_root=repo)
    compare(a, b)
    outcome(a, b)
    assert sorted(read) == ["piano/1 evals", "piano/1 metrics", "piano/2 evals", "piano/2 metrics"]


@pytest.mark.parametrize("value", [5, "x", [5], [None], {"a": 1}, [{"number": None, "first_step": "x", "env": 5}]])
def test_odd_values_of_the_record_are_told(make: Make, repo: Path, value: Any) -> None:
    """A record that somebody edited ends in a sentence or in a comparison, and in nothing else."""
    first, second = make(code_root=repo), make(code_root=repo)
    for fields in ({"segments": value}, {"code": {**first.document["code"], "left_out": value}}):
        amend(second.path, **fields)
        try:
            found = compare(first, open_run(second.path, first.path.parent.parent))
        except RunError as error:
            assert str(second.path) in str(error)  # noqa: PT017
        else:
            assert (found.a.id, found.b.id) == (first.id, second.id)
