"""If this fails, a loss is a mean in disguise, and cutting a batch differently changes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.nn.losses import cross_entropy_sums, sums_by_class, token_losses


def rows(seed: int, num_rows: int = 6, length: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, length, 11, generator=generator) * 3
    targets = torch.randint(11, (num_rows, length), generator=generator)
    return logits, targets, torch.rand(num_rows, length, generator=generator) < 0.6


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), cut=st.integers(1, 5))
def test_cutting_a_batch_changes_neither_the_sum_nor_the_count(seed: int, cut: int) -> None:
    logits, targets, weights = rows(seed)
    whole = cross_entropy_sums(logits, targets, weights)
    parts = [cross_entropy_sums(logits[s], targets[s], weights[s]) for s in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(whole[0], parts[0][0] + parts[1][0])
    assert whole[1] == parts[0][1] + parts[1][1] == weights.sum()


def test_it_equals_torchs_own_and_ignores_what_does_not_count() -> None:
    logits, targets, weights = rows(0)
    expected = F.cross_entropy(logits[weights], targets[weights], reduction="sum")
    total, count = cross_entropy_sums(logits, targets, weights)
    torch.testing.assert_close(total, expected)
    ignored = targets.masked_fill(~weights, -1)  # out of range on purpose
    torch.testing.assert_close(cross_entropy_sums(logits, ignored, ignore=-1), (total, count))
    torch.testing.assert_close(cross_entropy_sums(logits, ignored, weights), (total, count))
    halves = cross_entropy_sums(logits, targets, weights * 0.5)
    torch.testing.assert_close(halves, (total / 2, count / 2))


def test_targets_are_not_changed_and_uncounted_ones_have_no_gradient() -> None:
    logits, targets, weights = rows(1)
    logits.requires_grad_()
    kept = targets.clone()
    cross_entropy_sums(logits, targets, weights)[0].backward()
    assert torch.equal(targets, kept)
    assert logits.grad is not None
    assert (logits.grad[~weights] == 0).all()
    assert (logits.grad[weights].abs().amax(-1) > 0).all()


def test_nothing_to_count_is_zero_not_nan() -> None:
    logits, targets, weights = rows(2)
    logits.requires_grad_()
    total, count = cross_entropy_sums(logits, targets, torch.zeros_like(weights))
    total.backward()
    assert total == count == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits, targets, weights = rows(3)
    total, count = cross_entropy_sums(logits.bfloat16(), targets, weights)
    assert total.dtype == count.dtype == torch.float32
    torch.testing.assert_close(total, cross_entropy_sums(logits.bfloat16().float(), targets, weights)[0])


def test_parts_by_class_add_up() -> None:
    logits, targets, weights = rows(4)
    losses, counted = token_losses(logits, targets, weights)
    parts = sums_by_class(losses, counted, targets % 4, ["a", "b", "c"])
    assert list(parts) == ["a", "b", "c"]
    rest = targets % 4 == 3
    torch.testing.assert_close(sum(part[0] for part in parts.values()) + losses[rest].sum(), losses.sum())
    assert sum(int(part[1]) for part in parts.values()) + int(counted[rest].sum()) == int(weights.sum())
