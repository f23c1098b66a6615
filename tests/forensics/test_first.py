"""If this fails, the operation that is named as the first to go wrong is not the one that did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rung.forensics.first import Origin, first_nonfinite

INF, NAN = float("inf"), float("nan")


class Net(nn.Module):
    """A layer, whatever a test does to its output, a layer."""

    def __init__(self, middle: Callable[[Tensor], Tensor], recompute: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(4, 4), nn.Linear(4, 4), Middle(middle)
        self.recompute = recompute
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = checkpoint(self.middle, h, use_reentrant=False) if self.recompute else self.middle(h)
        out: Tensor = self.b(h)
        return out


class Middle(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def find(middle: Callable[[Tensor], Tensor], x: Tensor | None = None, recompute: bool = False) -> Origin | None:
    torch.manual_seed(0)
    net = Net(middle, recompute)
    batch = {"x": torch.randn(4, 4) if x is None else x}
    return first_nonfinite(net, batch, lambda: net(batch["x"]).pow(2).sum(), list(net.parameters()))


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((x @ x.T).masked_fill(mask, -INF), -1) @ x


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.rfft(x)


FINE: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "a causal mask": lambda x: masked_softmax(x, torch.ones(4, 4).triu(1).bool()),
    "a mask that is added": lambda x: torch.softmax(x @ x.T + torch.full((4, 4), -INF).triu(1), -1) @ x,
    "the start of a maximum": lambda x: torch.maximum(x, torch.full_like(x, -INF)),
    "memory that nothing has written": lambda x: torch.empty(4, 4).copy_(x) + x,
    "a logarithm whose infinities are taken out": lambda x: torch.where(x > 0, torch.log(x.detach().relu()), x),
    "NaN that is replaced": lambda x: torch.nan_to_num(x.detach() / 0 * 0) + x,
    "NaN that is filled in and taken out": lambda x: torch.nan_to_num(x.detach().masked_fill(x > 0, NAN)) + x,
    "attention of torch": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0],
}


@pytest.mark.parametrize("name", FINE)
def test_infinities_that_reach_nothing_are_not_reported(name: str) -> None:
    assert find(FINE[name]) is None


BAD: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "a row masked as a whole": ("aten._softmax", lambda x: masked_softmax(x, torch.ones(4, 4).bool())),
    "a mask by multiplication": ("aten.mul", lambda x: x + torch.zeros(4, 4) * -INF),
    "the logarithm of nothing": ("aten.log", lambda x: torch.log(x * 0)),
    "in place": ("aten.log_", lambda x: (x * 0).log_()),
    "a division": ("aten.div", lambda x: x / (x - x)),
    "a spectrum": ("aten.div", lambda x: torch.fft.irfft(spectrum(x * 0) / spectrum(x * 0).abs(), n=4)),
    "a factor of NaN": ("aten.mul", lambda x: x * NAN),
    "the second of two": ("aten.exp", lambda x: torch.where(x > 9, torch.log(x * 0), x) + torch.exp(x * 0 + 100)),
}


@pytest.mark.parametrize("name", BAD)
def test_the_producer_is_named_with_its_module_and_inputs(name: str) -> None:
    op, middle = BAD[name]
    found = find(middle)
    assert found is not None
    assert (found.op, found.module, found.phase, found.given, found.error) == (op, "middle", "forward", "", "")
    assert "test_first.py" in found.line
    assert all(r.num_bad == 0 or op == "aten._softmax" for r in found.inputs)


def test_input_ranges_are_those_before_the_operation() -> None:
    found = find(lambda x: (x * 0).log_())
    assert found is not None
    assert [(r.name, r.low, r.high, r.zeros, r.num_bad) for r in found.inputs] == [("input", 0.0, 0.0, 16, 0)]


def test_what_filled_a_row_is_told() -> None:
    found = find(BAD["a row masked as a whole"][1])
    assert found is not None
    assert found.filled.startswith("aten.masked_fill at ")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_data_is_not_the_operations_fault(bad: float) -> None:
    x = torch.randn(4, 4)
    x[2, 1] = bad
    found = find(lambda x: x, x)
    assert found is not None
    assert (found.op, found.module, found.argument, found.given) == ("aten.addmm", "a", "mat1", "x")


def test_a_bad_weight_is_named() -> None:
    net = Net(lambda x: x)
    with torch.no_grad():
        net.b.weight[0, 0] = INF
    found = first_nonfinite(net, {}, lambda: net(torch.ones(4, 4)).sum(), list(net.parameters()))
    assert found is not None
    assert (found.module, found.argument, found.given) == ("b", "mat2", "weight b.weight")


def test_a_constant_that_no_operation_computed_is_named_as_given() -> None:
    found = find(lambda x: x * torch.tensor(NAN))
    assert found is not None
    assert (found.module, found.given) == ("middle", "a constant")


def root(x: Tensor) -> Tensor:
    square = (x * 0).pow(2)
    return x + torch.where(square > 0, torch.sqrt(square), 0.0)


def test_a_backward_operation_has_the_line_of_its_forward() -> None:
    found = find(root)
    assert found is not None
    assert (found.op, found.node, found.phase, found.module) == ("aten.div", "SqrtBackward0", "backward", "middle")
    assert found.text == "return x + torch.where(square > 0, torch.sqrt(square), 0.0)"


def test_what_is_computed_again_in_backward_says_so() -> None:
    calls = []

    def once_good(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.exp(x * 0 + (1.0 if len(calls) == 1 else 100.0)) * x

    found = find(once_good, recompute=True)
    assert found is not None
    assert (found.op, found.phase, found.module) == ("aten.exp", "recompute", "middle")


def test_an_error_is_found_where_it_was_raised() -> None:
    found = find(lambda x: F.embedding(torch.tensor([7]), x))
    assert found is not None
    assert (found.op, found.module) == ("aten.embedding", "middle")
    assert "IndexError" in found.error


def fails_by_itself(x: Tensor) -> Tensor:
    raise KeyError("speaker")


def test_an_error_of_plain_code_has_its_line() -> None:
    found = find(fails_by_itself)
    assert found is not None
    assert found.text == 'raise KeyError("speaker")'
    assert found.module == "middle"
