"""If this fails, `rung check` misses spoilt inputs, ignored ones or leaking splits, or sees them where none are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rung.doctor.preflight import copies, inputs, leakage
from rung.doctor.preflight.checks import quick
from rung.doctor.preflight.copies import inputs_are_used
from rung.doctor.preflight.leakage import frames_apart
from rung.doctor.preflight.result import Check, CheckContext, Result
from rung.engine.build import Setup, build
from rung.engine.evaluate import eval_mode
from rung.engine.probes import Rise, ablate, held_out, rise, row_losses, take_away
from rung.errors import RecipeError
from rung.random import Draw
from rung.recipe import Input, Loss
from tests.cases.plan_cases import Apart, Deaf, Leaky, Steered
from tests.cases.running import setup_of
from tests.cases.tiny import Rows, Tiny, chain
from tests.conftest import shared_data
from tests.contract import cases as contract

ARRAYS = [inputs.sound_inputs, inputs.same_as_in_training]
SPLITS = [leakage.leakage, frames_apart]


def levels(checks: list[Check], bench: CheckContext) -> list[Result]:
    return [result for check in checks for result in check(bench)]


def draw_of(num_rows: int, seed: int = 0) -> Draw:
    return Draw(seed, -1, np.arange(num_rows))


# Taking an input away


@given(st.integers(2, 9), st.integers(0, 50))
def test_no_row_keeps_its_own_and_nothing_is_lost(num_rows: int, seed: int) -> None:
    batch = {"u": torch.arange(num_rows * 6.0).reshape(num_rows, 3, 2), "x": torch.rand(num_rows, 4)}
    kept = {name: tensor.clone() for name, tensor in batch.items()}
    without = take_away(batch, Input("control", ["u"]), draw_of(num_rows, seed))
    assert not any(torch.equal(a, b) for a, b in zip(without["u"], batch["u"]))
    assert torch.equal(without["u"].sum(0), batch["u"].sum(0))  # each is used once, at its own time
    assert without["x"] is batch["x"]
    assert all(torch.equal(batch[name], kept[name]) for name in batch)


def test_tensors_of_one_input_go_together() -> None:
    number = torch.arange(5)[:, None, None]
    batch = {"a": number.expand(5, 2, 2).float(), "b": number.expand(5, 3, 3).float(), "y": torch.zeros(5)}
    without = take_away(batch, Input("memory", ["a", "b"]), draw_of(5))
    assert torch.equal(without["a"][:, 0, 0], without["b"][:, 0, 0])


@given(st.integers(1, 6), st.integers(3, 20), st.integers(0, 9))
def test_ids_that_are_their_own_targets_lose_their_order_only(num_rows: int, length: int, seed: int) -> None:
    ids = torch.arange(num_rows * length).reshape(num_rows, length).to(torch.uint16)
    without = take_away({"ids": ids}, Input("context", ["ids"]), draw_of(num_rows, seed))["ids"]
    assert without.dtype == ids.dtype
    assert torch.equal(without[:, 0], ids[:, 0])
    assert torch.equal(without.long().sort(1).values, ids.long())


def test_zero_shift_and_what_cannot_be() -> None:
    batch = {"u": torch.arange(12.0).reshape(2, 6), "y": torch.zeros(2)}
    assert not take_away(batch, Input("u", ["u"], "zero"), draw_of(2))["u"].any()
    assert take_away(batch, Input("u", ["u"], "shift"), draw_of(2))["u"][0].tolist() == [3, 4, 5, 0, 1, 2]
    with pytest.raises(RecipeError, match="permute, zero or shift"):
        take_away(batch, Input("u", ["u"], "remove"), draw_of(2))
    with pytest.raises(RecipeError, match="a batch has u, y"):
        take_away(batch, Input("u", ["v"]), draw_of(2))


@given(st.integers(0, 99), st.floats(-0.5, 3))
def test_a_rise_is_relative_and_its_interval_holds_it(seed: int, by: float) -> None:
    rng = np.random.default_rng(seed)
    before = np.stack([rng.uniform(1, 3, 40), rng.integers(1, 9, 40)], 1)
    after = before * [1 + by, 1]
    found = rise(before, after)
    assert found.mean == pytest.approx(by, abs=1e-9)
    assert found.low - 1e-9 <= found.mean <= found.high + 1e-9
    assert rise(before, before) == Rise(0, 0, 0)


def test_rows_are_weighted_by_their_targets() -> None:
    before, after = np.array([[1.0, 1], [30, 10]]), np.array([[2.0, 1], [30, 10]])
    assert rise(before, after).mean == pytest.approx(32 / 31 - 1)


def test_groups_of_rows_add_up_to_the_batch() -> None:
    batch = {"x": torch.rand(7, 3)}

    def loss(some: dict[str, torch.Tensor], draw: Draw) -> Loss:
        return Loss(some["x"].sum(), torch.tensor(float(some["x"].numel())))

    alone, few = (row_losses(loss, batch, draw_of(7), n) for n in (1, 3))
    assert (len(alone), len(few)) == (7, 3)
    np.testing.assert_allclose(alone.sum(0), few.sum(0), rtol=1e-6)


def test_held_out_rows_are_spread_over_the_set() -> None:
    stream = Rows("r", number=np.arange(100))
    batch, draw = held_out(stream, 4, 0, torch.device("cpu"))
    assert batch["number"].tolist() == [0, 25, 50, 75]
    assert draw.is_eval


def test_a_context_that_is_used_is_missed() -> None:
    """A bigram model of the chain, by counting: the order of ids is all it knows."""
    ids, num = torch.from_numpy(chain(600, 1)), 32
    table = torch.zeros(num, num).index_put_((ids[:, :-1].flatten(), ids[:, 1:].flatten()), torch.ones(()), True)
    uni = table.sum(0).add(1).div(table.sum() + num).log().expand(num, num)
    batch = {"ids": torch.from_numpy(chain(40, 2))}

    def loss_of(logs: torch.Tensor):  # type: ignore[no-untyped-def]
        return lambda b, d: Loss(-logs[b["ids"][:, :-1], b["ids"][:, 1:]].sum(), torch.tensor(float(b["ids"].numel())))

    [context] = [Input("context", ["ids"])]
    assert ablate(loss_of((table + 0.1).log_softmax(1)), batch, draw_of(40), [context])["context"].low > 0.01
    assert ablate(loss_of(uni), batch, draw_of(40), [context])["context"].high < 1e-6


# Whether a model uses its inputs


def test_a_deaf_model_is_found_and_the_run_is_left_alone() -> None:
    for recipe, level in ((Deaf, "warn"), (Steered, "pass")):
        setup = setup_of(recipe)
        before = {name: tensor.clone() for name, tensor in setup.state.model.state_dict().items()}
        [found] = levels([inputs_are_used], CheckContext(setup))
        assert found.level == level, found
        assert "steps of a copy" in found.seen
        assert all(torch.equal(before[name], tensor) for name, tensor in setup.state.model.state_dict().items())


def test_nothing_is_said_of_a_model_that_has_learnt_nothing() -> None:
    [found] = levels([inputs_are_used], CheckContext(setup_of(Steered, "lr.learning_rate=0", "lr.schedule=constant")))
    assert found.level == "skip"
    [found] = levels([inputs_are_used], CheckContext(setup_of(Tiny)))
    assert (found.level, "declares none" in found.seen) == ("skip", True)


@pytest.mark.parametrize(
    ("num_steps", "low", "high", "level"),
    [(200, -0.004, 0.005, "warn"), (30, -0.004, 0.005, "skip"), (30, 0.0, 0.0, "warn"), (30, 0.001, 0.005, "pass")],
)
def test_steps_that_were_too_few_for_an_input_prove_nothing(
    num_steps: int, low: float, high: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine the copy is trained for fewer steps than it should; an input that is cut off shows at once."""
    monkeypatch.setattr(copies, "train", lambda copy: [*np.linspace(2.0, 1.0, num_steps)])
    monkeypatch.setattr(copies, "ablate_inputs", lambda copy: {"control": Rise((low + high) / 2, low, high)})
    [found] = levels([inputs_are_used], CheckContext(setup_of(Steered)))
    assert found.level == level
    assert "part of" not in found.seen


@pytest.mark.parametrize("tensors", [["nope"], ["u", "nope"]])
def test_a_declared_tensor_that_no_batch_has_stops_the_run(tensors: list[str]) -> None:
    class Misnamed(Steered):
        def inputs(self):  # type: ignore[no-untyped-def]
            return [Input("control", tensors)]

    [found] = [r for r in quick(setup_of(Misnamed)) if r.name == "declared inputs"]
    assert found.level == "fail"
    assert "'nope'" in found.seen
    assert "has x, u, y" in found.seen
    assert [r.level for r in levels([inputs_are_used], CheckContext(setup_of(Misnamed)))] == ["skip"]
    assert {r.level for r in inputs.declared_inputs(CheckContext(setup_of(Steered)))} == {"pass"}
    assert {r.level for r in inputs.declared_inputs(CheckContext(setup_of(Tiny)))} == {"skip"}


# The arrays themselves


class Odd(Steered):
    """Each test puts its own arrays beside those that the model reads."""

    extra: dict[str, np.ndarray] = {}
    extra_at_eval: dict[str, np.ndarray] | None = None

    def _rows(self, num_rows: int, part: int, scale: float) -> Rows:
        rows = super()._rows(num_rows, part, scale)
        given = self.extra if part == 1 or self.extra_at_eval is None else self.extra_at_eval
        rows.arrays |= {name: array[: rows.num_rows] for name, array in given.items()}
        return rows


def looked(extra: dict[str, np.ndarray], at_eval: dict[str, np.ndarray] | None = None) -> list[Result]:
    kind = type("Odder", (Odd,), {"extra": extra, "extra_at_eval": at_eval})
    return levels(ARRAYS, CheckContext(setup_of(kind, "num_rows=512")))


RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=(512, 6)).astype(np.float32)
SERIES = RNG.normal(size=(512, 12, 5)).astype(np.float32)
HEALTHY = {
    "mask": np.ones((512, 4), bool), "valid": np.ones((512, 4), np.float32), "pad_mask": np.zeros((512, 4), np.int8),
    "positions": np.tile(np.arange(9), (512, 1)), "labels": RNG.integers(0, 5, 512),
    "ids": RNG.integers(0, 50000, (512, 9)),
    "frames": RNG.integers(0, 256, (512, 6, 8, 3)).astype(np.uint8), "ones": np.ones((512, 1), np.float32),
    "rare": (NOISE[:, :2] > 2.4).astype(np.float32), "signed": NOISE * 30, "empty": np.zeros((512, 0), np.int32),
    "rare flags": (RNG.random((512, 20)) < 0.02).astype(np.float32),
    "flags beside numbers": np.concatenate([NOISE, NOISE[:, :2] > 0, np.sign(NOISE[:, 2:3])], 1).astype(np.float32),
    "padded": (RNG.normal(size=(512, 40)) * (np.arange(40) < RNG.integers(5, 39, (512, 1)))).astype(np.float32),
    "starts at nought": SERIES * (np.arange(12)[:, None] > 0).astype(np.float32),
    "quiet and loud": (RNG.normal(size=(512, 200)) * 10 ** RNG.uniform(-1, 0.5, (512, 1))).astype(np.float32),
    "some silence": (RNG.normal(size=(512, 200)) * (RNG.random((512, 1)) > 0.03)).astype(np.float32),
    "condition left out": (RNG.normal(size=(512, 30)) * (RNG.random((512, 1)) > 0.15)).astype(np.float32),
    "texts": RNG.integers(1, 99, (512, 30)) * (RNG.random((512, 1)) > 0.4),
    "mouse": (RNG.normal(size=(512, 2)) * (RNG.random((512, 1)) > 0.9)).astype(np.float32),
}  # fmt: skip
SICK = {
    "0..255 as floats": RNG.integers(0, 256, (512, 8)).astype(np.float32),
    "mean 40": 40 + 0.001 * NOISE,
    "constant: 3": np.full((512, 4), 3.0, np.float32),
    "silent": np.zeros((512, 4), np.float32),
    "the same": np.tile(NOISE[:1], (512, 1)),
    "do not vary: 2": np.where(np.arange(6) == 2, 0.5, NOISE).astype(np.float32),
    "2 of 6 channels": (NOISE * [1, 1e-4, 1, 1, 7e-4, 1]).astype(np.float32),
    "3 (mean 99.9": (NOISE + np.array([0, 0, 0, 100, 0, 0])).astype(np.float32),
    "small numbers in most of 10": (RNG.normal(size=(512, 10)) * np.geomspace(1.1e-3, 2e-2, 10)).astype(np.float32),
    "255 of 256 rows": (RNG.normal(size=(512, 8)) * (np.arange(512)[:, None] == 0)).astype(np.float32),
    "(34%)": (RNG.normal(size=(512, 30)) * (np.arange(512)[:, None] % 3 > 0)).astype(np.float32),
    "copies of one row": np.where(RNG.random((512, 1)) < 0.3, NOISE[:1].repeat(4, 1), RNG.normal(size=(512, 24))),
    "rows of z have a deviation": RNG.normal(size=(512, 64)) * np.where(RNG.random((512, 1)) < 0.1, 32768, 1),
    "step 5 (3)": np.where(np.arange(12)[:, None] == 5, np.round(SERIES.clip(-1, 1)) * 0.3, SERIES),
    "step 7 (1)": np.where(np.arange(12)[:, None] == 7, 0.0, SERIES),
    "feature 2 (3)": np.where(np.arange(5) == 2, np.round(SERIES.clip(-1, 1)) * 0.3, SERIES),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_rightly_so_is_let_pass(name: str) -> None:
    assert {r.level for r in looked({name: HEALTHY[name]})} == {"pass"}


@pytest.mark.parametrize("part", SICK)
def test_what_is_wrong_with_an_array_is_named(part: str) -> None:
    [found] = [r for r in looked({"z": SICK[part]}) if r.level != "pass"]
    assert found.level == "warn"
    assert "z " in found.seen
    assert part in found.seen
    assert "z: float" in found.detail


@pytest.mark.parametrize("declared", [(), ("z",), ("x",)])
def test_whole_numbers_that_stand_still_are_a_fault_where_they_may_be_an_input(declared: tuple[str, ...]) -> None:
    """A task, a length or a prompt that all rows share is none where the recipe says what the model is to use."""
    one = type("Declared", (Odd,), {
        "extra": {"z": np.zeros(512, np.int64)}, "extra_at_eval": None,
        "inputs": lambda self: [Input(name, [name]) for name in declared],
    })  # fmt: skip
    found = [r for r in levels(ARRAYS, CheckContext(setup_of(one, "num_rows=512"))) if "z is silent" in r.seen]
    assert bool(found) == (declared != ("x",))


def test_a_target_is_not_called_an_input() -> None:
    [found] = [r for r in looked({"z": 1e6 * NOISE}) if r.level != "pass"]
    assert found.level == "warn"
    assert "if the model gets z as it is, or the loss as a target" in found.remedy


@pytest.mark.parametrize(("train", "held", "part"), [
    (NOISE, NOISE + 3, "deviations apart"), (NOISE, NOISE * 4, "deviation"),
    (NOISE, NOISE.astype(np.float64), "float64"),
    (RNG.uniform(-1, 1, (512, 8, 8)), RNG.uniform(0, 1, (512, 8, 8)), "[0, 1]"),
    (NOISE[:, :3] + np.arange(3), (NOISE[:, :3] + np.arange(3))[:, ::-1], "reverse order"),
])  # fmt: skip
def test_an_eval_set_of_another_kind_is_named(train: np.ndarray, held: np.ndarray, part: str) -> None:
    found = looked({"z": train}, {"z": held})
    assert any(r.level == "warn" and part in r.seen for r in found), found


def test_other_content_is_no_other_preparation() -> None:
    """Episodes in rooms of their own brightness: a held-out one is as far from the mean as any."""
    rooms = np.repeat(RNG.normal(size=(10, 1)), 60, axis=0) + 0.3 * RNG.normal(size=(600, 6))
    found = looked({"z": rooms[:512].astype(np.float32)}, {"z": np.tile(rooms[540:], (10, 1)).astype(np.float32)})
    assert {r.level for r in found} == {"pass"}


def test_a_few_large_numbers_are_no_other_preparation() -> None:
    """One episode with a fall in it: its mean and deviation are far from those of train, its quartiles are not."""
    train, held = NOISE.copy(), RNG.normal(size=(512, 6)).astype(np.float32)
    held[200:220, 1] = 30
    assert {r.level for r in looked({"z": train}, {"z": held})} == {"pass"}


def test_first_axes_must_be_rows() -> None:
    class Transposed(Rows):
        def gather(self, ids: np.ndarray, draw: Draw) -> dict[str, np.ndarray]:
            arrays = super().gather(ids, draw)
            return {**arrays, "z": np.zeros((3, len(ids)))}

    class Wrong(Steered):
        def streams(self):  # type: ignore[no-untyped-def]
            return {name: Transposed("t", 8.0, **rows.arrays) for name, rows in super().streams().items()}  # type: ignore[attr-defined]

    bench = CheckContext.__new__(CheckContext)
    bench.setup, bench.is_quick, bench.shared = setup_of(Wrong), True, {}
    [found] = list(inputs.sound_inputs(bench))
    assert found.level == "fail"


@given(hnp.arrays(np.float32, st.tuples(st.integers(2, 9), st.integers(1, 9), st.integers(1, 5)),
                  elements=st.floats(-100, 100, width=32)))  # fmt: skip
def test_channels_are_the_last_axis(array: np.ndarray) -> None:
    look = inputs.array_stats("z", array)
    np.testing.assert_allclose(look.mean, array.astype(np.float64).mean((0, 1)), atol=1e-9)
    np.testing.assert_allclose(look.std, array.astype(np.float64).std((0, 1)), atol=1e-6)


# Splits


@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(14, 30)), elements=st.integers(0, 2)))
def test_windows_have_one_hash_exactly_where_they_are_the_same(ids: np.ndarray) -> None:
    width = 13
    hashes = leakage.rolling(ids, width)
    seen: dict[tuple[int, ...], int] = {}
    for row, found in zip(ids.tolist(), hashes.tolist()):
        for start, number in enumerate(found):
            assert seen.setdefault(tuple(row[start : start + width]), number) == number
    assert len(set(seen.values())) == len(seen)


@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(2, 9)), elements=st.integers(0, 2)))
def test_a_row_ends_where_its_last_id_begins_to_repeat(ids: np.ndarray) -> None:
    for row, length in zip(ids.tolist(), leakage.lengths(ids).tolist()):
        assert all(number == row[-1] for number in row[length:])
        assert length == 0 or row[length - 1] != row[-1]


def test_what_is_drawn_and_small_is_no_content() -> None:
    class Jittered(Rows):
        def gather(self, ids: np.ndarray, draw: Draw) -> dict[str, np.ndarray]:
            return {**super().gather(ids, draw), "noise": draw.uniform("noise", 4)}

    ids = chain(50, 1)
    ways, reason = leakage.pairings(Jittered("a", ids=ids), Jittered("b", ids=ids), 0)
    assert {way.names for way in ways} == {("ids",)}
    assert not reason


def noise(x: np.ndarray, draw: Draw) -> np.ndarray:
    return x + 0.1 * (draw.uniform("noise", x[0].size).reshape(x.shape) - 0.5)


def in_training(x: np.ndarray, draw: Draw) -> np.ndarray:
    return x if draw.is_eval else noise(x, draw)


def crop(x: np.ndarray, draw: Draw) -> np.ndarray:
    return np.stack([row[at : at + 40] for row, at in zip(x, draw.integers("crop", x.shape[1] - 40))])


def flip(x: np.ndarray, draw: Draw) -> np.ndarray:
    return np.where(draw.uniform("flip") < 0.5, x[:, ::-1], x)


def globally(x: np.ndarray, draw: Draw) -> np.ndarray:
    return x + 0.1 * np.random.normal(size=x.shape)


def by_generator(x: np.ndarray, draw: Draw) -> np.ndarray:
    return x + 0.1 * torch.randn(x.shape, generator=draw.generator("noise")).numpy()


def shift(x: np.ndarray, draw: Draw) -> np.ndarray:
    return x + draw.integers("shift", 7)[:, None] - 3


def drop(x: np.ndarray, draw: Draw) -> np.ndarray:
    return np.where(draw.uniform("drop", x.shape[1]) < 0.2, 0, x)


def wildly(x: np.ndarray, draw: Draw) -> np.ndarray:
    return x + 0.1 * np.random.default_rng().normal(size=x.shape)


AUGMENTATIONS = [noise, in_training, crop, flip, globally, by_generator, shift, drop]
NUMBERS, IDS = RNG.normal(size=(360, 60)), RNG.integers(0, 500, (360, 60))


def split(train: Mapping[str, np.ndarray], held: Mapping[str, np.ndarray], *augment: Any) -> Setup:
    """A recipe whose train set is augmented by the first function, and its eval set by the last."""

    class Augmented(Rows):
        augment: Any = None

        def gather(self, ids: np.ndarray, draw: Draw) -> dict[str, np.ndarray]:
            rows = super().gather(ids, draw)
            return {name: self.augment(a, draw) if self.augment and name == "z" else a for name, a in rows.items()}

    class Split(Steered):
        def streams(self) -> dict[str, Rows]:
            made = {}
            for number, (name, arrays) in enumerate({"train": train, "val": held}.items()):
                rows = self._rows(len(next(iter(arrays.values()))), number, 1.0)
                made[name] = Augmented(name, 8.0, **{**rows.arrays, **arrays})
                made[name].augment = augment[min(number, len(augment) - 1)] if augment else None
            return made  # type: ignore[return-value]

    return setup_of(Split)


def said(setup: Setup) -> list[str]:
    return [r.level for r in leakage.leakage(CheckContext(setup))]


@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_augmentation_hides_no_leak(augment: Any) -> None:
    rows = IDS if augment in (shift, drop) else NUMBERS
    same, apart = ({"z": rows[:300]}, {"z": rows[200:300]}), ({"z": rows[:300]}, {"z": rows[300:]})
    assert said(split(*same, augment)) == ["warn"]
    assert said(split(*apart, augment)) == ["pass"]
    # Of training alone: what no draw stills cannot be compared, and that is no pass.
    cannot = augment in (globally, by_generator)
    assert said(split(*same, augment, None)) == (["skip"] if cannot else ["warn"])
    assert said(split(*apart, augment, None)) == (["skip"] if cannot else ["pass"])


def test_captions_that_many_rows_share_are_no_leak() -> None:
    """What describes a row is alike for rows that are not; alone, the same text is what is to be predicted."""
    texts = np.tile(IDS[:80], (5, 1)).astype(np.uint16)
    pictures = RNG.normal(size=(400, 40, 40)).astype(np.float32)
    parts = [{"z": pictures[some], "text": texts[some]} for some in (slice(300), slice(300, 400))]
    assert said(split(*parts)) == ["pass"]
    assert said(split(*({"z": one["text"]} for one in parts))) == ["warn"]


def test_what_cannot_be_compared_is_not_looked_at() -> None:
    [found] = leakage.leakage(CheckContext(split({"z": NUMBERS[:300]}, {"z": NUMBERS[:60]}, wildly)))
    assert (found.level, "not through `draw`" in found.seen) == ("skip", True)


def clips(frames: np.ndarray, places: np.ndarray) -> dict[str, np.ndarray]:
    """Four frames in a row from each of these places."""
    return {"z": np.stack([frames[places + k] for k in range(4)], 1)}


def test_frames_that_lie_in_rows_of_train_are_found() -> None:
    """Clips are shuffled and split: no clip of the eval set is in train, each of its frames is."""
    film = RNG.integers(0, 255, (400, 8, 8, 3)).astype(np.uint8)
    film[::7] = 0  # fades to black
    film[3::50] = film[3]  # a title that comes again
    order = RNG.permutation(390)
    shuffled = clips(film, order[:340]), clips(film, order[340:])
    blocks = clips(film, np.arange(320)), clips(film, np.arange(330, 390))
    for number, (train, held) in enumerate((shuffled, blocks)):
        for change in (lambda a: a, lambda a: (a / 255).astype(np.float32), lambda a: a.reshape(len(a), 4, -1) / 255):
            setup = split(*({"z": change(some["z"])} for some in (train, held)))
            assert said(setup) == [["warn"], ["pass"]][number]


@pytest.mark.parametrize("kind", ["ids", "codes", "sound", "features", "states"])
def test_spans_that_lie_in_rows_of_train_are_found(kind: str) -> None:
    """Rows are cut from recordings at random places, and recordings are in both sets."""
    sounds = {
        "ids": RNG.integers(0, 99, (12, 3000)), "codes": RNG.integers(0, 99, (12, 1000, 4)),
        "sound": RNG.normal(size=(12, 9000)), "features": RNG.normal(size=(12, 1000, 20)),
        "states": RNG.normal(size=(12, 1000, 4)),
    }[kind]  # fmt: skip
    sounds[:, 200:400] = sounds[0, 200] * 0  # silence

    def cut(some: np.ndarray, num_rows: int) -> np.ndarray:
        length = 9 if kind == "states" else 120  # rows that are shorter than a window
        places = RNG.integers(0, sounds.shape[1] - length, num_rows)
        return np.stack([some[i % len(some), at : at + length] for i, at in enumerate(places)])

    apart = said(split({"z": cut(sounds[:9], 400)}, {"z": cut(sounds[9:], 60)}))
    mixed = said(split({"z": cut(sounds, 400)}, {"z": cut(sounds, 60)}))
    assert (apart, mixed) == (["pass"], ["warn"])


@pytest.mark.parametrize("row_s", [1e-5, 1e-3, 0.02, 0.3])
def test_a_slow_gather_is_given_up_when_the_time_is_over(row_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(Rows):
        def gather(self, ids: np.ndarray, draw: Draw) -> dict[str, np.ndarray]:
            now[0] += row_s * len(ids)
            return super().gather(ids, draw)

    monkeypatch.setattr(leakage.time, "monotonic", lambda: now[0])
    way = leakage.Pairing(names=("ids",))
    rows = leakage.read(Slow("s", ids=chain(3000, 1)), way, 3000, 0, seconds=0.5)
    assert now[0] <= 0.5 + 8 * row_s
    assert rows.num_rows >= min(3000, 0.45 / row_s, 8)
    assert len(rows.hashes) == rows.num_rows == len(set(rows.hashes.tolist()))


@pytest.mark.parametrize("is_quick", [True, False])
def test_rows_of_train_in_an_eval_set_are_found(is_quick: bool) -> None:
    for recipe, level in ((Leaky, "warn"), (Apart, "pass")):
        found = levels([leakage.leakage], CheckContext(setup_of(recipe), is_quick))
        assert [r.level for r in found] == [level], found
        assert "64 of 64 rows against 2000 of 2000" in found[0].seen


def test_parts_of_rows_are_found_and_boilerplate_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    train, held, header = (rng.integers(0, 1000, (n, 200)) for n in (300, 60, 1))
    train[:, :60], held[:, :60] = header[:, :60], header[:, :60]  # the same licence in every document

    def look(eval_rows: np.ndarray) -> Result:
        class Documents(Tiny):
            def streams(self):  # type: ignore[no-untyped-def]
                return {"train": Rows("t", ids=train % 32), "val": Rows("v", ids=eval_rows % 32)}

        bench = CheckContext(setup_of(Documents, "num_rows=300"))
        return next(iter(leakage.leakage(bench)))

    # ids of the model are few, but windows of 50 among 32 ids are never alike by chance
    monkeypatch.setattr("tests.cases.tiny.LENGTH", 200)
    assert look(held).level == "pass"
    spoilt = held.copy()
    spoilt[::4, 100:180] = train[10:25, 61:141]  # in a quarter of the rows, and elsewhere in the row
    assert look(spoilt).level in ("warn", "fail")


# Recipes of the catalog


def small(name: str, data: Path, *overrides: str) -> Setup:
    return contract.CASES[name][0](data).setup(*overrides)


@pytest.mark.parametrize("name", ["piano", "world", "toy"])
def test_the_made_up_sets_of_the_tests_are_sound(name: str, request: pytest.FixtureRequest) -> None:
    data = request.getfixturevalue(contract.CASES[name][1])
    setup = small(name, data)
    for is_quick in (True, False):
        found = levels(ARRAYS, CheckContext(setup, is_quick))
        assert [r for r in found if r.level in ("warn", "fail")] == []


def test_the_embedded_music_is_sound() -> None:
    data = Path(__file__).resolve().parents[2] / "data" / "piano"
    if not data.is_dir():
        pytest.skip("needs `rung data piano`")
    setup = small("piano", data, "data.context_size=256")
    found = levels([inputs.sound_inputs, inputs.declared_inputs, *SPLITS], CheckContext(setup))
    assert {r.level for r in found} == {"pass"}, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["world_donkeycar", "world_vizdoom"])
def test_real_worlds_are_sound(name: str, tmp_path: Path) -> None:
    from rung.recipes.world.data import prepare
    from rung.resolve import resolve

    keys = [
        "preset=tiny", f"dataset.base_dataset_name={tmp_path / 'place'}", "dataset.width=64", "dataset.height=48",
        "model.memory=[2@32x24,4@16x12,8@4x3]", "model.width=8", "data.batch_size=8", "evaluation.horizon=8",
        "system.device=cpu", "system.threads=1",
    ]  # fmt: skip
    resolved = resolve("world", keys)
    dataset = resolved.config.view("recipe").dataset
    prepare(shared_data(name), tmp_path / "place", dataset, 1, False, lambda *_: None)
    setup = build(resolved.config, resolved.recipe_class, tmp_path)
    found = levels([*ARRAYS, inputs.declared_inputs, inputs_are_used, *SPLITS], CheckContext(setup))
    assert [r for r in found if r.level in ("warn", "fail")] == []


def test_evals_are_left_as_they_were() -> None:
    setup = setup_of(Steered)
    with eval_mode(setup.state.model):
        before = setup.evaluator.run(setup.state.model)
    levels([*ARRAYS, *SPLITS], CheckContext(setup))
    assert setup.evaluator.run(setup.state.model) == before


def test_the_quick_form_gathers_the_rows_of_a_slow_stream_once() -> None:
    gathered = []

    class Counted(Rows):
        def gather(self, ids: np.ndarray, draw: Draw) -> dict[str, np.ndarray]:
            gathered.append(len(ids))
            return super().gather(ids, draw)

    class Slow(Steered):
        def streams(self):  # type: ignore[no-untyped-def]
            return {name: Counted(name, 8.0, **rows.arrays) for name, rows in super().streams().items()}  # type: ignore[attr-defined]

    levels(ARRAYS, CheckContext(setup_of(Slow), is_quick=True))
    assert gathered.count(64) == 2  # train and the eval set
