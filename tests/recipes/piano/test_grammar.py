"""If this fails, a sample has notes that never end, or the grammar forbids music that a model has learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.nn.generate import choose, generate
from rung.nn.transformer import Shape, Transformer
from rung.recipes.piano.grammar import Grammar
from rung.recipes.piano.tokenizer import (
    CLASS_OF_ID,
    CLASSES,
    CLS,
    EOGENAI,
    GENAI,
    NOTE_OFF,
    NOTE_ON,
    OFF,
    ON,
    PLACE,
    TIME,
    TOKENIZER,
    VELOCITY,
    VOCAB_SIZE,
)
from tests.recipes.piano.tunes import from_units

START = np.array([CLS], dtype=np.uint16)


NOTES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 20), st.integers(0, 2000)),
        st.one_of(st.integers(0, 5), st.integers(0, 300)),
        st.one_of(st.integers(60, 62), st.integers(21, 108)),
        st.integers(0, 127),
    ),
    max_size=20,
).map(from_units)


def babble(
    prompts: list[np.ndarray], budgets: list[int], may_end: bool, likes: list[float], temperature: float, seed: int
) -> list[np.ndarray]:
    """What random logits write under the grammar; `likes` makes classes of tokens more or less likely."""
    generator = torch.Generator().manual_seed(seed)
    liking_V = torch.tensor(likes)[torch.from_numpy(CLASS_OF_ID.astype(np.int64))]
    grammar = Grammar(prompts, budgets, [may_end] * len(prompts))
    ids = torch.full((len(prompts), 1), CLS)  # it has seen the prompts; only what follows matters
    for _ in range(max(budgets)):
        logits = torch.randn(len(prompts), VOCAB_SIZE, generator=generator) * 3 + liking_V
        allowed = grammar(ids)
        assert allowed.any(dim=1).all()
        chosen = choose(logits.masked_fill(~allowed, -torch.inf), temperature, None, None, generator)
        ids = torch.cat([ids, chosen[:, None]], dim=1)
    return [row[: budget + 1][1:] for row, budget in zip(ids.numpy(), budgets, strict=True)]


def until_end(ids: np.ndarray) -> np.ndarray:
    ends = np.flatnonzero(ids == EOGENAI)
    assert not len(ends) or (ids[ends[0] :] == EOGENAI).all(), "after the end comes only the end"
    return ids[: ends[0]] if len(ends) else ids


LIKES = st.lists(st.sampled_from([-8.0, 0.0, 8.0]), min_size=len(CLASSES), max_size=len(CLASSES))


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=4),
    st.booleans(),
    LIKES,
    st.sampled_from([0, 0.5, 1, 3]),
    st.integers(0, 99),
)
def test_random_logits_write_what_the_encoder_could_have_written(
    budgets: list[int], may_end: bool, likes: list[float], temperature: float, seed: int
) -> None:
    for ids in babble([START] * len(budgets), budgets, may_end, likes, temperature, seed):
        if may_end:
            assert ids[-1] == EOGENAI, "an end that was asked for comes within the budget"
        events = until_end(ids)
        assert np.array_equal(TOKENIZER.encode(TOKENIZER.decode(events)), events)
        classes = CLASS_OF_ID[events]
        assert sorted(events[classes == ON] - NOTE_ON) == sorted(events[classes == OFF] - NOTE_OFF)


@settings(max_examples=40)
@given(NOTES, st.data(), st.integers(110, 160), LIKES, st.integers(0, 99))
def test_a_prompt_cut_anywhere_is_taken_up_where_it_stands(
    notes: np.ndarray, data: st.DataObject, budget: int, likes: list[float], seed: int
) -> None:
    whole = TOKENIZER.encode(notes)
    prompt = whole[: data.draw(st.integers(0, len(whole)))]
    (made,) = babble([np.concatenate([START, prompt])], [budget], False, likes, 1.0, seed)
    ids = np.concatenate([prompt, until_end(made)])
    assert np.array_equal(TOKENIZER.encode(TOKENIZER.decode(ids)), ids)


@settings(max_examples=40)
@given(NOTES, st.booleans())
def test_all_that_the_encoder_writes_is_allowed_with_a_budget_of_just_its_length(
    notes: np.ndarray, may_end: bool
) -> None:
    events = TOKENIZER.encode(notes).astype(np.int64)
    ids = np.concatenate([[CLS], events, [EOGENAI] * may_end]).astype(np.int64)
    grammar = Grammar([START], [len(ids) - 1], [may_end])
    for place in range(1, len(ids)):
        assert grammar(torch.from_numpy(ids[None, :place]))[0, ids[place]], TOKENIZER.names[int(ids[place])]


def allowed_after(*names: str, budget: int = 50, may_end: bool = True) -> set[str]:
    ids = np.array([CLS, GENAI, *(TOKENIZER.ids[name] for name in names)])
    mask = Grammar([ids], [budget], [may_end])(torch.from_numpy(ids[None]))[0]
    return {TOKENIZER.names[int(id)] for id in mask.nonzero()}


def kinds(names: set[str]) -> set[str]:
    return {CLASSES[CLASS_OF_ID[TOKENIZER.ids[name]]] for name in names}


def test_the_rules_one_by_one() -> None:
    assert kinds(allowed_after()) == {"velocity", "time", "special"}
    assert kinds(allowed_after(may_end=False)) == {"velocity", "time"}
    after_velocity = allowed_after("VELOCITY_9")
    assert kinds(after_velocity) == {"note_on"}
    assert len(after_velocity) == 88
    struck = ("VELOCITY_9", "NOTE_ON_60", "VELOCITY_9", "NOTE_ON_64")
    assert kinds(allowed_after(*struck)) == {"velocity", "time"}  # what begins does not end in the same moment
    upwards = allowed_after(*struck, "VELOCITY_9")
    assert upwards == {f"NOTE_ON_{pitch}" for pitch in range(65, 109)}
    later = allowed_after(*struck, "TIME_8")
    assert {"NOTE_OFF_60", "NOTE_OFF_64"} == {name for name in later if "OFF" in name}
    assert {name for name in later if "TIME" in name} == {"TIME_1", "TIME_2", "TIME_4"}
    assert "TIME_64" in allowed_after(*struck, "TIME_64")
    ended = allowed_after(*struck, "TIME_8", "NOTE_OFF_64")
    assert "NOTE_OFF_60" not in ended
    assert "<EOGENAI>" not in ended
    assert "NOTE_ON_60" not in allowed_after(*struck, "TIME_8", "VELOCITY_9")
    assert "NOTE_ON_64" in allowed_after(*struck, "TIME_8", "NOTE_OFF_64", "VELOCITY_9")
    quiet = (*struck, "TIME_8", "NOTE_OFF_60", "NOTE_OFF_64")
    assert "<EOGENAI>" in allowed_after(*quiet)
    assert "<EOGENAI>" not in allowed_after(*quiet, "TIME_1")  # a wait for nothing
    assert kinds(allowed_after("VELOCITY_9", "NOTE_ON_108")) == {"time"}  # no key above it


def test_the_budget_brings_notes_to_an_end() -> None:
    struck = ("VELOCITY_9", "NOTE_ON_60", "VELOCITY_9", "NOTE_ON_64")
    assert kinds(allowed_after(*struck, budget=4)) == {"time"}  # a step, two ends, the end
    assert allowed_after(*struck, "TIME_1", budget=3) == {"NOTE_OFF_60"}
    assert allowed_after(budget=5) >= {"VELOCITY_0", "<EOGENAI>"}
    assert allowed_after(budget=4) == {"<EOGENAI>"}
    assert allowed_after(budget=3, may_end=False) == {"<EOGENAI>"}  # no note fits: nothing else is left


def test_a_row_that_can_go_nowhere_is_ended() -> None:
    sounding = [name for pitch in range(40, 60) for name in ("VELOCITY_9", f"NOTE_ON_{pitch}")]
    assert allowed_after(*sounding, budget=5, may_end=False) == {"<EOGENAI>"}
    assert allowed_after("VELOCITY_9", "NOTE_ON_108", "VELOCITY_9") == {"<EOGENAI>"}  # no encoder wrote that


def test_a_row_that_was_cut_is_not_one_that_ended() -> None:
    grammar = Grammar([START, START], [40, 40], [True, True])
    ids = torch.full((2, 1), CLS)
    for _ in range(40):
        allowed = grammar(ids)
        ended = torch.where(allowed[0, EOGENAI], EOGENAI, int(allowed[0].nonzero()[0]))
        going = int((allowed[1] & (torch.arange(VOCAB_SIZE) != EOGENAI)).long().argmax())
        ids = torch.cat([ids, torch.tensor([[int(ended)], [going or EOGENAI]])], dim=1)
    assert grammar.is_cut_B.tolist() == [False, True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_fits_generate(temperature: float) -> None:
    model = Transformer(Shape(vocab_size=VOCAB_SIZE, context_size=32, n_layer=1, n_head=2, n_embd=16), seed=0)
    prompts = [np.array([CLS]), np.array([CLS, VELOCITY + 3, NOTE_ON + 40, TIME + 2])]
    ids = torch.tensor([[0, 0, 0, CLS], prompts[1].tolist()])
    made = generate(
        model, ids, 90, lengths=[1, 4], temperature=temperature, generator=torch.Generator().manual_seed(0),
        stop_id=EOGENAI, allowed=Grammar(prompts, [90, 90], [False, True]),
    ).numpy()  # fmt: skip
    for row, prompt in zip(made, prompts, strict=True):
        events = np.concatenate([prompt[1:], until_end(row[4:])])
        assert np.array_equal(TOKENIZER.encode(TOKENIZER.decode(events)), events)
        assert (events < PLACE).all()
        assert (events >= NOTE_ON).all()
    assert len(until_end(made[0, 4:])) > 80
