"""If this fails, findings flicker, consequences are reported in place of causes, or healthy runs seem to change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.doctor.coincidence import coincidences, events_near
from rung.doctor.diagnose import MOST_LOOKS, ask, diagnose, suppress
from rung.doctor.finding import Finding
from rung.doctor.history import History, Series, Table
from rung.doctor.rules import Rule, catalogue
from tests.cases.performance_cases import made


def state(*spans: tuple[int, int], in_warmup: bool = False) -> Rule:
    """Holds where the end of the history lies in one of these spans."""

    def look(history: History) -> Finding | None:
        return Finding("warn", "so") if any(a <= history.end < b for a, b in spans) else None

    return Rule("X1", "a state", "state", look, in_warmup)


@pytest.mark.parametrize(
    ("spans", "is_found"),
    [
        ([(100, 160)], True),  # looks at 100, 120 and 140
        ([(100, 139)], False),
        ([(100, 139), (160, 199)], False),  # never three in a row
        ([(545, 601)], True),  # 560, 580 and the end
    ],
)
def test_a_state_counts_when_it_held_three_times(spans: list[tuple[int, int]], is_found: bool) -> None:
    findings = diagnose(made(), [state(*spans)])
    assert bool(findings) == is_found
    if is_found:
        first = -(-spans[0][0] // 20) * 20
        assert findings[0].since == first
        has_ended = spans[0][1] < 580
        assert any("until step" in line for line in findings[0].evidence) == has_ended
        assert findings[0].severity == ("info" if has_ended else "warn")


def test_a_rule_that_raises_costs_no_other() -> None:
    def broken(history: History) -> None:
        raise ZeroDivisionError("of our own")

    rules = [Rule("X2", "broken", "state", broken), state((100, 601))]
    assert [f.rule for f in diagnose(made(), rules, raises=False)] == ["X1"]
    assert [answer.error for answer in ask(made(), rules)] == ["ZeroDivisionError: of our own", ""]


def needing(*needs: str, kind: str = "scan") -> Rule:
    return Rule("X1", "finds it", kind, lambda history: Finding("warn", "so"), needs=needs)


@pytest.mark.parametrize(
    ("needs", "missing"),
    [
        (("loss", "norm"), ""),
        (("loss", "nowhere"), "nowhere"),
        (("nowhere|loss",), ""),
        (("nowhere|elsewhere", "attention"), "nowhere or elsewhere, attention"),
        (("tensors", "optimizer.grad_clip", "epoch_rows"), ""),
        (("optimizer.eps",), "optimizer.eps"),
        (("logits/*", "*/accuracy"), "logits/*"),
        (("eval/*/loss", "eval/*@*"), "eval/*@*"),
        (("save", "resume"), "resume"),
        (("parent", "recipe"), "parent"),
    ],
)
@pytest.mark.parametrize("kind", ["scan", "state"])
def test_a_rule_without_what_it_needs_is_not_asked(needs: tuple[str, ...], missing: str, kind: str) -> None:
    history = made()
    history.tables["tensors"] = Table(np.arange(1), ["a"], {})
    history.rows["d/accuracy"] = history["loss"]
    history.evals = {"val": {"loss": history["loss"]}}
    history.events = [{"kind": "save", "step": 5}]
    (answer,) = ask(history, [needing(*needs, kind=kind)])
    assert answer.missing == missing
    assert bool(answer.findings) == (not missing)


def test_a_script_may_call_its_keys_as_it_likes() -> None:
    history = History(config={"tensors": 1, "epoch_rows": 2, "loss": "mse", "optimizer.eps": "small"}, is_script=True)
    for name in ("tensors", "epoch_rows", "loss", "recipe"):
        assert not history.has(name)
    assert history.has("optimizer.eps")
    assert history.number("optimizer.eps") is None


def test_a_state_that_cannot_be_seen_three_times_has_not_looked() -> None:
    for num_steps, is_early in ((60, True), (79, True), (95, False)):  # looks at 60, 80 and the end
        (answer,) = ask(made(num_steps), [state((0, 1000))])
        assert answer.is_early == is_early
        assert bool(answer.findings) == (not is_early)


@pytest.mark.parametrize("spans", [[(100, 160)], [(545, 601)], [(560, 590)], [(0, 900)]])
def test_how_it_stands_now_is_what_the_whole_history_says_of_its_end(spans: list[tuple[int, int]]) -> None:
    rule = state(*spans)
    whole, (now,) = diagnose(made(), [rule]), ask(made(), [rule], only_now=True)
    holds = [f for f in whole if f.severity == "warn"]
    assert bool(now.findings) == bool(holds)
    if holds and spans != [(0, 900)]:
        assert now.findings[0].since == holds[0].since


def test_a_state_is_not_asked_in_the_warm_up() -> None:
    history = made()
    history.derived["warmup_steps"] = 300
    assert diagnose(history, [state((0, 290))]) == []
    assert diagnose(history, [state((0, 290), in_warmup=True)])[0].since == 60  # nor before 50 steps, ever


def test_a_long_run_is_not_looked_at_forever() -> None:
    asked = []
    rule = Rule("X1", "counts", "state", lambda history: asked.append(history.end))  # type: ignore[arg-type, return-value]
    diagnose(made(40_000), [rule])
    assert len(asked) <= MOST_LOOKS
    assert asked[-1] == 40_000


def test_a_rule_sees_nothing_of_the_future() -> None:
    def look(history: History) -> None:
        assert all(series.steps[-1] < history.end for series in history.rows.values() if len(series))
        assert all(event["step"] <= history.end for event in history.events)

    history = made()
    history.events = [{"kind": "save", "step": step} for step in range(0, 600, 50)]
    diagnose(history, [Rule("X1", "looks ahead", "state", look)])


def test_causes_hide_what_follows_from_them() -> None:
    def rules(*findings: Finding) -> list[str]:
        return [f.rule for f in suppress(findings)]

    assert rules(Finding("sick", "", rule="O1"), Finding("sick", "", rule="A3")) == ["O1"]
    assert rules(Finding("fatal", "", rule="D3"), Finding("fatal", "", since=5, rule="N1")) == ["D3"]
    assert rules(Finding("warn", "", hides=["P1"], rule="P2"), Finding("warn", "", rule="P1")) == ["P2"]
    failed = Finding("fatal", "", since=5, probe="rung replay a/1@5", rule="N7")
    assert rules(Finding("fatal", "", since=5, probe=failed.probe, rule="N1"), failed) == ["N1"]
    assert rules(Finding("sick", "", since=3, probe="rung replay a/1@3", rule="N1"), failed) == ["N1", "N7"]
    broken = Finding("fatal", "", since=100, rule="N1")
    assert rules(broken, Finding("sick", "", since=150, rule="E1"), Finding("info", "", since=50, rule="O4")) == [
        "N1",
        "O4",
    ]


def test_the_worst_comes_first() -> None:
    def tells(rule: str, severity: str, since: int) -> Rule:
        return Rule(rule, rule, "scan", lambda history: Finding(severity, "", since))

    found = diagnose(made(), [tells("E1", "warn", 1), tells("O1", "sick", 300), tells("A1", "sick", 200)])
    assert [f.rule for f in found] == ["A1", "O1", "E1"]


def test_every_rule_is_told_apart_and_survives_an_empty_history() -> None:
    rules = catalogue()
    assert len({rule.id for rule in rules}) == len({rule.title for rule in rules}) == len(rules)
    for rule in rules:
        assert rule(History()) == [], rule.id


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([150, 400, 1500]), st.floats(0.005, 0.06), st.floats(0.05, 1.0))
def test_a_loss_that_falls_has_no_change_points(seed: int, num_steps: int, noise: float, speed: float) -> None:
    rng = np.random.default_rng(seed)
    steps = np.arange(num_steps)
    for curve in (np.exp(-steps / (speed * num_steps)), (1 + steps) ** -speed, 1 - 0.9 * steps / num_steps):
        history = made(num_steps, loss=1.1 + 2.3 * curve + rng.normal(0, noise, num_steps))
        assert [c for c in coincidences(history) if c.signal == "loss"] == []


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(200, 480), st.sampled_from([-0.5, 0.5, 1.0]))
def test_a_jump_is_found_where_it_is(seed: int, at: int, size: float) -> None:
    loss = 1.1 + 2.3 * np.exp(-np.arange(600) / 60) + np.random.default_rng(seed).normal(0, 0.03, 600)
    loss[at:] += size
    history = made(loss=loss)
    history.events = [{"kind": "resume", "step": at}]
    found = [c for c in coincidences(history) if c.signal == "loss"]
    assert len(found) == 1
    assert abs(found[0].step - at) <= 3
    assert f"resume at {at}" in found[0].events
    assert found[0].after - found[0].before == pytest.approx(size, abs=0.15)  # the fall goes on beside it


def test_a_loss_that_turns_is_found_where_it_turned() -> None:
    steps = np.arange(600)
    loss = 1.1 + 2.3 * np.exp(-steps / 40) + np.random.default_rng(0).normal(0, 0.03, 600)
    loss[300:] += 0.002 * np.arange(300)
    (found,) = (c for c in coincidences(made(loss=loss)) if c.signal == "loss")
    assert abs(found.step - 300) <= 40
    assert found.after > found.before


def test_a_single_wild_step_is_no_change() -> None:
    loss = made()["loss"].values.copy()
    loss[[200, 201, 350]] = 9.0
    assert [c for c in coincidences(made(loss=loss)) if c.signal == "loss"] == []


def test_clipping_that_begins_is_a_change() -> None:
    norm = np.where(np.arange(600) < 250, 0.5, 1.6) * np.random.default_rng(0).uniform(0.8, 1.2, 600)
    found = {c.signal: c for c in coincidences(made(norm=norm))}
    assert set(found) == {"norm", "clip rate"}
    assert (found["clip rate"].before, found["clip rate"].after) == (0.0, 1.0)
    assert abs(found["clip rate"].step - 250) <= 3


def test_what_happens_all_the_time_is_no_coincidence() -> None:
    history = made(2000)
    history.derived |= {"epoch_rows": None, "warmup_steps": 1030}
    history.evals = {"val": {"loss": Series(np.arange(0, 2000, 25), np.ones(80))}}
    history.events = [{"kind": "save", "step": step} for step in (500, 960, 1500)]
    assert events_near(history, 1010) == ["end of warm-up at 1030", "save at 960"]
    assert events_near(history, 1000)[0] == "eval at 1000"
    assert events_near(history, 1300) == ["eval at 1300"]
