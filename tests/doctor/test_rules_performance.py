"""If this fails, the doctor blames a slow run on the wrong thing, or warns where nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.doctor.diagnose import diagnose
from rung.doctor.finding import Finding
from rung.doctor.history import History, Series
from rung.robust import theil_sen
from tests.cases.performance_cases import kept_graphs, made, slow_loader, throttled


def found(history: History) -> dict[str, Finding]:
    return {f.rule: f for f in diagnose(history)}


@pytest.mark.parametrize(("wait", "is_found"), [(0.005, False), (0.02, True)])
def test_waiting_is_judged_by_its_share(wait: float, is_found: bool) -> None:
    assert ("P1" in found(made(wait_s=wait, step_s=0.1 + wait))) == is_found


def test_a_loader_that_waits_in_each_tenth_step_is_one() -> None:
    wait = np.where(np.arange(600) % 10 == 0, 0.8, 0.0)
    assert found(made(wait_s=wait, step_s=0.1 + wait))["P1"].severity == "warn"


def test_waiting_says_the_gain_and_the_key() -> None:
    finding = found(slow_loader(1))["P1"]
    gain = float(finding.evidence[1].split(": ")[1].split("x")[0])
    assert gain == pytest.approx(0.26 / 0.10, rel=0.05)  # waits of 0.16 in steps of 0.26 seconds
    assert finding.command("text/3").startswith("rung train --parent text/3 system.data_workers=2")


def test_a_run_of_seconds_is_not_warned() -> None:
    """Sixty per cent of nothing."""
    assert found(made(wait_s=0.006, step_s=0.010, copy_s=0.0))["P1"].severity == "info"


def test_the_first_epoch_may_read_the_disk() -> None:
    wait = np.where(np.arange(140) < 50, 0.4, 0.001)
    history = made(140, wait_s=wait, step_s=0.1 + wait)
    history.derived["epoch_rows"] = 10**6
    assert "P1" not in found(history)


def test_copies_are_the_cause_of_waiting_for_them() -> None:
    history = made(copy_s=0.15, wait_s=0.15, step_s=0.25)
    assert set(found(history)) == {"P2"}
    history.derived["device"] = "cpu"
    assert set(found(history)) == {"P1"}  # nothing is copied to a CPU: it is the gathering


def test_copies_without_a_thread_are_not_hidden() -> None:
    history = made(copy_s=0.05, wait_s=0.0)
    assert "P2" not in found(history)
    history.config["system.data_workers"] = 0
    assert found(history)["P2"].changes == {"system.data_workers": 1}


def test_memory_that_grows_is_told_with_its_pace() -> None:
    finding = found(kept_graphs(1))["P4"]
    assert "memory_mb" in finding.title
    pace = float(finding.evidence[0].split("MB, ")[1].split(" MB per 1000")[0])
    assert pace == pytest.approx(500, rel=0.05)


def test_longer_rows_may_need_more_memory() -> None:
    history = kept_graphs(1)
    targets = np.linspace(1e4, 3e4, 600)
    history.rows["targets"] = Series(np.arange(600), targets)
    assert "P4" not in found(history)


def test_an_allocator_that_goes_up_and_down_is_no_leak() -> None:
    """As a run on a CPU recorded it; and one that leaks at its evals, and stands still between them."""
    steps = np.arange(100, 560, 20)
    seen = [
        583, 589, 589, 603, 603, 606, 620, 598, 600, 599, 599, 599,
        597, 597, 623, 616, 613, 604, 603, 646, 638, 638, 638,
    ]  # fmt: skip
    assert "P4" not in found(made(rss_mb=(steps, np.array(seen, float))))
    assert "P4" in found(made(rss_mb=(steps, 590.0 + 15 * (steps // 100))))


def test_pages_of_a_store_come_in_the_first_epoch_only() -> None:
    steps = np.arange(0, 600, 20)
    history = made(rss_mb=(steps, 2000 + 1.0 * steps))
    assert "P4" in found(history)  # in the sixth epoch
    history.derived["epoch_rows"] = 10**6
    assert "P4" not in found(history)


def test_slower_says_when_and_what_happened_there() -> None:
    history = throttled(1)
    history.events.append({"kind": "resume", "step": 303})
    finding = found(history)["P5"]
    assert finding.since is not None
    assert abs(finding.since - 300) <= 5
    assert "resume at 303" in " ".join(finding.evidence)
    share = float(finding.what.split("became ")[1].split("%")[0])
    assert share == pytest.approx(100 / 3, abs=2)  # half as long again


@pytest.mark.parametrize(("share", "last"), [(1 / 3, 140), (1 / 3, 400), (0, 140)])
def test_neighbours_that_come_and_go_are_no_slow_machine(share: float, last: int) -> None:
    """Every third stretch of 140 steps takes half as long again; they are there at the end, too, or stay longer."""
    steps = np.arange(3000)
    busy = (steps % 420 < 420 * share) & (steps > 420) | (steps >= 3000 - last)
    seconds = 0.5 * np.where(busy, 1.5, 1.0) * np.random.default_rng(0).lognormal(0, 0.05, 3000)
    assert "P5" not in found(made(3000, step_s=seconds))


def test_the_best_of_many_windows_is_no_measure() -> None:
    """One quick minute in an hour, at the beginning."""
    seconds = 0.5 * np.random.default_rng(0).lognormal(0, 0.05, 3000)
    seconds[100:400] *= 0.7
    assert "P5" not in found(made(3000, step_s=seconds))


def test_it_began_where_the_last_slow_stretch_did() -> None:
    """A bad minute early on is over; from step 2000 on it stays slow."""
    slow = np.ones(3000)
    slow[160:260] = 1.6
    slow[2000:] = 1.5
    seconds = 0.5 * slow * np.random.default_rng(0).lognormal(0, 0.05, 3000)
    finding = found(made(3000, step_s=seconds))["P5"]
    assert finding.since is not None
    assert abs(finding.since - 2000) <= 5


def test_a_curriculum_is_not_a_slow_machine() -> None:
    history = throttled(1)
    history.rows["targets"] = Series(np.arange(600), np.where(np.arange(600) < 300, 1e4, 1.1e4))
    assert "P5" not in found(history)


def test_a_parent_with_the_same_config_is_a_measure() -> None:
    history, parent = made(seed=2, step_s=0.11), made(seed=1, step_s=0.10)
    history.parent, parent.run_id = parent, "made/0"
    assert found(history)["P5"].severity == "info"
    parent.config["system.compile"] = True
    assert "P5" not in found(history)


@given(st.floats(-3, 3), st.floats(-100, 100), st.integers(5, 60))
def test_theil_sen_of_a_line_is_its_slope(slope: float, start: float, num: int) -> None:
    steps = np.arange(num) * 20
    measured, p_value = theil_sen(steps, start + slope * steps)
    assert measured == pytest.approx(slope, abs=1e-9)
    if abs(slope) > 1e-6 and num >= 10:
        assert p_value < 0.01


def test_theil_sen_does_not_mind_wild_values() -> None:
    values = np.arange(40.0)
    values[[3, 20, 33]] = 1e6
    slope, p_value = theil_sen(np.arange(40), values)
    assert slope == pytest.approx(1.0, rel=0.1)
    assert p_value < 0.01


def test_theil_sen_of_noise_is_rarely_significant() -> None:
    rng = np.random.default_rng(0)
    hits = sum(theil_sen(np.arange(30), rng.normal(size=30))[1] < 0.01 for _ in range(300))
    assert hits <= 9  # three expected
