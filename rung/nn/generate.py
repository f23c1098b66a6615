"""Samples from a transformer with a key/value cache.

All randomness comes from the generator passed in; weights, modes and the global random state are left alone. Prompts of
different lengths share a batch, and each row comes out as it would alone. When a row's context is full, its last half
is encoded again and generation continues, so a long sample always sees between half a context and a whole one.

A step after the prompt is one function on a cache. On a CPU it runs as it is, with linear layers packed for few rows
(`rung.nn.pack`). On a GPU the host reads how a step ended some steps later; no id of a step that failed is given. The
step can also do the same work at the same addresses every time and be replayed as a CUDA graph (`Execution`).

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rung.errors import ConfigError, DataError
from rung.nn.pack import packed
from rung.nn.transformer import Transformer
from rung.text import one_line

COLDEST = 1e-6  # below it a draw is greedy but for ties, and logits would grow past all numbers
NUCLEUS = 256  # ids that are looked at first for top_p
NOT_FINITE, STUCK, STOPPED = 1, 2, 4  # a row's step, in Chosen.status_B

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


class Chosen(NamedTuple):
    ids_B: Tensor
    logits_BV: Tensor
    status_B: Tensor  # how each row's step ended: NOT_FINITE, STUCK, STOPPED


Step = Callable[[], Chosen]


class Execution(NamedTuple):
    """How the steps after the prompt run."""

    is_static: bool = False  # each step does the same work at the same addresses; else attention sees a growing view
    num_ahead: int = 0  # steps that are started before the host reads how a step ended
    capture: Callable[[Step, torch.Generator | None], Step] | None = None  # makes a static step faster


def execution_on(device: torch.device) -> Execution:
    # Execution(True, 2, in_cuda_graph) is meant for GPUs and has not run on one yet; tests/gpu says if it is right.
    return Execution(num_ahead=2) if device.type == "cuda" else Execution()


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
    execution: Execution | None = None,
) -> Iterator[Generated]:
    """Up to `num_new` further ids for each row, one step at a time.

    With `lengths` a row's prompt is its last so many ids, and whatever is left of them is not seen. Temperature 0 is
    greedy and needs no generator. A row that reached `stop_id` is filled up with it; when every row has, generation
    ends early. `allowed` is called once a step with all ids so far, so it may remember what it saw. `embed` is for
    models that are given more than ids: called with all ids so far and the number of those that are not embedded yet,
    it gives the embeddings of the last ones. On a GPU some steps are drawn ahead of the one that is given. A captured
    `execution` needs a generator of the same device.
    """
    lengths = _checked_lengths(prompt_ids_BT, lengths, temperature, top_k, top_p, generator)
    execution = execution or execution_on(prompt_ids_BT.device)
    limit, (num_rows, num_places) = model.shape.context_size, prompt_ids_BT.shape
    ids_BS = torch.cat([prompt_ids_BT, prompt_ids_BT.new_zeros(num_rows, num_new)], dim=1)
    starts = [num_places - min(length, limit) for length in lengths]  # the first id of each row the model sees
    with evaluating(model):
        capacity = min(limit, num_places - min(starts) + num_new)
        select = partial(choose, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        decoder = _Decoder(packed(model, num_rows, num_new), ids_BS, starts, capacity, select, stop_id)
        run: Step | None = None
        ahead: deque[tuple[Generated, Callable[[], list[int]]]] = deque()
        for number in range(num_new):
            num_pending, is_full = 1, num_places - min(starts) > limit
            if is_full:
                # Whoever is not full is encoded anew as it was: one cache serves all rows.
                starts = [s if num_places - s <= limit else num_places - max(1, limit // 2) for s in starts]
            if number == 0 or is_full:
                decoder.begin(starts)
                num_pending = num_places - min(starts)
            ids_BT = ids_BS[:, :num_places]
            given = (
                ids_BT[:, num_places - num_pending :],
                None if embed is None else embed(ids_BT, num_pending),
                None if allowed is None else allowed(ids_BT),
            )
            if number == 0 or is_full or not execution.is_static:
                chosen = decoder(*given, memory, memory_mask)
            else:
                decoder.place(*given)
                if run is None:
                    run = decoder.at_fixed_addresses
                    run = run if execution.capture is None else execution.capture(run, generator)
                chosen = run()
                chosen = chosen._replace(logits_BV=chosen.logits_BV.clone())  # the next step overwrites them
            ids_BS[:, num_places] = chosen.ids_B
            ahead.append((Generated(ids_BS[:, num_places], chosen.logits_BV), _read_later(chosen.status_B)))
            decoder.move_on(chosen)
            num_places += 1
            if len(ahead) > execution.num_ahead:
                made, status = ahead.popleft()
                has_ended = _check(status())
                yield made
                if has_ended:
                    return
        for made, status in ahead:
            has_ended = _check(status())
            yield made
            if has_ended:
                return


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
    logits_BK, ids_BK = logits_BV / temperature, None
    if top_k is not None and top_k < logits_BV.shape[-1]:
        logits_BK, ids_BK = logits_BK.topk(top_k, dim=-1)  # k of them also where logits are equal, as in bfloat16
    probs_BK = logits_BK.softmax(dim=-1)
    if top_p is not None and top_p < 1:
        if ids_BK is None:
            probs_BK, ids_BK = _likeliest(probs_BK, top_p)
        # What comes before an id decides: the one that crosses top_p is kept, so at least one always is.
        probs_BK = probs_BK.masked_fill(probs_BK.cumsum(dim=-1) - probs_BK >= top_p, 0.0)
    assert generator is not None
    # One number a row says how far along the sum of its probabilities its id lies; never as far as the end.
    wide = torch.float32 if probs_BK.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    sums_BK = probs_BK.cumsum(dim=-1, dtype=wide)
    shape, device = (len(sums_BK), 1), generator.device
    drawn_B1 = torch.rand(shape, generator=generator, dtype=wide, device=device).to(sums_BK.device)
    place_B1 = torch.searchsorted(sums_BK, drawn_B1 * (1 - torch.finfo(wide).eps) * sums_BK[:, -1:], right=True)
    place_B1 = place_B1.clamp(max=sums_BK.shape[-1] - 1)  # a row that is not finite has no place
    return (place_B1 if ids_BK is None else ids_BK.gather(-1, place_B1))[:, 0]


def _likeliest(probs_BV: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities and their ids, the largest first; at least as many as make up top_p."""
    if probs_BV.device.type == "cpu" and probs_BV.shape[-1] > NUCLEUS:
        probs_BK, ids_BK = probs_BV.topk(NUCLEUS, dim=-1)
        if bool((probs_BK.sum(dim=-1) > top_p + 1e-4).all()):  # else a sum of float32 may decide
            return probs_BK, ids_BK
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    return sorted_BV, order_BV


def in_cuda_graph(step: Step, generator: torch.Generator | None) -> Step:
    """The step as one CUDA graph, or as it is where that fails or gives other logits, with a warning."""
    state = None if generator is None else generator.get_state()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                expected_BV = step().logits_BV.clone()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if generator is not None and state is not None:
            generator.set_state(state)
            graph.register_generator_state(generator)
        # Other threads, as the one that pins batches, may go on meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            chosen = step()
        graph.replay()
        is_right = torch.allclose(chosen.logits_BV, expected_BV, rtol=1e-3, atol=1e-3, equal_nan=True)
        problem = "" if is_right else "it gives other logits"
    except RuntimeError as error:
        problem = one_line(error)
    if generator is not None and state is not None:
        generator.set_state(state)
    if problem:
        warnings.warn(f"generation runs without a CUDA graph, which failed: {problem}", stacklevel=3)
        return step

    def replay() -> Chosen:
        graph.replay()
        return chosen

    return replay


class _Decoder:
    """A model with its cache, step by step; a step that is repeated before `move_on` changes nothing."""

    def __init__(
        self,
        model: Transformer,
        ids_BS: Tensor,
        starts: Sequence[int],
        capacity: int,
        select: Callable[[Tensor], Tensor],
        stop_id: int | None,
    ) -> None:
        self.model, self.select, self.stop_id = model, select, stop_id
        self.cache = model.new_cache(len(ids_BS), capacity)
        self.stopped_B = torch.zeros(len(ids_BS), dtype=torch.bool, device=ids_BS.device)
        # The column of the cache in which each row begins; rows that begin together do so ever after.
        self.begins_B1 = ids_BS.new_zeros(len(ids_BS), 1) if min(starts) < max(starts) else None
        self.place_1 = torch.zeros(1, dtype=torch.long, device=ids_BS.device)
        self.inputs: list[Tensor | None] = []  # of a static step

    def begin(self, starts: Sequence[int]) -> None:
        self.cache.clear()
        if self.begins_B1 is not None:
            begins = torch.tensor(starts, dtype=self.begins_B1.dtype)[:, None] - min(starts)
            self.begins_B1.copy_(begins)

    def __call__(
        self,
        pending_BT: Tensor,
        embeddings_BTC: Tensor | None,
        allowed_BV: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Chosen:
        cache, num_new = self.cache, pending_BT.shape[1]
        is_new = cache.length == 0  # later the cache knows the memory
        positions = mask = None
        if self.begins_B1 is not None:
            num_keys = cache.length + num_new if cache.place_1 is None else cache.capacity
            places_BS = torch.arange(num_keys, device=pending_BT.device) - self.begins_B1
            new_BT = places_BS[:, -num_new:] if cache.place_1 is None else cache.place_1 - self.begins_B1
            positions, mask = new_BT.clamp(min=0), places_BS >= 0
        x_BTC = self.model.hidden(
            pending_BT if embeddings_BTC is None else None, embeddings=embeddings_BTC, positions=positions, mask=mask,
            cache=cache, memory=memory if is_new else None, memory_mask=memory_mask if is_new else None,
        )  # fmt: skip
        logits_BV = self.model.logits(x_BTC[:, -1]).float()
        low_B, high_B = logits_BV.aminmax(dim=-1)
        status_B = torch.where((high_B - low_B).isfinite(), 0, NOT_FINITE)
        if allowed_BV is not None:
            allowed_BV = allowed_BV.to(logits_BV.device).expand_as(logits_BV)
            stuck_B = ~allowed_BV.any(dim=-1)
            status_B |= torch.where(stuck_B & ~self.stopped_B, STUCK, 0)
            logits_BV = logits_BV.masked_fill(~(allowed_BV | stuck_B[:, None]), -torch.inf)
        next_B = self.select(logits_BV)
        if self.stop_id is not None:
            next_B = next_B.masked_fill(self.stopped_B, self.stop_id)
            status_B |= torch.where(next_B == self.stop_id, STOPPED, 0)
        return Chosen(next_B, logits_BV, status_B)

    def place(self, *inputs: Tensor | None) -> None:
        """Puts the inputs of a static step where it reads them."""
        if self.cache.place_1 is None:
            self.cache.place_1 = self.place_1.fill_(self.cache.length)
        if not self.inputs:
            self.inputs = [None if given is None else given.clone() for given in inputs]
        for place, given in zip(self.inputs, inputs, strict=True):
            if place is not None and given is not None:
                place.copy_(given)

    def at_fixed_addresses(self) -> Chosen:
        pending_B1, embeddings_B1C, allowed_BV = self.inputs
        assert pending_B1 is not None
        return self(pending_B1, embeddings_B1C, allowed_BV)

    def move_on(self, chosen: Chosen) -> None:
        if self.stop_id is not None:
            self.stopped_B.copy_((chosen.status_B & STOPPED) > 0)
        if self.cache.place_1 is not None:
            self.cache.place_1 += 1
            self.cache.length += 1


def _read_later(status_B: Tensor) -> Callable[[], list[int]]:
    if status_B.device.type != "cuda":
        return status_B.tolist
    host_B = torch.empty(status_B.shape, dtype=status_B.dtype, pin_memory=True)
    host_B.copy_(status_B, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(status_B.device))

    def read() -> list[int]:
        copied.synchronize()
        return host_B.tolist()

    return read


def _check(status: Sequence[int]) -> bool:
    """Whether every row has stopped."""
    if any(value & NOT_FINITE for value in status):
        remedy = "take an earlier save, or system.dtype=float32"
        raise DataError(f"the model gives logits that are not finite; {remedy}", code="not-finite")
    for row, value in enumerate(status):
        if value & STUCK:
            problem = f"`allowed` leaves no next id in row {row}"
            raise DataError(f"{problem}; let it allow one that ends it", code="no-next-id")
    return all(value & STOPPED for value in status)


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
