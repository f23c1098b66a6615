"""If this fails, looking at a forward breaks it, or leaves something on the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.engine.op_tracer import BoundsCheck, OpTracer
from rung.forensics.first import first_nonfinite
from tests.forensics.vectors import Net

X, IDS, TABLE = torch.zeros(2, 2, 3, 3), torch.tensor([0, 1]), nn.Parameter(torch.zeros(4, 3))

BY_NAME: dict[str, Callable[[], Any]] = {
    "torch.softmax": lambda: torch.softmax(input=X, dim=-1),
    "softmax": lambda: F.softmax(input=X, dim=-1),
    "torch.embedding": lambda: torch.embedding(weight=TABLE, indices=IDS),
    "embedding": lambda: F.embedding(input=IDS, weight=TABLE),
    "index_select": lambda: torch.index_select(input=TABLE, dim=0, index=IDS),
    "cross_entropy": lambda: F.cross_entropy(input=torch.zeros(2, 3), target=IDS),
    "attention": lambda: F.scaled_dot_product_attention(query=X, key=X, value=X, is_causal=True),
}


@pytest.mark.parametrize("kind", [OpTracer, BoundsCheck])
@pytest.mark.parametrize("name", BY_NAME)
def test_arguments_by_name_are_seen(name: str, kind: type[OpTracer]) -> None:
    with kind(nn.Identity()) as tracer:
        BY_NAME[name]()
    assert tracer.lookups or tracer.loss_calls or tracer.attention_calls


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.jit.script(nn.Linear(4, 6))


def num_hooks(net: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in net.modules())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_is_looked_past() -> None:
    net = Scripted()
    with OpTracer(net, keeps_modules=True) as tracer:
        net(torch.zeros(2, 4))
    assert [seen.module for seen in tracer.module_outputs] == ["b", ""]
    found = first_nonfinite(net, {}, lambda: net(torch.full((2, 4), torch.nan)).sum(), list(net.parameters()))
    assert found is not None
    assert found.module == "model"
    assert num_hooks(net) == 0


class Stubborn(nn.Linear):
    def register_forward_hook(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("no hooks here")


def test_a_part_that_refuses_hooks_leaves_none_on_the_others() -> None:
    net = Net()
    net.b = Stubborn(6, 1)
    with pytest.raises(RuntimeError, match="no hooks here"), OpTracer(net):
        pass
    with pytest.raises(RuntimeError, match="no hooks here"):
        first_nonfinite(net, {}, lambda: torch.zeros(()), [])
    assert num_hooks(net) == 0


def test_a_lens_that_is_put_away_sees_no_more() -> None:
    net = Net()
    with OpTracer(net) as tracer:
        pass
    out: Tensor = net(torch.zeros(2, 4))
    assert (tracer.module, num_hooks(net)) == ("", 0)
    assert out.shape == (2, 1)
