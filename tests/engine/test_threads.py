"""If this fails, a small model trains on so many threads that they wait for each other, or resuming moves digits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rung.engine.build import restore
from rung.engine.checkpoint import Checkpoints
from rung.engine.threads import choose_threads, compile_line, cores
from tests.contract.cases import CASES, Case


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    make, data = CASES["text"]
    return make(request.getfixturevalue(data))


@pytest.fixture(autouse=True)
def no_threads_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    num = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(num)


@pytest.mark.parametrize(
    ("flops", "num_cores", "num"), [(1e7, 8, 1), (1e9, 8, 2), (1e12, 8, 8), (1e12, 1, 1), (0, 8, 8)]
)
def test_threads_follow_the_work_of_a_batch(flops: float, num_cores: int, num: int) -> None:
    chosen, why = choose_threads(flops, num_cores)
    assert chosen == num
    assert str(num_cores) in why


def test_a_small_model_trains_on_one_thread_and_says_why(case: Case, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    setup = case.setup("system.device=cpu", "system.threads=0", root=tmp_path)
    assert torch.get_num_threads() == setup.derived["threads"] == 1
    assert any("1 threads (" in line for line in setup.chosen)


def test_what_was_asked_for_holds(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = case.setup("system.device=cpu", "system.threads=2", root=tmp_path)
    assert torch.get_num_threads() == setup.derived["threads"] == 2
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    setup = case.setup("system.device=cpu", "system.threads=0", root=tmp_path)
    assert (setup.derived["threads"], setup.derived["why_threads"]) == (2, "OMP_NUM_THREADS")


def test_a_resumed_run_takes_the_number_it_had(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.engine.build.cores", lambda: 4)
    first = case.setup("system.device=cpu", "system.threads=0", root=tmp_path)
    torch.set_num_threads(2)
    saved = Checkpoints(tmp_path / "saves").save(first.state, first.save_extra())
    again = case.setup("system.device=cpu", "system.threads=0", root=tmp_path)
    assert again.derived["threads"] == 1
    restore(again, saved)
    assert torch.get_num_threads() == again.derived["threads"] == 2
    asked = case.setup("system.device=cpu", "system.threads=1", root=tmp_path)
    restore(asked, saved)
    assert torch.get_num_threads() == asked.derived["threads"] == 1


def test_compiling_is_said_to_pay_only_in_long_runs() -> None:
    assert "will not pay" in compile_line(1e9, 1000, None, 1)  # 20 s
    assert "it pays" in compile_line(1e12, 10_000, None, 2)  # 28 h
    assert "will not pay" in compile_line(1e12, 10_000, 120.0, 2)  # but it ends after two minutes
    assert compile_line(1e9, None, None, 1) == ""


def test_there_is_a_core() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
