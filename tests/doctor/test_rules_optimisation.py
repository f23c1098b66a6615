"""If this fails, the doctor is wrong about a learning rate, clipping, a spike, updates of tensors, or a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.doctor.diagnose import ask, diagnose
from rung.doctor.finding import Finding
from rung.doctor.history import History
from rung.doctor.rules import catalogue
from rung.doctor.rules.optimisation import slope_t
from rung.doctor.rules.spikes import scores
from rung.robust import Spikes, theil_sen
from tests.cases.made import history, series, table, tensors

NAN = math.nan
LAYERS = [f"blocks.{n}.weight" for n in range(8)]


def found(of: History) -> dict[str, Finding]:
    return {finding.rule: finding for finding in diagnose(of)}


def serious(of: History) -> dict[str, str]:
    return {rule: f.severity for rule, f in found(of).items() if f.severity != "info"}


def complete(finding: Finding) -> bool:
    return all((finding.what, finding.evidence, finding.ruled_out, finding.probe, finding.remedy, finding.title))


def asked(of: History) -> None:
    """Each rule by itself: `diagnose` leaves out one that raises."""
    for rule in catalogue():
        if rule.id.startswith("O"):
            rule(of)


def falling(num_steps: int, seed: int = 1, noise: float = 0.03) -> list[float]:
    rng = np.random.default_rng(seed)
    return list(1.2 + 2.3 * np.exp(-np.arange(num_steps) / 40) + noise * rng.standard_normal(num_steps))


def made(num_steps: int = 200, columns: dict[str, Any] | None = None, **fields: Any) -> History:
    """A healthy run but for the arguments: tables every five steps, as `columns` of eight matrices."""
    rows = {"loss": falling(num_steps)} | fields.pop("rows", {})
    tables = {"tensors": tensors(LAYERS, range(0, num_steps, 5), **(columns or {}))} | fields.pop("tables", {})
    return history(rows, tables=tables, derived={"warmup_steps": 10} | fields.pop("derived", {}), **fields)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), noise=st.floats(0.0, 0.1), size=st.floats(1e-4, 1e4))
def test_a_healthy_run_has_no_disease_in_any_units(seed: int, noise: float, size: float) -> None:
    rng = np.random.default_rng(seed)
    norms = list(0.8 * np.exp(0.2 * rng.standard_normal(200)))
    rows = {"loss": [size * x for x in falling(200, seed, noise)], "norm": norms}
    assert serious(made(rows=rows)) == {}


def attention(last: float) -> dict[str, Any]:
    steps = range(0, 200, 10)
    logit = np.geomspace(1.0, last, len(steps))[:, None]
    return {"attention": table(["blocks.0"], steps, logit=logit, entropy=0.5, collapsed=0.0)}


def test_a_high_rate_needs_two_signs() -> None:
    large = {"update": 0.05}
    assert serious(made(columns=large)) == {}
    seen = found(made(columns=large, tables=attention(5000.0), config={"lr.learning_rate": 0.3}))
    assert seen["O1"].severity == "sick"
    assert seen["O1"].changes == {"lr.learning_rate": 0.00063}
    assert complete(seen["O1"])
    assert not {"O3", "O8"} & set(seen)  # they follow from it


def test_a_loss_that_left_its_best_is_a_sign() -> None:
    rises = falling(150) + list(np.linspace(1.3, 2.8, 250))
    seen = found(made(400, {"update": 0.05}, rows={"loss": rises}))
    assert "O1" in seen
    assert "where it was" in seen["O1"].what


def test_losses_that_fight_each_other_are_no_sign() -> None:
    rises = falling(150) + list(np.linspace(1.3, 2.8, 250))
    rows = {"loss": rises, "critic/loss": falling(400)}
    assert "O1" not in found(made(400, {"update": 0.05}, rows=rows))


@pytest.mark.parametrize("losses", [falling(150) + [0.0] * 50, falling(100) + [-1.0] * 100, [0.0] * 200])
def test_a_loss_of_zero_or_less_is_no_fault(losses: list[float]) -> None:
    of = made(columns={"update": 0.05}, rows={"loss": losses})
    asked(of)
    assert not {"O1", "O5"} & set(serious(of))


def test_the_best_of_a_long_run_is_found() -> None:
    rises = falling(3000) + list(np.linspace(1.3, 2.8, 3000))
    assert "where it was" in found(made(6000, {"update": 0.05}, rows={"loss": rises}))["O1"].what


def jumping(at: int) -> dict[str, Any]:
    update = np.full((40, 8), 0.05)
    update[at, 3] = 0.7
    return {"update": update}


def test_one_large_update_counts_after_the_first_steps() -> None:
    assert "blocks.3" in found(made(columns=jumping(30)))["O1"].what
    assert "O1" not in found(made(columns=jumping(2)))  # at step 10: that is a shock
    assert found(made(columns=jumping(2)))["O3"].since == 10


def probed(k: list[float], **fields: Any) -> History:
    of = made(columns={"update": 2e-4}, **fields)
    of.rows["probe/k"] = series(k, range(25, 25 + 25 * len(k), 25))
    return of


def test_a_low_rate_is_told_by_the_probe() -> None:
    seen = found(probed([64.0, 64.0, 32.0]))
    assert seen["O2"].severity == "warn"
    assert seen["O2"].changes == {"lr.learning_rate": pytest.approx(0.016)}
    assert complete(seen["O2"])


def test_a_low_rate_needs_three_probes_and_a_loss_that_falls() -> None:
    assert "O2" not in found(probed([64.0, 64.0]))
    assert "O2" not in found(probed([1.0, 4.0, 64.0]))
    assert "O2" not in found(probed([64.0, 64.0, 32.0], rows={"loss": list(3.0 + 0.1 * np.sin(np.arange(200)))}))


def test_a_low_rate_at_the_end_of_a_decay_is_meant() -> None:
    assert "O2" not in found(probed([64.0, 64.0, 64.0], derived={"decay_steps": 60}))


def test_a_low_rate_is_no_fault_when_weights_were_trained_before() -> None:
    assert found(probed([64.0, 64.0, 64.0], config={"init_from": "text/3"}))["O2"].severity == "info"


def test_a_low_rate_that_only_some_parameters_have_is_a_scale() -> None:
    of = probed([64.0, 64.0, 32.0])
    of.tables["tensors"].columns["update"][:, 5] *= 100
    assert found(of)["O2"].severity == "info"
    assert found(of)["O2"].changes == {}
    assert "blocks.5.weight" in " ".join(found(of)["O2"].evidence)


def slow(displaced: float, end: float, config: dict[str, Any] | None = None, through: float = 1.0) -> History:
    """A script whose loss goes from ln 32 straight to `end`, and is there after a share of the run."""
    path = np.minimum(np.arange(200) / 200 / through, 1.0)
    loss = math.log(32) + (end - math.log(32)) * path + 0.004 * np.random.default_rng(1).standard_normal(200)
    observed = {"observed": {"rows": 200, "updates": 200, "looks": 6, "displaced": displaced}}
    baselines = {"baselines": {"uniform": math.log(32)}}
    return history({"loss": list(loss)}, config, derived=observed | baselines, is_script=True)


def answer(of: History) -> str:
    """What O2 alone says."""
    (one,) = ask(of, [rule for rule in catalogue() if rule.id == "O2"], raises=True)
    return one.findings[0].severity if one.findings else "not looked at" if one.why_not else "healthy"


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (slow(0.09, 3.3), "warn"),
        (slow(0.001, 3.466), "warn"),  # as good as nowhere
        (slow(0.09, 3.466), "not looked at"),  # it moves, and nothing is learned: that has many reasons
        (slow(0.6, 3.3), "healthy"),
        (slow(0.09, 1.2), "healthy"),  # weights of a wide model hardly have to move
        (slow(0.09, 3.3, through=0.3), "healthy"),  # it came to its end
        (slow(0.09, 3.3, {"init_from": "gpt2"}), "not looked at"),
        (slow(0.09, 3.3, {"init_from": "scratch"}), "warn"),
    ],
)
def test_a_low_rate_of_a_script_is_told_by_the_way_of_its_weights(of: History, said: str) -> None:
    assert answer(of) == said


def test_a_rate_that_is_still_rising_is_not_judged() -> None:
    of = slow(0.09, 3.3)
    of.rows["lr"] = series(list(np.linspace(0, 1e-3, 200)))
    assert answer(of) == "not looked at"


def test_weights_that_may_have_been_trained_before_are_not_judged() -> None:
    of = slow(0.09, 3.3)
    del of.derived["baselines"]
    (one,) = ask(of, [rule for rule in catalogue() if rule.id == "O2"])
    assert one.how.startswith('config={"init_from": "scratch"}')
    del of.derived["observed"]["displaced"]
    assert answer(of) == "not looked at"


def test_a_loss_that_is_kept_under_two_names_is_one_loss() -> None:
    flat = list(2.0 + 0.01 * np.random.default_rng(0).standard_normal(300))
    assert "L6" in found(history({"loss": flat, "train/loss": flat}, is_script=True))
    assert "L6" not in found(history({"loss": flat, "critic/loss": flat}, is_script=True))


def shocked(warmup_steps: int, logit: float, weight: float = 1.0) -> History:
    update = np.full((40, 8), 3e-3)
    update[0:3, 2] = 0.9 * weight
    weights = np.full((40, 8), 1.0)
    weights[:, 2] = weight
    of = made(columns={"update": update, "weight": weights}, tables=attention(logit))
    of.rows["lr"].values[:] = 0.05  # what Adam moves each of a thousand elements by
    of.derived["warmup_steps"] = warmup_steps
    return of


def test_a_shock_is_told_when_there_is_no_long_warmup() -> None:
    assert found(shocked(0, 2.0))["O3"].severity == "warn"
    assert found(shocked(0, 90000.0))["O3"].severity == "sick"
    assert found(shocked(0, 2.0))["O3"].changes == {"lr.warmup_iters": 20}  # a tenth of these 200 steps
    assert complete(found(shocked(0, 2.0))["O3"])
    assert "O3" not in found(shocked(50, 2.0))


def test_a_weight_that_starts_at_zero_is_compared_with_the_others() -> None:
    assert "O3" not in found(shocked(0, 2.0, weight=1e-6))


def test_a_weight_that_grew_from_zero_is_compared_with_the_others_too() -> None:
    """A projection that started at zero is made of its few steps: each is a large part of it, and it is still small."""
    of = shocked(0, 2.0)
    of.tables["tensors"].columns["weight"][:, 2] = np.concatenate([[0.0], np.linspace(0.15, 0.9, 39)])
    of.tables["tensors"].columns["update"][:, 2] = 0.15
    assert "O3" not in found(of)


@pytest.mark.parametrize(("num_steps", "decay_steps"), [(15, 15), (20, 20), (200, 18)])
def test_a_warmup_that_the_run_has_no_room_for_is_not_proposed(num_steps: int, decay_steps: int) -> None:
    of = shocked(0, 2.0)
    of.derived |= {"num_steps": num_steps, "decay_steps": decay_steps}
    assert found(of)["O3"].changes == {}
    of.derived |= {"num_steps": 200, "decay_steps": 200, "warmup_steps": 30}  # the tenth would be a shorter one
    assert found(of)["O3"].changes == {}


def clipped(name: str, norms: list[float], after: list[float] | None = None, **fields: Any) -> History:
    rows = {"norm": norms, "norm_clipped": after or [min(n, 1.0) for n in norms]}
    return made(len(norms), rows=rows, config={"optimizer.name": name}, **fields)


def noisy(level: float, num_steps: int = 200) -> list[float]:
    return list(level * np.exp(0.1 * np.random.default_rng(2).standard_normal(num_steps)))


@pytest.mark.parametrize(("name", "severity"), [("adamw", "info"), ("muon", "info"), ("sgd", "warn")])
def test_clipping_always_matters_where_size_does(name: str, severity: str) -> None:
    seen = found(clipped(name, noisy(5.0)))
    assert seen["O4"].severity == severity
    assert complete(seen["O4"])
    assert "O4" not in found(clipped(name, noisy(0.8)))


def test_clipping_always_matters_when_the_norm_grows() -> None:
    grows = [n * 2 ** (step / 400) for step, n in enumerate(noisy(5.0, 800))]
    assert found(clipped("adamw", grows))["O4"].severity == "warn"


def test_a_norm_that_grows_only_at_first_is_usual() -> None:
    grows = [n * 2 ** (step / 400) for step, n in enumerate(noisy(5.0, 300))]
    assert found(clipped("adamw", grows))["O4"].severity == "info"
    settles = [n * 2 ** (min(step, 300) / 200) for step, n in enumerate(noisy(5.0, 1000))]
    assert found(clipped("adamw", settles))["O4"].severity == "info"
    slightly = [n * 2 ** (step / 900) for step, n in enumerate(noisy(5.0, 600))]
    assert found(clipped("adamw", slightly))["O4"].severity == "info"


def test_a_limit_that_is_not_applied_is_told() -> None:
    assert "not applied" in found(clipped("adamw", noisy(5.0), after=noisy(5.0)))["O4"].what
    event = {"kind": "unread_keys", "keys": ["optimizer.grad_clip"]}
    assert "nothing has read" in found(clipped("adamw", noisy(0.5), events=[event]))["O4"].what
    off = made(rows={"norm": noisy(5.0)}, config={"optimizer.grad_clip": 0.0})
    assert "O4" not in found(off)


def spiky(step: int, num_steps: int = 200, height: float = 2.5, stays: bool = False, **fields: Any) -> History:
    losses = falling(num_steps)
    for at in range(step, num_steps if stays else step + 1):
        losses[at] += height
    return made(num_steps, rows={"loss": losses}, **fields)


def test_a_spike_is_told_at_its_step_with_what_led_to_it() -> None:
    rms = np.ones((40, 8))
    rms[29, 5] = 3.0  # at step 145
    seen = found(spiky(150, columns={"rms": rms}))
    assert (seen["O5"].severity, seen["O5"].since) == ("warn", 150)
    assert "blocks.5.weight 3" in " ".join(seen["O5"].evidence)
    assert complete(seen["O5"])


def test_a_spike_without_return_is_sick() -> None:
    assert found(spiky(150, 300, stays=True))["O5"].severity == "sick"
    assert found(spiky(250, 300, stays=True))["O5"].severity == "warn"  # too early to say


def tails(kind: str, seed: int) -> np.ndarray:
    """Losses of healthy runs as they are with small batches: most lie close together, and some far above."""
    rng = np.random.default_rng(seed)
    level = 0.05 + 0.64 * np.exp(-np.arange(1200) / 60)
    noise = 0.01 * rng.standard_normal(1200)
    if kind == "labels":  # one wrong label in a hundred, sixteen rows in a batch
        return np.asarray(level + noise + rng.binomial(16, 0.01, 1200) * rng.uniform(0.2, 0.5, 1200))
    if kind == "rare rows":
        return np.asarray(level + noise + rng.binomial(16, 0.002, 1200) * rng.uniform(0.3, 1.0, 1200))
    if kind == "hinge":  # exactly 0 at most batches once all margins are met
        return np.maximum(0.0, 1 - np.arange(1200) / 100) + (rng.random(1200) < 0.01) * 0.02 * rng.random(1200)
    if kind == "stops":  # it falls in a straight line, and then no more
        return np.asarray(np.maximum(0.1, 3 - np.arange(1200) / 100) + 1e-4 * rng.standard_normal(1200))
    return np.asarray(level * np.exp(0.8 * rng.standard_normal(1200)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["labels", "rare rows", "hinge", "stops", "lognormal"])
def test_a_loss_with_a_long_tail_has_no_spikes(kind: str, seed: int) -> None:
    losses = tails(kind, seed)
    of = made(1200, rows={"loss": list(losses), "norm": list(losses + 0.1)})
    assert found(of).get("O5") is None or found(of)["O5"].severity == "info"
    assert (scores(losses) > 8).sum() <= 3  # after each of which the guard looks closer for a while


def test_a_jump_to_less_than_the_beginning_that_is_back_at_once_is_a_hard_batch() -> None:
    assert found(spiky(150, height=1.0))["O5"].severity == "info"
    assert found(spiky(150, height=2.5))["O5"].severity == "warn"


def test_a_jump_is_told_while_weights_recover_however_it_rises() -> None:
    for rise in ([1.0], [0.2, 0.4, 0.6, 0.8, 1.0]):
        losses = np.asarray(falling(300))
        shape = [*rise, *np.exp(-np.arange(1, 20) / 5)]
        losses[200 : 200 + len(shape)] += shape
        seen = found(made(300, rows={"loss": list(losses)}))["O5"]
        assert seen.severity == "warn"
        assert 200 <= (seen.since or 0) <= 204


@pytest.mark.parametrize(("every", "severity"), [(100, "sick"), (400, "warn")])
def test_jumps_that_last_are_sick_when_there_are_many(every: int, severity: str) -> None:
    losses = np.asarray(falling(2400))
    for step in range(201, 2300, every):
        losses[step : step + 20] += np.exp(-np.arange(20) / 5)
    seen = found(made(2400, rows={"loss": list(losses)}))["O5"]
    assert (seen.severity, seen.since) == (severity, 201)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), num=st.integers(0, 700), tail=st.floats(0.01, 2))
def test_a_run_in_progress_and_its_record_have_the_same_spikes(seed: int, num: int, tail: float) -> None:
    values = np.exp(tail * np.random.default_rng(seed).standard_normal(num))
    live = Spikes()
    assert [live.score(value) for value in values.tolist()] == pytest.approx(list(scores(values)))


def test_a_spike_of_the_norm_alone_is_what_clipping_is_for() -> None:
    norms = noisy(0.5)
    norms[150] = 30.0
    assert found(made(rows={"norm": norms}))["O5"].severity == "info"


def test_no_spike_is_seen_in_the_warmup_nor_where_an_epoch_begins_or_an_eval_was() -> None:
    assert "O5" not in found(spiky(120, derived={"warmup_steps": 130}))
    assert "O5" not in found(spiky(125, derived={"rows_per_step": 16, "epoch_rows": 2000}))
    assert "O5" in found(spiky(126, derived={"rows_per_step": 16, "epoch_rows": 2000}))
    assert "O5" not in found(spiky(150, evals={"val": {"loss": series([1.3], [150])}}))


@given(st.integers(0, 10**6), st.floats(0.01, 100), st.floats(-3, 3))
@settings(max_examples=20)
def test_scores_know_no_units(seed: int, factor: float, height: float) -> None:
    values = 100 + np.random.default_rng(seed).standard_normal(150)
    values[130] += height
    assert scores(factor * values) == pytest.approx(scores(values), rel=1e-6, abs=1e-6)
    assert scores(values)[:48].max() == 0


def test_a_curve_that_hardly_moves_has_no_spikes() -> None:
    assert scores(np.full(200, 3.0) + 1e-9 * np.random.default_rng(1).standard_normal(200)).max() < 1
    assert scores(np.zeros(200)).max() == 0


def with_eps(eps: float, grad: float, share: float, num_bad: int = 8) -> History:
    grads, shares = np.full(8, 1.0), np.zeros(8)
    grads[:num_bad], shares[:num_bad] = grad, share
    return made(columns={"grad": grads, "eps_share": shares}, config={"optimizer.eps": eps})


def test_an_eps_above_the_gradients_is_told() -> None:
    seen = found(with_eps(0.1, 1.0, 1.0))  # 1000 numbers with a norm of 1: each 0.03
    assert seen["O6"].severity == "sick"
    assert seen["O6"].changes == {"optimizer.eps": 1e-4}  # a hundredth of the gradients
    assert "0.0001" in seen["O6"].remedy  # one figure, wherever it stands
    assert "O6" not in found(with_eps(0.1, 1.0, 0.0))  # moments far above eps: gradients are small only now
    assert complete(seen["O6"])
    assert found(with_eps(1e-4, 1e-4, 0.9, num_bad=2))["O6"].severity == "warn"
    assert "O6" not in found(with_eps(1e-8, 1.0, 0.0))


def test_a_gradient_that_is_zero_in_most_places_is_not_below_eps() -> None:
    assert "O6" not in found(with_eps(1e-8, 1.0, 0.9))


def test_a_gradient_that_vanishes_with_depth_is_told() -> None:
    grad = 10.0 ** -np.arange(0, 16, 2)
    seen = found(made(columns={"grad": grad}))
    assert seen["O7"].severity == "sick"
    assert "blocks.7.weight" in seen["O7"].evidence[0]
    assert complete(seen["O7"])
    assert "O7" not in found(made(columns={"grad": 10.0 ** -np.arange(0, 4, 0.5)}))
    assert "O7" not in found(made(columns={"grad": [0.0] * 2 + [1.0] * 6}))  # no gradient at all is another matter


def test_a_tensor_with_a_rate_of_its_own_is_named() -> None:
    for factor in (1 / 100, 50.0):
        seen = found(made(columns={"update": [3e-3 * factor] + [3e-3] * 7}))
        assert seen["O8"].severity == "warn"
        assert "blocks.0.weight" in " ".join(seen["O8"].evidence)
        assert complete(seen["O8"])
    assert "O8" not in found(made(columns={"update": [9e-3] + [3e-3] * 7}))


def test_a_tensor_that_is_small_is_not_one_with_a_rate_of_its_own() -> None:
    """0.036 where the median is 0.007: a projection out of attention, in a healthy run of a thousand steps."""
    small = {"weight": [0.2] + [1.0] * 7, "update": 7e-3}
    assert "O8" not in found(made(columns=small))
    fast = {"weight": [20.0] + [1.0] * 7, "update": [0.7] + [7e-3] * 7}  # as large a ratio, by a hundred times the step
    assert found(made(columns=fast))["O8"].severity == "warn"


def test_small_updates_at_the_end_of_a_decay_are_meant() -> None:
    fades = np.linspace(1, 0, 200)
    update = 3e-3 * fades[::5, None] * np.ones(8)
    assert serious(made(columns={"update": update}, rows={"lr": list(1e-3 * fades)})) == {}


def test_weights_close_to_zero_embeddings_and_vectors_have_no_ratio() -> None:
    assert "O8" not in found(made(columns={"weight": [1e-3] + [1.0] * 7}))
    names = ["tokens.weight", "model.embed_tokens.weight", "wpe.weight", *LAYERS[3:]]
    assert "O8" not in found(made(tables={"tensors": tensors(names, range(0, 200, 5), update=[1.0] * 3 + [3e-3] * 5)}))
    vector = tensors(LAYERS, range(0, 200, 5), update=[1.0] + [3e-3] * 7, decayed=[0.0] + [1.0] * 7)
    assert "O8" not in found(made(tables={"tensors": vector}))


def still(grad: float) -> dict[str, Any]:
    return {"update": [0.0] + [3e-3] * 7, "grad": [grad] + [0.1] * 7}


@pytest.mark.parametrize(("grad", "word"), [(NAN, "no gradient"), (0.0, "exactly 0"), (0.1, "still no change")])
def test_a_parameter_that_does_not_move_is_named_with_the_reason(grad: float, word: str) -> None:
    seen = found(made(columns=still(grad)))
    assert seen["O9"].severity == "sick"
    assert "blocks.0.weight" in seen["O9"].what
    assert word in seen["O9"].evidence[0]
    assert complete(seen["O9"])


def test_weight_decay_hides_no_weights_that_get_no_gradient() -> None:
    dead = {"grad": [0.0] + [0.1] * 7}  # as behind a rectifier that is below 0 for every row
    seen = found(made(columns=dead))["O9"]
    assert (seen.severity, "dead units" in seen.remedy) == ("sick", True)
    late = np.tile(np.array(dead["grad"]), (40, 1))
    late[20:, 0] = 0.1  # a gate that opens
    assert "O9" not in found(made(columns={"grad": late}))
    assert "O9" not in found(made(columns=dead | {"decayed": [0.0] + [1.0] * 7}))  # and something else moves it


def test_a_bias_whose_gradients_cancel_is_told_and_no_disease() -> None:
    vector = {"decayed": [0.0] + [1.0] * 7}
    assert found(made(columns=still(0.0) | vector))["O9"].severity == "info"
    assert found(made(columns=still(NAN) | vector))["O9"].severity == "sick"
    assert found(made(columns=still(0.1) | vector))["O9"].severity == "sick"
    assert found(made(columns={"update": 0.0, "grad": 0.0, "decayed": 0.0}))["O9"].severity == "sick"  # nothing moves
    both = made(columns=still(0.0) | vector, derived={"left_out": ["head.weight"]})
    assert found(both)["O9"].severity == "sick"


def test_parameters_that_no_objective_has_are_told() -> None:
    named = made(derived={"left_out": ["head.weight"]})
    assert "head.weight" in found(named)["O9"].what
    assert found(named)["O9"].severity == "sick"
    assert found(made(derived={"parameters": 100, "trained_parameters": 60}))["O9"].severity == "info"
    assert "O9" not in found(made(derived={"parameters": 100, "trained_parameters": 60, "left_out": []}))


def test_no_change_without_a_rate_or_with_a_skip_is_meant() -> None:
    moved = np.full((40, 8), 3e-3)
    moved[:3] = 0.0
    rows = {"lr": [0.0] * 11 + [1e-3] * 189}
    assert "O9" not in found(made(columns={"update": moved}, rows=rows))
    assert "O9" not in found(
        made(columns={"update": np.zeros((40, 8))}, rows={"skipped": [1.0] * 5 + [0.0] + [1.0] * 194})
    )
    seldom = np.full((40, 8), NAN)  # due at every fourth of these steps only
    seldom[::4] = 3e-3
    assert "O9" not in found(made(columns={"update": seldom}))


def test_a_run_that_leaves_every_step_out_is_told() -> None:
    assert found(made(rows={"skipped": [1.0] * 200}))["O9"].severity == "sick"


def child(rows_now: int, lr: float, name: str = "adamw") -> History:
    config = {"optimizer.name": name}
    parent = made(derived={"rows_per_step": 16, "targets_per_row": 32}, config=config)
    now = {"rows_per_step": rows_now, "targets_per_row": 32}
    return made(derived=now, config=config | {"lr.learning_rate": lr}, parent=parent)


def test_a_larger_batch_wants_another_rate() -> None:
    seen = found(child(128, 1e-3))
    assert seen["O11"].severity == "warn"
    assert seen["O11"].changes == {"lr.learning_rate": pytest.approx(1e-3 * math.sqrt(8), rel=0.05)}
    assert complete(seen["O11"])
    assert found(child(128, 1e-3, "sgd"))["O11"].changes == {"lr.learning_rate": pytest.approx(8e-3)}
    assert "O11" not in found(child(128, 2.8e-3))
    assert "O11" not in found(child(20, 1e-3))


@pytest.mark.parametrize(("rows", "is_told"), [(16, True), (640, False), (65536, True)])
def test_the_noise_of_gradients_says_which_batch_fits(rows: int, is_told: bool) -> None:
    """Gradients of norm 1 and noise of 800 in a row: by definition 800 rows fit."""
    small = rows // 4
    of = made(derived={"rows_per_step": rows}, rows={"norm": [math.sqrt(1 + 800 / rows)] * 200})
    steps = range(0, 200, 5)
    of.rows["norm_first"] = series([math.sqrt(1 + 800 / small)] * 40, steps)
    of.rows["rows_first"] = series([float(small)] * 40, steps)
    seen = found(of)
    assert ("O11" in seen) == is_told
    if is_told:
        assert seen["O11"].severity == "info"
        assert "800" in seen["O11"].what


@given(st.floats(-2, 2), st.integers(10, 60))
def test_the_slope_of_a_line_is_found(slope: float, num: int) -> None:
    steps = np.arange(num) * 3
    values = slope * steps
    assert theil_sen(steps, values)[0] == pytest.approx(slope, abs=1e-9)
    if abs(slope) > 1e-3:
        assert theil_sen(steps, values)[1] < 0.01
        assert np.sign(slope_t(series(list(values), list(steps)))) == np.sign(slope)


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_one_wild_value_does_not_move_a_slope(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = 0.5 * np.arange(50) + rng.standard_normal(50)
    values[rng.integers(50)] = 1e9
    assert theil_sen(np.arange(50), values)[0] == pytest.approx(0.5, abs=0.2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [0.0, NAN, math.inf])
@pytest.mark.parametrize("column", ["grad", "weight", "update", "eps_share"])
def test_odd_numbers_in_a_table_are_no_fault_of_ours(column: str, number: float) -> None:
    zeros = [0.0] * 200
    asked(made(columns={column: number}, rows={"norm": zeros, "norm_clipped": zeros}))
    asked(made(columns={column: number}, tables={"attention": table(["a"], [0, 50], logit=number)}))
