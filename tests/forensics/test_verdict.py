"""If this fails, the same answers lead to another verdict than the table of counterfactuals says, or to none."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rung.forensics.autopsy import Autopsy
from rung.forensics.first import Origin
from rung.forensics.rerun import Try
from rung.forensics.verdict import ORIGINS, Answers, Broken, judge


def answers(**known: object) -> Answers:
    """A step that fails at its loss each time, and of which nothing else is known."""
    a = Answers(5, "float32", "cpu", num_tries=2, num_failed=2, failed=Try("loss", 0, "o"), micro=0)
    for name, value in known.items():
        setattr(a, name, value)
    return a


NO, YES = False, True
# others fail, older fails -> origin
TABLE = [(0, YES, "DATA"), (8, NO, "WEIGHTS"), (0, NO, "COMBINATION"), (8, YES, "MODEL MATH"), (1, YES, "DATA"),
         (4, NO, "WEIGHTS"), (7, YES, "MODEL MATH")]  # fmt: skip


@pytest.mark.parametrize(("others", "older", "origin"), TABLE)
def test_the_table(others: int, older: bool, origin: str) -> None:
    verdict = judge(answers(others=(others, 8), older=("step 0", older)))
    assert (verdict.origin, verdict.confidence) == (origin, "sure")


LADDER = [
    ({"float32": NO, "float64 on cpu": NO}, "float16", "cpu", NO, "PRECISION"),
    ({"float32": NO, "float64 on cpu": NO}, "bfloat16", "cuda", NO, "PRECISION"),
    ({"float32": YES, "float32 on cpu": NO, "float64 on cpu": NO}, "bfloat16", "cuda", NO, "DEVICE"),
    ({"float32 on cpu": NO, "float64 on cpu": NO}, "float32", "cuda", NO, "DEVICE"),
    ({"eager": NO, "float64 on cpu": NO}, "float32", "cpu", YES, "COMPILER"),
    ({"float32": YES, "float64 on cpu": YES}, "float16", "cpu", NO, "MODEL MATH"),
    ({"float64 on cpu": NO}, "float32", "cpu", NO, "MODEL MATH"),  # outgrows float32 wherever it is computed
]


@pytest.mark.parametrize(("ladder", "dtype", "device", "is_compiled", "origin"), LADDER)
def test_the_ladder(ladder: dict[str, bool], dtype: str, device: str, is_compiled: bool, origin: str) -> None:
    a = answers(ladder=ladder, dtype=dtype, device=device, is_compiled=is_compiled, others=(8, 8), older=("0", YES))
    assert judge(a).origin == origin


def test_what_could_not_be_asked_lowers_the_confidence() -> None:
    assert judge(answers(others=(0, 8))).confidence == "likely"
    assert judge(answers()).confidence == "unsure"
    assert judge(answers(others=(8, 8), step=0)).confidence == "sure"  # there are no older weights
    assert judge(answers(failed=None, num_failed=0, not_tested=["the device"])).confidence == "unsure"


def test_bad_weights_come_before_everything_else() -> None:
    a = answers(bad_weights=["w"], others=(0, 8), older=("0", YES), found=Origin(given="x"))
    assert judge(a).origin == "WEIGHTS"
    a.broken = Broken(3, "steps 0 to 3", ["w"], True, Autopsy("w", "eps", "eps is 0"))
    assert (judge(a).origin, judge(a).step) == ("OPTIMIZER", 3)
    a.broken = Broken(3, "steps 0 to 3", ["w"], False)
    assert (judge(a).origin, judge(a).step) == ("WEIGHTS", 3)


def test_data_that_is_bad_in_every_batch_is_still_data() -> None:
    """Small sets have the bad row in each of their batches."""
    assert judge(answers(found=Origin("aten.mm", given="x"), others=(8, 8), older=("0", YES))).origin == "DATA"


def test_an_error_whatever_comes_is_the_models_own() -> None:
    a = answers(failed=Try("error", 0, "o", "KeyError: 'x'"), others=(8, 8), older=("0", YES))
    assert judge(a).origin == "MODEL MATH"
    a.is_out_of_range = True
    assert judge(a).origin == "DATA"


maybe = st.booleans()


@given(
    place=st.sampled_from(["", "error", "loss", "gradient", "sum", "norm", "weights", "state"]),
    ladder=st.dictionaries(
        st.sampled_from(["eager", "float32", "bfloat16", "float32 on cpu", "float64 on cpu"]), maybe
    ),
    others=st.none() | st.tuples(st.integers(0, 8), st.just(8)),
    older=st.none() | st.tuples(st.just("0"), maybe),
    bad_weights=st.lists(st.just("w"), max_size=5),
    bad_state=st.lists(st.just("v of w"), max_size=1),
    given_as=st.sampled_from(["", "x", "weight w", "a constant"]),
    device=st.sampled_from(["cpu", "cuda"]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    is_empty=maybe,
)
def test_there_is_always_one_verdict_and_a_report(
    place: str, ladder: dict[str, bool], others: tuple[int, int] | None, older: tuple[str, bool] | None,
    bad_weights: list[str], bad_state: list[str], given_as: str, device: str, dtype: str, is_empty: bool,
) -> None:  # fmt: skip
    failed = Try(place, 0, "o", "ValueError: x" if place == "error" else "") if place else None
    a = answers(
        failed=failed, num_failed=2 if place else 0, ladder=ladder, others=others, older=older, dtype=dtype,
        bad_weights=bad_weights, bad_state=bad_state, found=Origin("aten.x", given=given_as), device=device,
        is_empty=is_empty,
    )  # fmt: skip
    verdict = judge(a)
    assert verdict.origin in ORIGINS
    assert verdict.confidence in ("sure", "likely", "unsure")
    assert verdict.remedy
    assert verdict.lines()[0].startswith(verdict.origin)
    assert judge(a) == verdict
