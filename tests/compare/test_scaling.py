"""If this fails, the page of a sweep shows an effect that is not there, hides one that is, or passes a run over."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from xml.etree import ElementTree

import pytest

from rung.compare.scaling.page import report
from rung.runs.files import write_json
from rung.runs.query import Run, open_run
from tests.compare import made, swept
from tests.errors import raises_code


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def written(runs: Sequence[Run], out: Path, **asked: Any) -> tuple[str, dict[str, Any]]:
    """The page as Markdown, and its figures."""
    page = report(runs, out, **{"x": None, "metric": None, "name": "study", **asked})
    assert page == out / "report.md"
    for svg in out.glob("*.svg"):
        ElementTree.fromstring(svg.read_text("utf-8"))
    return page.read_text("utf-8"), json.loads((out / "report.json").read_text("utf-8"))


def reference(root: Path) -> list[Run]:
    runs = []
    for seed, by_num in swept.REFERENCE.items():
        for num, loss in by_num.items():
            varies = {"dataset.num_components": num, "seed": seed}
            runs.append(swept.trained(swept.point(root, varies), root, loss))
    return runs


def test_the_reference_study(root: Path, tmp_path: Path) -> None:
    """Twenty figures out of a published study: the effect of K is seen within a seed, and drowned between seeds."""
    page, found = written(reference(root), tmp_path / "out")
    assert found["x"] == "dataset.num_components"
    assert found["metric"] == "val/loss"
    deltas = {one["x"]: one for one in found["series"][0]["differences"]}
    assert list(deltas) == [3, 5, 8, 11]
    for num, t in ((3, 3.182446305), (11, 3.182446305)):
        moves = [by[num] - by[1] for by in swept.REFERENCE.values()]
        half = t * stdev(moves) / 2
        assert deltas[num]["paired"]["value"] == pytest.approx(fmean(moves))
        assert deltas[num]["paired"]["low"] == pytest.approx(fmean(moves) - half)
        assert deltas[num]["paired"]["high"] == pytest.approx(fmean(moves) + half)
    paired, naive = deltas[11]["paired"], deltas[11]["unpaired"]
    assert paired["high"] < 0 < naive["high"]
    assert naive["high"] - naive["low"] > 3 * (paired["high"] - paired["low"])
    assert "| lower, 4 seeds | -0.1690 | -0.3320 | -0.2730 | -0.5840 | -0.3395 |" in page
    assert "| 11 | -0.3395 |" in page
    # One of four comparisons, and four seeds do not show their skew: then this cannot be told from 0.
    assert deltas[11]["joint"]["low"] < paired["low"] < paired["high"] < 0 < deltas[11]["joint"]["high"]
    assert "for all 4 at once" in page
    slopes = [_slope(by) for by in swept.REFERENCE.values()]
    assert found["series"][0]["fit"]["log2"]["b"]["value"] == pytest.approx(fmean(slopes))


def _slope(by_num: dict[int, float]) -> float:
    import numpy as np

    return float(np.polyfit(np.log2(list(by_num)), list(by_num.values()), 1)[0])


def test_differences_are_paired_by_component(root: Path, tmp_path: Path) -> None:
    """Components differ by a nat; an effect of 0.1 nats a doubling is found to within the noise of the evals."""
    page, found = written(swept.by_component(root, effect=-0.1), tmp_path / "out")
    assert found["metric"] == "test/mean_of_groups"
    for one in found["series"][0]["differences"]:
        assert one["paired"]["value"] == pytest.approx(-0.1 * math.log2(one["x"]), abs=0.02)
        assert one["unpaired"]["high"] - one["unpaired"]["low"] > 1
        for seed, pair in one["by_seed"].items():
            assert pair["components"] == swept.chosen(1, int(seed))
    line = found["series"][0]["fit"]["log2"]["b"]
    assert line["low"] < -0.1 < line["high"]
    assert line["value"] == pytest.approx(-0.1, abs=0.01)
    assert "Each doubling lowers it" in page
    assert "| math.AC | " in page
    rows = list(csv.DictReader((tmp_path / "out" / "components.csv").open()))
    assert len(rows) == 3 * (1 + 3 + 5 + 8 + 11)
    curves = list(csv.DictReader((tmp_path / "out" / "positions.csv").open()))
    assert len(curves) == 5 * 20
    assert {row["seeds"] for row in curves} == {"3"}
    at = {row["x"]: float(row["loss"]) for row in curves if row["position"] == "7"}
    # On the components that K = 1 has too: else the curves would show which components are hard.
    assert at["11"] - at["1"] == pytest.approx(-0.1 * math.log2(11), abs=0.02)


def test_no_effect_is_no_effect(root: Path, tmp_path: Path) -> None:
    page, found = written(swept.by_component(root, effect=0.0, noise=0.03), tmp_path / "out")
    assert found["series"][0]["fit"]["log2"]["b"]["low"] < 0 < found["series"][0]["fit"]["log2"]["b"]["high"]
    assert "The interval covers 0: the data cannot tell whether there is a slope." in page
    assert "cannot tell from 0 with 3 seeds" in page


def test_a_control_has_its_own_line(root: Path, tmp_path: Path) -> None:
    runs = swept.by_component(root, amounts=(1, 5)) + swept.by_component(root, 0.0, amounts=(1, 5), is_control=True)
    page, found = written(runs, tmp_path / "out")
    assert [one["is_control"] for one in found["series"]] == [False, True]
    assert re.search(r"- K 5: [+-]0\.0\d+, s\.e\. 0\.0\d+ over 3 seeds: \*\*within 2 s\.e\.\*\*", page)
    moved = swept.by_component(root, -0.2, amounts=(1, 5), is_control=True)
    page, _ = written([*runs[:6], *moved], tmp_path / "out")
    assert "**not within 2 s.e.**; with 3 seeds chance alone does that in 18 % of cases" in page


def test_data_that_grows_with_the_axis_is_a_warning(root: Path, tmp_path: Path) -> None:
    page, found = written(swept.by_component(root, amounts=(1, 3), tokens={1: 980_000}), tmp_path / "out")
    assert "**K and the amount of data change together**" in page
    assert found["unique_tokens"] == {"least": 980_000, "most": 1_000_000}
    page, _ = written(swept.by_component(root, amounts=(1, 3), is_control=True, tokens={1: 980_000}), tmp_path / "out")
    assert "change together" in page
    same = swept.by_component(root, amounts=(1, 3), tokens={1: 995_000})
    page, _ = written(same, tmp_path / "out")
    assert "change together" not in page
    assert "1000000 in every run." in written(swept.by_component(root, amounts=(1, 3)), tmp_path / "out")[0]


def test_data_that_differs_between_seeds_alone_is_no_warning(root: Path, tmp_path: Path) -> None:
    runs = []
    for seed, tokens in ((0, 100_000), (1, 150_000)):
        for layers in (1, 2):
            data = made.changed(made.DATA)
            data["train"]["about"] = {"source": "arxiv", "tokens": tokens}
            record = swept.point(root, {"model.n_layer": layers, "seed": seed}, data=data)
            runs.append(swept.trained(record, root))
    page, _ = written(runs, tmp_path / "out")
    assert "unique training tokens" in page
    assert "change together" not in page


def test_every_run_that_does_not_count_is_named(root: Path, tmp_path: Path) -> None:
    runs = swept.by_component(root, amounts=(1, 3), seeds=(0, 1, 2))
    for status, steps in (("diverged", 12), ("crashed", 7), ("stopped", 9), ("finished", 20)):
        varies = {"dataset.num_components": 5, "seed": len(runs)}
        runs.append(swept.trained(swept.point(root, varies), root, status=status, steps=steps))
    nowhere = swept.trained(swept.point(root, {"dataset.num_components": 5, "seed": 20}), root)
    swept.examined(nowhere, {"cs.AI": math.nan})
    other = swept.trained(swept.point(root, {"dataset.num_components": 3, "seed": 21}), root)
    swept.examined(other, {name: 3.0 for name in swept.chosen(3, 0)}, offset=5)
    again = swept.trained(swept.point(root, {"dataset.num_components": 1, "seed": 0}), root)
    swept.examined(again, {name: 2.5 for name in swept.chosen(1, 0)})
    runs += [nowhere, other, again]
    plan = [{"key": "k9", "words": [], "varies": {"dataset.num_components": 11, "seed": 9}}]
    plan += [{"key": "old", "words": [], "varies": {"dataset.num_components": 2}, "retired": True}]
    (root / ".sweeps" / "study").mkdir(parents=True)
    write_json(root / ".sweeps" / "study" / "sweep.json", {"schema": 1, "points": plan})
    page, found = written(runs, tmp_path / "out")
    left = {one["what"]: one["reason"] for one in found["left_out"]}
    assert left["text/7"] == "diverged at step 12"
    assert left["text/8"] == "crashed at step 7"
    assert left["text/9"] == "stopped at step 9"
    assert left["text/10"] == "did 20 of 40 planned steps"
    assert "NaN" in left["text/11"]
    assert "measured on other rows" in left["text/12"]
    assert left["text/1"] == "text/13 is a later run of the same point"
    assert left["dataset.num_components=11 seed=9"] == "no run yet"
    assert len(left) == 8
    assert {one["run"] for one in found["runs"]} == {f"text/{i}" for i in (2, 3, 4, 5, 6, 13)}
    for name in left:
        assert name in page


def test_one_seed_has_no_interval_and_says_so(root: Path, tmp_path: Path) -> None:
    page, found = written(swept.by_component(root, seeds=(0,)), tmp_path / "out")
    assert all(one["paired"]["low"] is None for one in found["series"][0]["differences"])
    assert "one seed: no interval over seeds" in page
    assert "5 points of one seed" in page


def test_without_a_test_eval_of_all_the_own_evals_count(root: Path, tmp_path: Path) -> None:
    runs = swept.by_component(root, amounts=(1, 3), seeds=(0, 1))
    for path in (runs[-1].path / "evals").iterdir():
        path.unlink()
    page, found = written(runs, tmp_path / "out")
    assert found["metric"] == "val/loss"
    assert "1 of 4 runs were not evaluated on the test set (text/4)" in page
    _, found = written(runs, tmp_path / "out", metric="test/mean_of_groups")
    assert found["left_out"] == [{"what": "text/4", "reason": "has no test/mean_of_groups"}]


def test_evals_of_one_run_do_not_decide_for_the_others(root: Path, tmp_path: Path) -> None:
    """A single `rung eval --split val` must not cost the other runs their place."""
    runs = learning_rates(root, seeds=(0,))
    swept.examined(runs[0], {"a": 3.0}, split="val")
    page, found = written(runs, tmp_path / "out")
    assert found["metric"] == "val/loss"
    assert len(found["runs"]) == 4
    assert found["left_out"] == []
    assert "each run at its best eval" in page


def test_the_split_that_all_runs_were_evaluated_on_counts(root: Path, tmp_path: Path) -> None:
    runs = learning_rates(root, seeds=(0,))
    for number, run in enumerate(runs):
        swept.examined(run, {"a": 3.0 + number}, split="dev")
        swept.examined(run, {"a": 9.0}, split="dev-hard", step=41)  # another split, though its name begins alike
    page, found = written(runs, tmp_path / "out")
    assert found["metric"] == "dev/mean_of_groups"
    assert [one["value"] for one in found["runs"]] == [3.0, 4.0, 5.0, 6.0]
    assert "the saves named below, at step 40" in page


def test_a_component_that_is_not_finite_is_not_averaged_away(root: Path, tmp_path: Path) -> None:
    runs = swept.by_component(root, amounts=(1, 3), seeds=(0, 1))
    file = runs[1].path / "evals" / "test-40.json"
    document = json.loads(file.read_text())
    groups = document["sets"]["test"]["groups"]
    name = next(name for name in groups if name not in swept.chosen(1, 0))
    groups[name] |= {"loss": None, "se": None}
    write_json(file, document)
    _, found = written(runs, tmp_path / "out")
    assert found["left_out"] == [{"what": "text/2", "reason": "its test/mean_of_groups is NaN"}]
    groups[name]["targets"] = 0.0  # a component without a test document is no failure
    write_json(file, document)
    _, found = written(runs, tmp_path / "out")
    assert found["left_out"] == []


def test_zero_components_are_all_of_them(root: Path, tmp_path: Path) -> None:
    runs = swept.by_component(root, amounts=(1, 3), seeds=(0, 1), noise=0.0)
    for seed in (0, 1):
        run = swept.trained(swept.point(root, {"dataset.num_components": 0, "seed": seed}), root)
        swept.examined(run, {name: level - 0.1 * math.log2(11) for name, level in swept.levels().items()})
        runs.append(run)
    _, found = written(runs, tmp_path / "out")
    assert found["series"][0]["x"] == [1, 3, 11]
    assert found["series"][0]["fit"]["log2"]["b"]["value"] == pytest.approx(-0.1)


def test_runs_that_ran_out_of_patience_count(root: Path, tmp_path: Path) -> None:
    runs = []
    for rate, steps in ((1e-3, 20), (2e-3, 40)):
        record = swept.point(root, {"lr.learning_rate": rate}, config={"eval_patience": 2})
        runs.append(swept.trained(record, root, steps=steps))
    _, found = written(runs, tmp_path / "out")
    assert len(found["runs"]) == 2


def test_seeds_alone_are_repeats_at_one_place(root: Path, tmp_path: Path) -> None:
    runs = [swept.trained(swept.point(root, {"seed": seed}), root, 2 + seed / 10) for seed in range(3)]
    page, _ = written(runs, tmp_path / "out")
    assert "| all | 2.0000 | 2.1000 | 2.2000 | 2.1000 | 0.1000 |" in page
    assert "best" not in page.replace("best eval", "")
    one = [swept.trained(swept.point(root, {"dataset.num_components": 3, "seed": 0}, name="b"), root)]
    _, found = written(one, tmp_path / "out")
    assert found["x"] == "dataset.num_components"


def test_series_may_have_other_baselines(root: Path, tmp_path: Path) -> None:
    runs = []
    for rate, layers in ((1e-3, (1, 2, 4)), (2e-3, (2, 4))):
        for num in layers:
            varies = {"model.n_layer": num, "lr.learning_rate": rate, "seed": 0}
            runs += [swept.trained(swept.point(root, {**varies, "seed": seed}), root, 3 - num / 10) for seed in (0, 1)]
    page, _ = written(runs, tmp_path / "out")
    assert "difference against n_layer = 1 or 2" in page
    assert "**lr.learning_rate=0.002**, against 2" in page


def test_every_value_of_a_search_is_on_the_page(root: Path, tmp_path: Path) -> None:
    draw, runs = random.Random(1), []
    for number in range(8):
        varies = {"model.n_layer": draw.choice([2, 4]), "lr.learning_rate": draw.random(), "lr.min_lr": draw.random()}
        record = swept.point(root, varies, experiment="find")
        status = "diverged" if number == 3 else "finished"
        runs.append(swept.trained(record, root, 2 + varies["lr.learning_rate"], status))
    page, found = written(runs, tmp_path / "out")
    assert found["x"] == "lr.learning_rate"
    assert len(found["series"]) == 1
    best = min(found["runs"], key=lambda one: one["value"])
    assert f"= {best['x']}**, model.n_layer = {best['beside']['model.n_layer']}, lr.min_lr = " in page
    rows = list(csv.DictReader((tmp_path / "out" / "runs.csv").open()))
    assert float(rows[0]["lr.min_lr"]) == found["runs"][0]["beside"]["lr.min_lr"]


def learning_rates(root: Path, best: float = 1e-3, seeds: Sequence[int] = (0, 1, 2)) -> list[Run]:
    runs = []
    for rate in (1e-4, 3e-4, 1e-3, 3e-3):
        for seed in seeds:
            loss = 2 + 0.3 * math.log10(rate / best) ** 2 + 0.01 * random.Random(f"{rate}/{seed}").gauss(0, 1)
            record = swept.point(root, {"lr.learning_rate": rate, "seed": seed}, experiment="lr")
            runs.append(swept.trained(record, root, loss))
    return runs


def test_a_sweep_of_learning_rates(root: Path, tmp_path: Path) -> None:
    page, found = written(learning_rates(root), tmp_path / "out")
    assert found["x"] == "lr.learning_rate"
    assert found["series"][0]["fit"] is None
    best = found["series"][0]["best"]
    assert (best["at"], best["is_edge"], best["num_seeds"]) == (0.001, False, 3)
    assert "It is not at the edge of what was tried." in page
    assert "difference against" not in page
    assert (tmp_path / "out" / "response.svg").is_file()


def test_a_best_at_the_edge_is_told(root: Path, tmp_path: Path) -> None:
    page, found = written(learning_rates(root, best=1e-2, seeds=(0,)), tmp_path / "out")
    assert found["series"][0]["best"]["is_edge"]
    assert "It is at the edge of what was tried: the optimum may lie beyond it." in page
    assert "one seed cannot tell the two apart" in page


def test_what_diverged_beyond_the_best_was_tried(root: Path, tmp_path: Path) -> None:
    runs = learning_rates(root, best=1e-2, seeds=(0, 1))
    for rate, seed in ((1e-2, 0), (3e-3, 2)):
        record = swept.point(root, {"lr.learning_rate": rate, "seed": seed}, experiment="lr")
        runs.append(swept.trained(record, root, status="diverged"))
    page, found = written(runs, tmp_path / "out")
    assert found["series"][0]["best"]["at"] == 0.003
    assert "1 run there diverged. It is not at the edge of what was tried." in page


@pytest.mark.parametrize("word", ["nan", "inf", "1e999"])
def test_a_value_that_is_not_finite_is_no_place_on_an_axis(root: Path, tmp_path: Path, word: str) -> None:
    runs = [swept.trained(swept.point(root, {"lr.learning_rate": rate}), root) for rate in (word, 0.1, 0.2)]
    written(runs, tmp_path / "out")
    assert not (tmp_path / "out" / "response.svg").exists()


def test_a_part_of_a_set_is_counted_as_the_set_is(root: Path, tmp_path: Path) -> None:
    runs = []
    for number, mask in enumerate(("all", "all", "notes")):
        record = swept.point(root, {"lr.learning_rate": 0.1 + number})
        record.event("eval", step=10, results={"val": {"loss": 2.0, "component/a": 1.5, "targets": 10.0}})
        runs.append(swept.trained(record, root))
        write_json(runs[-1].path / "definitions.json", {"eval/val": {"mask": mask, "rows_hash": str(number)}})
    _, found = written([open_run(run.id, root) for run in runs], tmp_path / "out", metric="val/component/a")
    assert [one["what"] for one in found["left_out"]] == ["text/3"]


def test_small_figures_are_no_zeros(root: Path, tmp_path: Path) -> None:
    runs = []
    for layers in (1, 2):
        for seed in (0, 1):
            record = swept.point(root, {"model.n_layer": layers, "seed": seed})
            runs.append(swept.trained(record, root, 3e-5 - layers * 1e-5 + seed * 1e-7 * layers))
    page, _ = written(runs, tmp_path / "out")
    assert "| 2 | -9.9e-06 | [-1.1e-05, -9.3e-06] | lower, 2 seeds |".replace("[", "\\[").replace("]", "\\]") in page


def test_choices_that_are_no_numbers(root: Path, tmp_path: Path) -> None:
    runs = []
    for word in ("cosine", "wsd"):
        for seed in (0, 1):
            record = swept.point(root, {"lr.schedule": word, "seed": seed}, experiment="lr")
            runs.append(swept.trained(record, root, 2.0 + (word == "wsd") * 0.1 + seed * 0.01))
    page, found = written(runs, tmp_path / "out")
    assert found["series"][0]["best"]["at"] == "cosine"
    assert "edge" not in page
    assert not (tmp_path / "out" / "response.svg").exists()


def test_a_power_law_over_tokens(root: Path, tmp_path: Path) -> None:
    runs = []
    for tokens in ("1M tokens", "2M tokens", "4M tokens", "8M tokens", "16M tokens"):
        for seed in (0, 1, 2):
            x = float(tokens.partition("M")[0])
            loss = 2 + 1.5 * x**-0.4 + 0.3 * seed + 0.005 * random.Random(f"{x}/{seed}").gauss(0, 1)
            record = swept.point(root, {"optimizer.max_iters": tokens, "seed": seed}, experiment="tok")
            runs.append(swept.trained(record, root, loss))
    page, found = written(runs, tmp_path / "out")
    law = found["series"][0]["fit"]["power"]
    assert law["first"] == 1e6
    assert law["e"]["low"] < 0.4 < law["e"]["high"]
    assert law["d"]["low"] < 1.5 < law["d"]["high"]
    assert law["c"]["low"] < 2.3 < law["c"]["high"]
    few = [run for run in runs if run.config()["optimizer"]["max_iters"] in ("1M tokens", "2M tokens", "4M tokens")]
    page, found = written(few, tmp_path / "out")
    assert found["series"][0]["fit"]["power"] is None
    assert "not fitted: 3 values of x" in page


def test_steps_and_tokens_are_no_one_axis(root: Path, tmp_path: Path) -> None:
    budgets = (500, "1000 steps", "10M tokens", "2 epochs")
    runs = [swept.trained(swept.point(root, {"optimizer.max_iters": one}), root) for one in budgets]
    _, found = written(runs, tmp_path / "out")
    assert found["series"][0]["differences"] == []
    assert found["series"][0]["fit"] is None
    _, found = written(runs[:2], tmp_path / "out")
    assert len(found["series"][0]["differences"]) == 1


def test_two_keys_make_series_and_one_that_goes_along_is_told(root: Path, tmp_path: Path) -> None:
    runs = []
    for layers in (2, 4):
        for rate in (1e-3, 2e-3, 4e-3):
            for seed in (0, 1):
                varies = {"lr.learning_rate": rate, "model.n_layer": layers, "seed": seed}
                runs.append(swept.trained(swept.point(root, varies), root, 2 - layers / 10 + rate + seed / 100))
    _, found = written(runs, tmp_path / "out")
    assert [one["series"] for one in found["series"]] == ["model.n_layer=2", "model.n_layer=4"]
    _, found = written(runs, tmp_path / "out", x="model.n_layer")
    assert len(found["series"]) == 3
    along = [
        run for run in runs if (run.config()["model"]["n_layer"] == 4) == (run.config()["lr"]["learning_rate"] > 1.5e-3)
    ]
    page, found = written(along, tmp_path / "out")
    assert found["moves_along"] == ["model.n_layer"]
    assert "**More than one thing changes**" in page


def test_what_differs_besides_is_told(root: Path, tmp_path: Path) -> None:
    runs = learning_rates(root, seeds=(0, 1))
    code = tmp_path / "other"
    code.mkdir()
    (code / "model.py").write_text("WIDTH = 64\n")
    record = swept.point(root, {"lr.learning_rate": 5e-4, "seed": 0}, experiment="lr", code_root=code,
                         config={"optimizer__grad_clip": 0.5})  # fmt: skip
    runs.append(swept.trained(record, root))
    page, found = written(runs, tmp_path / "out")
    told = {one["what"].partition(" (")[0]: one["runs"] for one in found["differs_besides"]}
    assert told == {"config: optimizer.grad_clip": ["lr/9"], "code: model.py": ["lr/9"]}
    assert "optimizer.grad_clip" in page
    assert "lr/9" in page


def test_the_same_runs_give_the_same_bytes_wherever_they_lie(root: Path, tmp_path: Path) -> None:
    runs = swept.by_component(root, amounts=(1, 3))
    written(runs, tmp_path / "a")
    moved = root.rename(tmp_path / "elsewhere")
    written([open_run(run.id, moved) for run in runs], tmp_path / "deeper" / "b")
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "deeper" / "b").iterdir())
    assert {"report.md", "report.html", "report.json", "response.svg", "difference.svg", "positions.svg",
            "runs.csv", "differences.csv", "components.csv", "positions.csv"} == set(files)  # fmt: skip
    for name in files:
        data = (tmp_path / "a" / name).read_bytes()
        assert data == (tmp_path / "deeper" / "b" / name).read_bytes(), name
        assert str(tmp_path).encode() not in data, name


def test_every_figure_of_a_run_is_on_the_page_to_all_digits(root: Path, tmp_path: Path) -> None:
    runs = swept.by_component(root, amounts=(1, 3))
    page, _ = written(runs, tmp_path / "out")
    for run in runs:
        mean = json.loads((run.path / "evals" / "test-40.json").read_text())["sets"]["test"]["mean_of_groups"]
        assert f"| {mean['loss']} | {mean['se']} | 40 |" in page


def test_files_of_an_earlier_report_go_and_others_stay(root: Path, tmp_path: Path) -> None:
    written(swept.by_component(root, amounts=(1, 3)), tmp_path / "out")
    (tmp_path / "out" / "mine.csv").write_text("x\n")
    written(learning_rates(root), tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "mine.csv" in names
    assert "positions.svg" not in names
    assert "components.csv" not in names


def test_text_of_users_stays_text(root: Path, tmp_path: Path) -> None:
    bad = "<script>alert(1)</script> **x** | `y` \x1b[31m"
    runs = []
    for seed in (0, 1):
        for num in (1, 2):
            run = swept.trained(swept.point(root, {"dataset.num_components": num, "seed": seed}), root)
            swept.examined(run, {bad: 2.0 + seed, "# b\nc": 3.0})
            runs.append(run)
    page, _ = written(runs, tmp_path / "out", name=bad)
    html = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "\x1b" not in html + page
    assert "\\<script>" in page
    assert "src=" not in html
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(("asked", "code"), [({"x": "lr.nothing"}, "no-key"), ({"metric": "val/nothing"}, "no-metric")])
def test_mistakes_are_one_sentence(root: Path, tmp_path: Path, asked: dict[str, str], code: str) -> None:
    with raises_code(code) as caught:
        written(learning_rates(root, seeds=(0,)), tmp_path / "out", **asked)
    assert next(iter(asked.values())) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_nothing_to_report(root: Path, tmp_path: Path) -> None:
    with raises_code("no-run"):
        written([], tmp_path / "out")
    sick = swept.trained(swept.point(root, {"seed": 0}), root, status="diverged")
    with raises_code("no-run") as caught:
        written([sick], tmp_path / "out")
    assert "text/1: diverged" in str(caught.value)


def test_odd_records_cost_no_other_run_its_place(root: Path, tmp_path: Path) -> None:
    runs = swept.by_component(root, amounts=(1, 3), seeds=(0, 1))
    (runs[3].path / "evals" / "test-40.json").write_text('{"sets": {"test": 3}, "step": "x"}')
    (runs[2].path / "data.json").write_text('{"train": {"about": "text"}}')
    _, found = written(runs, tmp_path / "out", metric="test/loss")
    assert {one["run"] for one in found["runs"]} == {"text/1", "text/2", "text/3"}
    (runs[1].path / "config.yaml").write_text("{")
    _, found = written([open_run(run.id, root) for run in runs], tmp_path / "out", metric="test/loss")
    assert "text/2" in {one["what"] for one in found["left_out"]}
