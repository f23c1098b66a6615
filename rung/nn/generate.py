"""Samples from a transformer with a key/value cache.

All randomness comes from the generator passed in; weights, modes and the global random state are left alone. Prompts of
different lengths share a batch, and each row comes out as it would alone. When a row's context is full, its last half
is encoded again and generation continues, so a long sample always sees between half a context and a whole one.

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rung.errors import ConfigError, DataError
from rung.nn.transformer import Transformer

COLDEST = 1e-6  # below it a draw is greedy but for ties, and logits would grow past all numbers

Allowed = Callable[[Tensor], Tensor]  # ids so far (B, T) -> bool (V,) or (B, V), True where an id may come next
Embed = Callable[[Tensor, int], Tensor]  # ids so far (B, T), how many of them are new (n) -> embeddings (B, n, C)


@dataclass(frozen=True)
class SamplingParams:
    """What the user of a recipe chooses for samples; the arguments of `generate_steps`."""

    num_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


class Generated(NamedTuple):
    """One step of generation."""

    ids_B: Tensor  # what was chosen for each row
    logits_BV: Tensor  # what it was chosen from, before temperature; -inf where an id was not allowed


@torch.no_grad()
def generate_steps(
    model: Transformer,
    prompt_ids_BT: Tensor,
    num_new: int,
    *,
    lengths: Sequence[int] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    stop_id: int | None = None,
    allowed: Allowed | None = None,
    memory: Tensor | None = None,
    memory_mask: Tensor | None = None,
    embed: Embed | None = None,
) -> Iterator[Generated]:
    """Up to `num_new` further ids for each row, one step at a time.

    With `lengths` a row's prompt is its last so many ids, and whatever is left of them is not seen. Temperature 0 is
    greedy and needs no generator. A row that reached `stop_id` is filled up with it; when every row has, generation
    ends early. `allowed` is called once a step with all ids so far, so it may remember what it saw. `embed` is for
    models that are given more than ids: called with all ids so far and the number of those that are not embedded yet,
    it gives the embeddings of the last ones.
    """
    lengths = _checked_lengths(prompt_ids_BT, lengths, temperature, top_k, top_p, generator)
    limit = model.shape.context_size
    ids_BT = prompt_ids_BT
    stopped_B = torch.zeros(len(ids_BT), dtype=torch.bool, device=ids_BT.device)
    starts = [ids_BT.shape[1] - min(length, limit) for length in lengths]  # the first id of each row the model sees
    with evaluating(model):
        cache = model.new_cache(len(ids_BT), limit)
        pending_BT = ids_BT[:, min(starts) :]
        for _ in range(num_new):
            num_places = ids_BT.shape[1]
            if num_places - min(starts) > limit:
                # Whoever is not full is encoded anew as it was: one cache serves all rows.
                starts = [s if num_places - s <= limit else num_places - max(1, limit // 2) for s in starts]
                cache, pending_BT = model.new_cache(len(ids_BT), limit), ids_BT[:, min(starts) :]
            positions = mask = None
            if min(starts) < max(starts):
                places_S = torch.arange(min(starts), num_places, device=ids_BT.device)
                places_BS = places_S - torch.tensor(starts, device=ids_BT.device)[:, None]
                positions, mask = places_BS[:, -pending_BT.shape[1] :].clamp(min=0), places_BS >= 0
            embeddings_BTC = None if embed is None else embed(ids_BT, pending_BT.shape[1])
            x_BTC = model.hidden(
                pending_BT if embed is None else None, embeddings=embeddings_BTC, positions=positions, mask=mask,
                cache=cache, memory=memory, memory_mask=memory_mask,
            )  # fmt: skip
            logits_BV = model.logits(x_BTC[:, -1]).float()
            if not bool(logits_BV.isfinite().all()):
                remedy = "take an earlier save, or system.dtype=float32"
                raise DataError(f"the model gives logits that are not finite; {remedy}", code="not-finite")
            if allowed is not None:
                logits_BV = _restrict(logits_BV, allowed(ids_BT), stopped_B)
            next_B = choose(logits_BV, temperature, top_k, top_p, generator).to(ids_BT)
            if stop_id is not None:
                next_B = next_B.masked_fill(stopped_B, stop_id)
                stopped_B |= next_B == stop_id
            yield Generated(next_B, logits_BV)
            pending_BT = next_B[:, None]
            ids_BT = torch.cat([ids_BT, pending_BT], dim=1)
            if stop_id is not None and bool(stopped_B.all()):
                break


def generate(model: Transformer, prompt_ids_BT: Tensor, num_new: int, **arguments: Any) -> Tensor:
    """The prompt and up to `num_new` further ids, (B, T + n); the arguments are those of `generate_steps`."""
    new = [step.ids_B[:, None] for step in generate_steps(model, prompt_ids_BT, num_new, **arguments)]
    return torch.cat([prompt_ids_BT, *new], dim=1)


def choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """One id per row, (B,). top_k is applied before top_p."""
    if temperature < COLDEST:
        return logits_BV.argmax(dim=-1)
    logits_BV = logits_BV / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        best_BK, places_BK = logits_BV.topk(top_k, dim=-1)  # k of them also where logits are equal, as in bfloat16
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(-1, places_BK, best_BK)
    probs_BV = logits_BV.softmax(dim=-1)
    if top_p is not None and top_p < 1:
        sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
        # What comes before an id decides: the one that crosses top_p is kept, so at least one always is.
        is_out_BV = sorted_BV.cumsum(dim=-1) - sorted_BV >= top_p
        probs_BV = torch.zeros_like(probs_BV).scatter(-1, order_BV, sorted_BV.masked_fill(is_out_BV, 0.0))
    assert generator is not None
    return torch.multinomial(probs_BV.to(generator.device), 1, generator=generator)[:, 0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; afterwards each module is as it was, also where parts were frozen in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _restrict(logits_BV: Tensor, mask: Tensor, stopped_B: Tensor) -> Tensor:
    mask_BV = mask.to(logits_BV.device).expand_as(logits_BV)
    stuck_B = ~mask_BV.any(dim=-1)
    if bool((stuck_B & ~stopped_B).any()):
        row = int((stuck_B & ~stopped_B).nonzero()[0])
        raise DataError(f"`allowed` leaves no next id in row {row}; let it allow one that ends it", code="no-next-id")
    return logits_BV.masked_fill(~(mask_BV | stuck_B[:, None]), -torch.inf)


def _checked_lengths(
    ids_BT: Tensor,
    lengths: Sequence[int] | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Sequence[int]:
    """The length of each prompt, after a look at all arguments."""
    if ids_BT.dim() != 2 or ids_BT.shape[1] < 1:
        raise DataError(f"a prompt of shape {tuple(ids_BT.shape)}; give (rows, at least 1 id)", code="bad-shape")
    problem = ""
    if not 0 <= temperature < float("inf"):
        problem = f"temperature={temperature} must be at least 0; 0 is greedy"
    if top_k is not None and top_k < 1:
        problem = f"top_k={top_k} must be at least 1; leave it out to allow every id"
    if top_p is not None and not 0 < top_p <= 1:
        problem = f"top_p={top_p} must be above 0 and at most 1; leave it out to allow every id"
    num_rows, num_places = ids_BT.shape
    if lengths is None:
        lengths = [num_places] * num_rows
    if len(lengths) != num_rows or not all(1 <= length <= num_places for length in lengths):
        problem = (
            f"lengths={list(lengths)} do not fit prompts of shape {(num_rows, num_places)}; "
            f"give {num_rows}, each from 1 to {num_places}"
        )
    if problem:
        raise ConfigError(problem, code="bad-value")
    if temperature > 0 and generator is None:
        raise ConfigError(f"temperature={temperature} needs a generator; give one, or 0", code="missing-option")
    return lengths
