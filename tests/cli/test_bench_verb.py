"""If this fails, a machine became slower and nobody is told, or noise is called a regression."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from rung.bench.data import stream_against_step
from rung.bench.page import Figure, compare, earlier, keep, machine, page_of
from rung.cli import cli
from rung.cli.bench import PARTS
from tests.errors import raises_code

HERE = {"host": "a", "device": "cpu", "torch": "2.13"}


def page(*values: float, better: Any = "higher", name: str = "step/rate", **where: str) -> dict[str, Any]:
    return page_of({**HERE, **where}, [Figure(name, values, "targets/s", "made up", better)])


def verdict(now: dict[str, Any], before: list[dict[str, Any]]) -> tuple[bool, bool]:
    (found,) = compare(now, before)
    return found.is_slower, found.is_faster


@pytest.mark.parametrize(
    ("now", "before", "is_slower"),
    [
        ([100.0, 101.0], [[100.0, 101.0]] * 3, False),
        ([99.0, 99.0], [[100.0, 100.0]] * 3, False),  # less than 2 %
        ([90.0, 91.0], [[100.0, 101.0]] * 3, True),
        ([90.0, 91.0], [[100.0, 101.0]], True),  # one page is enough
        ([60.0, 90.0, 90.0, 120.0], [[100.0, 100.0]] * 3, True),  # one disturbed round either way
        ([70.0, 90.0, 110.0], [[100.0, 100.0]] * 3, False),  # but rounds that lie apart hide it
        ([90.0, 91.0], [[100.0, 100.0], [88.0, 88.0], [103.0, 103.0]], False),  # and so do pages that do
        ([60.0, 61.0], [[100.0, 100.0], [88.0, 88.0], [103.0, 103.0]], True),
    ],
)
def test_slower_is_what_noise_does_not_explain(now: list[float], before: list[list[float]], is_slower: bool) -> None:
    assert verdict(page(*now), [page(*values) for values in before]) == (is_slower, False)


def test_less_is_better_where_the_figure_says_so() -> None:
    before = [page(10.0, 10.1, better="lower")] * 2
    assert verdict(page(12.0, 12.1, better="lower"), before) == (True, False)
    assert verdict(page(8.0, 8.1, better="lower"), before) == (False, True)
    (found,) = compare(page(20.0, better="lower"), before)
    assert found.ratio == pytest.approx(10.05 / 20)


def test_only_pages_of_the_same_machine_are_compared(tmp_path: Path) -> None:
    for number in range(12):
        keep(page(float(number)), tmp_path)
    keep(page(1000.0, torch="2.14"), tmp_path)
    keep(page(1000.0, device="cuda"), tmp_path)
    (tmp_path / "notes.json").write_text("not a page", "utf-8")
    found = earlier(tmp_path, HERE)
    assert [one["figures"]["step/rate"]["median"] for one in found] == list(range(2, 12))
    assert earlier(tmp_path / "nowhere", HERE) == []
    assert compare(page(1.0, name="new/figure"), found) == []


@pytest.mark.parametrize(
    "figure", [None, 3, {}, {"median": "fast"}, {"median": 1.0, "values": []}, {"median": 1.0, "values": [0.0]}]
)
def test_a_page_of_another_form_does_not_cost_the_measurement(figure: Any) -> None:
    odd = {**page(1.0), "figures": {"step/rate": figure}}
    assert compare(page(1.0), [odd]) == []
    (found,) = compare(page(1.0), [odd, page(2.0)])
    assert (found.before, found.num_pages) == (2.0, 1)


def test_a_slower_figure_is_told_with_both_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Figure("logging/step", [15.4], "us", "made up", "lower")
    monkeypatch.setattr("rung.bench.parts.measure", lambda name, device, is_quick: [figure])
    keep(page_of(machine("cpu", False), [Figure("logging/step", [12.3], "us", "made up", "lower")]), tmp_path)
    done = CliRunner().invoke(cli, ["bench", "logging", "--pages", str(tmp_path)])
    assert "slower than before: 15.4 us against 12.3, the median of 1 earlier page; noise is 2 %" in done.output


def test_a_stream_is_timed_alone_and_then_ahead_of_the_steps() -> None:
    """In turns, the workers would gather ahead while rows are gathered inline, and no step would ever wait."""
    calls: list[tuple[str, int]] = []
    progress = SimpleNamespace(step=0, position=0)

    def prefetcher(workers: int = 2) -> Any:
        name = "ahead" if workers else "inline"
        calls.append((f"{name} from row", progress.position))
        return SimpleNamespace(
            take=lambda step: calls.append((name, step)), close=lambda: calls.append((f"{name} ends", progress.step))
        )

    setup: Any = SimpleNamespace(
        world=SimpleNamespace(device=torch.device("cpu")),
        state=SimpleNamespace(progress=progress, model=torch.nn.Linear(1, 1)),
        layout=SimpleNamespace(rows_per_step=8),
        cfg=SimpleNamespace(system=SimpleNamespace(data_workers=2)),
        schedule=SimpleNamespace(peak=1.0),
        stepper=SimpleNamespace(step=lambda step, *more: calls.append(("step", step))),
        prefetcher=prefetcher,
    )
    found = stream_against_step(setup, 3)
    expected = [("inline from row", 0), *(("inline", n) for n in range(4)), ("inline ends", 4), ("ahead from row", 32)]
    expected += [(name, n) for n in range(4, 4 + 4 + 3) for name in ("ahead", "step")]  # 4 to use up what was ahead
    assert calls == [*expected, ("ahead ends", 11)]
    assert [len(found[name]) for name in ("gather_s", "wait_s", "step_s")] == [3, 3, 3]


def test_a_call_measures_writes_a_page_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNG_CACHE", str(tmp_path))
    pages = []
    for _ in range(2):
        done = CliRunner().invoke(cli, ["bench", "logging", "generation", "--quick", "--json"])
        assert done.exit_code == 0, done.output
        pages.append(json.loads(done.stdout))
    for one in pages:
        assert set(one["figures"]) == {"logging/step", "generation/batch_1", "generation/batch_8"}
        assert all(len(figure["values"]) == 2 and figure["median"] > 0 for figure in one["figures"].values())
        assert json.loads(Path(one["page"]).read_bytes())["figures"] == one["figures"]
        assert Path(one["page"]).parent == tmp_path / "bench"
    assert pages[0]["compared"] == {}
    assert set(pages[1]["compared"]) == set(pages[1]["figures"])
    before = pages[1]["compared"]["logging/step"]
    assert before["pages"] == 1
    assert before["before"] == pages[0]["figures"]["logging/step"]["median"]


def test_a_regression_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([[5.0, 5.1], [50.0, 51.0]])

    def measure(name: str, device: str, is_quick: bool) -> list[Figure]:
        return [Figure("logging/step", next(figures), "us", "made up", "lower")]

    monkeypatch.setattr("rung.bench.parts.measure", measure)
    said = [CliRunner().invoke(cli, ["bench", "logging", "--pages", str(tmp_path)]).output for _ in range(2)]
    assert "slower" not in said[0]
    assert "logging/step is slower than before" in said[1]


def test_every_part_has_its_name_in_the_verb() -> None:
    from rung.bench.parts import PARTS as MEASURED

    assert tuple(MEASURED) == PARTS


def test_the_stream_of_a_recipe_is_timed_against_its_step(
    piano_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        f"dataset.base_dataset_name={piano_data}", "model.n_layer=1", "model.n_head=1", "model.n_embd=16",
        "data.context_size=32", "data.batch_size=4", "system.device=cpu", "system.threads=1",
    ]  # fmt: skip
    done = CliRunner().invoke(cli, ["bench", "data", "piano", *words, "--steps", "3", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [len(found[name]) for name in ("gather_s", "wait_s", "step_s")] == [3, 3, 3]
    assert (found["rows_per_step"], found["data_workers"]) == (4, 1)
    assert 0 <= found["wait_ratio"] < 1
    assert found["rows_per_s"] > 0
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_measured_is_refused() -> None:
    with raises_code("bad-value"):
        CliRunner().invoke(cli, ["bench", "stap"], catch_exceptions=False)
