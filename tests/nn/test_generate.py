"""If this fails, a sample is not what the model says, or taking one changes the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rung.nn.generate import Execution, choose, generate, generate_steps
from rung.nn.pack import PackedProjection, packed
from rung.nn.transformer import Shape
from tests.errors import raises_code


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def test_greedy_equals_a_loop_of_full_forwards(variant: Shape, make: Any) -> None:
    model, prompt, memory = make.model(variant), make.ids(variant, length=3), make.memory(variant)
    ids = prompt
    for _ in range(10):
        ids = torch.cat([ids, model(ids, memory=memory)[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(model, prompt, 10, temperature=0, memory=memory), ids)


@torch.no_grad()
@pytest.mark.parametrize("length", [3, 24, 40])
def test_a_full_context_goes_on_from_its_last_half(make: Any, length: int) -> None:
    model = make.model(Shape(**make.small))
    ids = prompt = make.ids(model.shape, length=length)
    start = max(0, length - 24)
    for _ in range(45):
        if ids.shape[1] - start > 24:
            start = ids.shape[1] - 12
        ids = torch.cat([ids, model(ids[:, start:])[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(model, prompt, 45, temperature=0), ids)


@torch.no_grad()
@pytest.mark.parametrize("num_new", [10, 60])  # 60: every context fills up, each at its own time
def test_rows_of_different_lengths_are_what_they_are_alone(variant: Shape, make: Any, num_new: int) -> None:
    model, lengths = make.model(variant), [9, 1, 30, 14, 30]  # some longer than the context of 24
    memory = make.memory(variant, num_rows=5)
    ids = make.ids(variant, num_rows=5, length=30)
    made = generate(model, ids, num_new, temperature=0, lengths=lengths, memory=memory)
    assert torch.equal(made[:, :30], ids)
    for row, length in enumerate(lengths):
        own = None if memory is None else memory[row : row + 1]
        alone = generate(model, ids[row : row + 1, -length:], num_new, temperature=0, memory=own)
        assert torch.equal(made[row, -num_new:], alone[0, -num_new:])


@torch.no_grad()
def test_what_lies_before_a_row_is_not_seen(make: Any) -> None:
    model = make.model(Shape(**make.small))
    ids = make.ids(model.shape, length=12)
    other = ids.clone()
    other[0, :7] = 0
    first, second = (generate(model, rows, 40, temperature=0, lengths=[5, 12]) for rows in (ids, other))
    assert torch.equal(first[:, 12:], second[:, 12:])


@torch.no_grad()
def test_embeddings_of_ones_own_replace_those_of_the_ids(make: Any) -> None:
    """Each id is embedded as the sum of all ids so far, in and beyond a full context, at its place alone."""
    model = make.model(Shape(**make.small))
    asked = []

    def embed(ids_BT: torch.Tensor, num_new: int) -> torch.Tensor:
        asked.append(num_new)
        return model.tokens(ids_BT).cumsum(1)[:, -num_new:]

    prompt = make.ids(model.shape, num_rows=2, length=5)
    ids, start = prompt, 0
    for _ in range(30):
        if ids.shape[1] - start > 24:
            start = ids.shape[1] - 12
        embeddings = model.tokens(ids).cumsum(1)[:, start:]
        ids = torch.cat([ids, model(embeddings=embeddings)[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(model, prompt, 30, temperature=0, embed=embed), ids)
    assert asked == [5, *[1] * 19, 12, *[1] * 9]


@torch.no_grad()
def test_steps_tell_what_each_id_was_chosen_from(make: Any) -> None:
    model = make.model(Shape(**make.small))
    prompt = make.ids(model.shape, length=3)
    steps = list(generate_steps(model, prompt, 8, temperature=0))
    ids = torch.cat([prompt, *[step.ids_B[:, None] for step in steps]], 1)
    assert torch.equal(ids, generate(model, prompt, 8, temperature=0))
    torch.testing.assert_close(torch.stack([step.logits_BV for step in steps], 1), model(ids[:, :-1])[:, 2:])


@pytest.mark.parametrize("lengths", [[3], [0, 4], [5, 4], []])
def test_lengths_that_the_prompts_do_not_have_are_refused(make: Any, lengths: list[int]) -> None:
    model = make.model(Shape(**make.small))
    with raises_code("bad-value"):
        generate(model, make.ids(model.shape, length=4), 1, temperature=0, lengths=lengths)


def test_only_the_generator_that_was_given_is_used(make: Any) -> None:
    model = make.model(Shape(**make.small | {"dropout": 0.3})).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    prompt, state = make.ids(model.shape, length=2), torch.get_rng_state()
    first = generate(model, prompt, 15, temperature=1.0, generator=seeded(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(first, generate(model, prompt, 15, temperature=1.0, generator=seeded(1)))
    assert not torch.equal(first, generate(model, prompt, 15, temperature=1.0, generator=seeded(2)))
    assert torch.equal(first[:, :2], prompt)


def test_generation_ends_with_the_stop_id(make: Any) -> None:
    model = make.model(Shape(**make.small))
    free = generate(model, make.ids(model.shape, length=2), 20, temperature=1.0, generator=seeded(3))
    stop = int(free[0, 6])
    ids = generate(model, free[:, :2], 20, temperature=1.0, generator=seeded(3), stop_id=stop)
    for row, before in zip(ids, free, strict=True):
        places = (row[2:] == stop).nonzero()
        end = int(places[0]) + 2 if len(places) else len(row)
        assert torch.equal(row[:end], before[:end])
        assert (row[end:] == stop).all()
    first = generate(model, free[:1, :2], 1, temperature=0)[0, 2]
    alone = generate(model, free[:1, :2], 20, temperature=0, stop_id=int(first))
    assert alone.shape == (1, 3)


def test_a_grammar_decides_what_may_come_next(make: Any) -> None:
    model, calls = make.model(Shape(**make.small)), []

    def alternate(ids: torch.Tensor) -> torch.Tensor:  # an even id after an odd one, and the other way round
        calls.append(ids.shape[1])
        return (torch.arange(31) % 2)[None] != ids[:, -1:] % 2

    ids = generate(model, make.ids(model.shape, length=4), 12, temperature=1.5, generator=seeded(0), allowed=alternate)
    parity = ids[:, 3:] % 2
    assert (parity[:, 1:] != parity[:, :-1]).all()
    assert calls == list(range(4, 16))
    one = torch.arange(31) == 5
    assert (generate(model, ids, 3, temperature=0, allowed=lambda _: one)[:, -3:] == 5).all()
    with raises_code("no-next-id") as caught:
        generate(model, ids, 1, temperature=0, allowed=lambda _: one & ~one)
    assert "row 0" in str(caught.value)


def test_draws_follow_the_distribution_cut_by_top_k_and_top_p() -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    logits = probs.log().expand(20000, 5)

    def shares(temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> torch.Tensor:
        drawn = choose(logits, temperature, top_k, top_p, seeded(0))
        return torch.bincount(drawn, minlength=5) / len(drawn)

    torch.testing.assert_close(shares(), probs, atol=0.02, rtol=0)
    torch.testing.assert_close(shares(0.5), probs**2 / (probs**2).sum(), atol=0.02, rtol=0)
    torch.testing.assert_close(shares(top_k=2), torch.tensor([4 / 7, 3 / 7, 0, 0, 0]), atol=0.02, rtol=0)
    torch.testing.assert_close(shares(top_p=0.75), torch.tensor([4, 3, 2, 0, 0]) / 9, atol=0.02, rtol=0)
    assert shares(top_p=1e-6)[0] == 1  # at least the likeliest
    assert shares(top_k=99)[4] > 0


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_no_temperature_is_too_low(temperature: float) -> None:
    logits = torch.tensor([[80.0, -3.0, 81.0], [-2.0, -4.0, -torch.inf]])
    assert choose(logits, temperature, None, None, seeded(0)).tolist() == [2, 0]


@pytest.mark.parametrize("top_k", [1, 3])
def test_top_k_is_k_also_among_equals(top_k: int) -> None:
    """Logits in bfloat16 are often equal."""
    drawn = choose(torch.zeros(500, 9), 1.0, top_k, None, seeded(0))
    assert len(drawn.unique()) == top_k


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_weights_are_told_in_a_sentence(make: Any, temperature: float) -> None:
    model = make.model(Shape(**make.small))
    torch.nn.init.constant_(model.norm.weight, torch.nan)
    with raises_code("not-finite"):
        generate(model, make.ids(model.shape, length=4), 1, temperature=temperature, generator=seeded(0))


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"temperature": -1.0}, "bad-value"), ({"temperature": 1.0}, "missing-option"),
        ({"temperature": 0, "top_k": 0}, "bad-value"), ({"temperature": 0, "top_p": 1.5}, "bad-value"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(make: Any, settings: dict[str, Any], code: str) -> None:
    model = make.model(Shape(**make.small))
    with raises_code(code):
        generate(model, make.ids(model.shape), 1, **settings)


def test_an_empty_prompt_is_refused(make: Any) -> None:
    model = make.model(Shape(**make.small))
    with raises_code("bad-shape"):
        generate(model, torch.zeros(1, 0, dtype=torch.long), 1, temperature=0)


def traced(step: Any, generator: torch.Generator | None) -> Any:
    """What a CUDA graph does, on any device: the operations of one call, on the tensors of that call, again."""
    graph = make_fx(lambda _: step())(torch.zeros(1))
    outputs = step()

    def replay() -> Any:
        for place, value in zip(outputs, graph(torch.zeros(1)), strict=True):
            place.copy_(value)
        return outputs

    return replay


@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_captured_step_gives_what_plain_steps_give(variant: Shape, make: Any, is_ragged: bool) -> None:
    """Also after a context was full, when the cache begins anew at the addresses that were captured."""
    model, memory = make.model(variant), make.memory(variant, num_rows=3)
    ids, lengths = make.ids(variant, num_rows=3, length=30), [9, 1, 30] if is_ragged else [5, 5, 5]
    mask = None if memory is None else torch.arange(7) < torch.tensor([[7], [0], [3]])

    def even(ids_BT: torch.Tensor) -> torch.Tensor:
        return (torch.arange(31) + ids_BT[:, -1:]) % 3 > 0

    for settings in ({}, {"allowed": even, "embed": lambda ids_BT, n: 2 * model.tokens(ids_BT[:, -n:])}):
        plain, captured = (
            generate(
                model, ids, 30, temperature=0, lengths=lengths, memory=memory, memory_mask=mask, stop_id=3,
                execution=execution, **settings,
            )
            for execution in (Execution(), Execution(is_static=True, capture=traced))
        )  # fmt: skip
        assert torch.equal(plain, captured)


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.8}])
def test_static_steps_draw_what_plain_steps_draw(variant: Shape, make: Any, settings: dict[str, Any]) -> None:
    model, ids, memory = make.model(variant), make.ids(variant, length=4), make.memory(variant)
    plain, static = (
        generate(model, ids, 40, generator=seeded(1), memory=memory, execution=execution, **settings)
        for execution in (Execution(), Execution(is_static=True))
    )
    assert torch.equal(plain, static)


@torch.no_grad()
@pytest.mark.parametrize("execution", [Execution(), Execution(True, 3)])
def test_ids_are_drawn_from_the_logits_of_a_full_forward(variant: Shape, make: Any, execution: Execution) -> None:
    model, ids, memory = make.model(variant), make.ids(variant, length=4), make.memory(variant)
    made = generate(model, ids, 18, temperature=0.8, top_k=9, generator=seeded(1), memory=memory, execution=execution)
    generator = seeded(1)
    for _ in range(18):
        next_B = choose(model(ids, memory=memory)[:, -1], 0.8, 9, None, generator)
        ids = torch.cat([ids, next_B[:, None]], 1)
    assert torch.equal(made, ids)


@pytest.mark.parametrize("num_ahead", [0, 1, 5])
def test_a_step_that_is_not_finite_is_never_given(make: Any, num_ahead: int) -> None:
    """However late the host looks: the steps before it come, and then the error."""
    model, made = make.model(Shape(**make.small)), []

    def embed(ids_BT: torch.Tensor, num_new: int) -> torch.Tensor:
        return model.tokens(ids_BT[:, -num_new:]) * (torch.nan if ids_BT.shape[1] == 7 else 1.0)

    execution = Execution(num_ahead=num_ahead)
    with raises_code("not-finite"):
        for step in generate_steps(model, make.ids(model.shape, length=4), 20, temperature=0, embed=embed,
                                   execution=execution):  # fmt: skip
            made.append(step.ids_B.clone())
    assert len(made) == 3


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_steps_after_the_last_stop_are_not_given(make: Any, num_ahead: int) -> None:
    model = make.model(Shape(**make.small))
    prompt = make.ids(model.shape, num_rows=1, length=2)
    free = generate(model, prompt, 20, temperature=0)[0, 2:].tolist()
    stop = free[4]
    made = generate(model, prompt, 20, temperature=0, stop_id=stop, execution=Execution(num_ahead=num_ahead))
    assert made[0, 2:].tolist() == free[: free.index(stop) + 1]


@torch.no_grad()
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_packed_layers_compute_the_same(variant: Shape, make: Any, num_rows: int) -> None:
    model, memory = make.model(variant), make.memory(variant, num_rows=num_rows)
    ids = make.ids(variant, num_rows=num_rows, length=6)
    twin = packed(model, num_rows, 1000)
    assert twin is not model
    assert packed(model, num_rows, 3) is model
    assert isinstance(twin.head, PackedProjection)
    kinds = {type(module).__name__ for module in twin.modules()}
    assert "Projection" not in kinds
    assert not any(isinstance(module, PackedProjection) for module in model.modules())
    for new in (ids, ids[:, :1]):
        torch.testing.assert_close(twin(new, memory=memory), model(new, memory=memory))


def test_likely_ids_are_found_without_sorting_all() -> None:
    """A row whose nucleus lies among the likeliest, and one whose does not, alone and together."""
    logits = torch.stack([torch.linspace(0, 40, 5000), torch.linspace(0, 0.1, 5000)])
    counts = []
    for rows in (logits[:1], logits[1:], logits):
        drawn = choose(rows.repeat(300, 1), 1.0, None, 0.5, seeded(0))
        counts.append([int(drawn[row :: len(rows)].min()) for row in range(len(rows))])
    sharp, flat = counts[2]
    assert sharp >= 4900  # e^(-40/5000 n) = 1/2 at n = 87
    assert 2400 < flat < 2700
    assert counts[0][0] >= 4900
    assert 2400 < counts[1][0] < 2700
