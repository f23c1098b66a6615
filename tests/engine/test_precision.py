"""If this fails, float16 training scales its losses otherwise than torch does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rung.engine import precision
from rung.engine.precision import LossScale, Precision, choose_device
from tests.errors import raises_code

CPU = torch.device("cpu")


@given(overflows=st.lists(st.booleans(), max_size=60))
def test_the_scale_follows_torch(overflows: list[bool]) -> None:
    ours = LossScale(CPU)
    ours.GROWTH_STEPS = 3  # type: ignore[misc]
    theirs, tracker = torch.tensor(LossScale.START), torch.tensor(0, dtype=torch.int32)
    for is_bad in overflows:
        ours.update(torch.tensor(is_bad), torch.zeros(()))
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(is_bad)), 2.0, 0.5, 3)
        assert ours.scale.item() == theirs.item()
    again = LossScale(CPU)
    again.load_state_dict(ours.state_dict())
    assert again.state_dict() == ours.state_dict()


def test_what_is_chosen_for_the_user_has_a_reason() -> None:
    device, why = choose_device("auto")
    assert why
    assert Precision("auto", device).reason
    assert Precision("float32", CPU).reason == ""
    assert Precision("float16", CPU).loss_scale is not None


@pytest.mark.parametrize(("name", "code"), [("cuda:99", "no-device"), ("tpu9", "bad-device"), ("gpu", "bad-device")])
def test_a_device_that_is_not_there(name: str, code: str) -> None:
    with raises_code(code) as error:
        choose_device(name)
    assert f"system.device={name}" in str(error.value)


def test_a_precision_that_this_cpu_only_imitates_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "slowness", lambda dtype: 87.0)
    assert "87 times as slow as float32" in Precision("float16", CPU).reason
    assert Precision("float32", CPU).reason == ""
    monkeypatch.setattr(precision, "slowness", lambda dtype: 0.6)
    assert Precision("bfloat16", CPU).reason == ""
