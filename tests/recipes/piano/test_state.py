"""If this fails, the loss forbids what was played, or the model is told of other keys than those that sound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data.store import Store
from rung.nn.generate import generate_steps
from rung.random import Draw
from rung.recipes.piano.config import Model, Sampling
from rung.recipes.piano.data import prepare
from rung.recipes.piano.grammar import NUM_EVENTS, SILENT, Follower, allowed, follow, start
from rung.recipes.piano.midi import write_midi
from rung.recipes.piano.model import KeysTransformer, PianoLoss, build_model
from rung.recipes.piano.notes import make
from rung.recipes.piano.rows import Augment, Performances, Records, TaskRows, sounding_after
from rung.recipes.piano.samples import Prompt, complete
from rung.recipes.piano.tasks import parse
from rung.recipes.piano.tokenizer import (
    CLS,
    EOGENAI,
    NUM_PITCHES,
    PAD,
    TIME,
    TIME_STEPS,
    TOKENIZER,
    VELOCITY,
    VOCAB_SIZE,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Performances with chords, repeated keys, and notes that sound on through many others."""
    folder = tmp_path_factory.mktemp("state")
    for number in range(8):
        rng = np.random.default_rng(number)
        start_s = np.cumsum(rng.choice([0.0, 0.01, 0.13, 0.4, 1.7], size=120))
        length_s = rng.choice([0.01, 0.2, 0.9, 30.0], size=120, p=[0.2, 0.4, 0.3, 0.1])
        pitches = rng.choice([21, 22, 60, 61, 64, 67, 107, 108], size=120)
        notes = make(start_s, start_s + length_s, pitches, rng.integers(1, 128, 120))
        (folder / "midi").mkdir(exist_ok=True)
        (folder / "midi" / f"{number}.mid").write_bytes(write_midi(notes))
    prepare(folder / "midi", folder / "store")
    return Store.open(folder / "store")


def records(store: Store, split: str = "train") -> Records:
    return Records(store, split, np.asarray(store.split(split)), "asap")


AUGMENTS = [Augment(), Augment((), 12), Augment((0.7, 1.4), 0), Augment((0.9, 1.1), 5)]


@pytest.mark.parametrize("augment", AUGMENTS, ids=str)
@pytest.mark.parametrize("more", [False, True], ids=["plain", "prefix, end and moving cuts"])
@pytest.mark.parametrize("context", [17, 96])
def test_no_target_of_a_performance_is_masked(store: Store, augment: Augment, more: bool, context: int) -> None:
    rows = Performances(records(store), context, augment, more, has_state=True, has_end=more, moves=more)
    loss = PianoLoss(build_model(Model(n_layer=1, n_head=1, n_embd=2, context_size=context), 0), num_given=2 * more)
    ids = np.arange(rows.num_rows)
    gathered = rows.gather(ids, Draw(3, 1, ids))
    tokens = torch.from_numpy(gathered["tokens"].astype(np.int64))
    state = follow(tokens[:, :-1], start(len(tokens), "cpu", torch.from_numpy(gathered["sounding"])))
    counts_BT = loss.weights(tokens) > 0
    assert tokens[:, 1:][counts_BT].max() < NUM_EVENTS
    can_BT = allowed(state, may_end=more).gather(2, tokens[:, 1:, None].clamp(max=NUM_EVENTS - 1))[:, :, 0]
    assert can_BT[counts_BT].all()
    assert counts_BT.sum() > 0.9 * sum(store.lengths[records(store).numbers])
    if not augment.speeds:
        assert int((tokens == EOGENAI).sum()) == more * len(records(store).numbers)


@pytest.mark.parametrize("augment", [None, Augment((0.9, 1.1), 5)], ids=str)
@pytest.mark.parametrize("has_prefix", [False, True])
@pytest.mark.parametrize("only_answers", [False, True])
def test_no_target_of_a_task_is_masked(
    store: Store, augment: Augment | None, has_prefix: bool, only_answers: bool
) -> None:
    rows = TaskRows([records(store)], parse("all"), 9, 120, has_prefix, augment)
    loss = PianoLoss(build_model(Model(n_layer=1, n_head=1, n_embd=2, context_size=120), 0), only_answers)
    ids = np.arange(min(rows.num_rows, 400))
    tokens = torch.from_numpy(rows.gather(ids, Draw(3, 0, ids))["tokens"].astype(np.int64))
    can = allowed(follow(tokens[:, :-1]), may_ask=True).gather(2, tokens[:, 1:, None])[:, :, 0]
    assert can[loss.weights(tokens) > 0].all()


def by_hand(ids: list[int]) -> tuple[dict[int, int], int]:
    """When each key that sounds was struck, and the time."""
    struck: dict[int, int] = {}
    clock = 0
    for id in ids:
        name = TOKENIZER.names[id]
        if name.startswith("NOTE_ON_"):
            struck[int(name[8:]) - 21] = clock
        elif name.startswith("NOTE_OFF_"):
            struck.pop(int(name[9:]) - 21, None)
        elif name.startswith("TIME_"):
            clock += int(name[5:])
        elif name in ("<CLS>", "<GENAI>", "<EOGENAI>") or name.startswith("<TASK"):
            struck = {}
    return struck, clock


IDS = st.lists(
    st.one_of(
        st.integers(2, TIME + len(TIME_STEPS) - 1),
        st.sampled_from([2 + 5, 2 + 88 + 5, 2 + 6, 2 + 88 + 6, TIME + 6, TIME + 6]),
        st.sampled_from([CLS, EOGENAI, TOKENIZER.ids["<COMPOSER_BACH>"], TOKENIZER.ids["<TASK_INFILL>"]]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60)
@given(IDS, st.data())
def test_keys_sound_as_long_as_counted_by_hand_whole_or_in_parts(ids: list[int], data: st.DataObject) -> None:
    ids_BT = torch.tensor([ids])
    state = follow(ids_BT)
    for place in range(len(ids)):
        struck, clock = by_hand(ids[: place + 1])
        wanted = torch.full((NUM_PITCHES,), SILENT)
        for key, at in struck.items():
            wanted[key] = clock - at
        assert torch.equal(state.age_BTK[0, place], wanted)
    cut = data.draw(st.integers(0, len(ids)))
    if 0 < cut < len(ids):
        first = follow(ids_BT[:, :cut])
        rest = follow(ids_BT[:, cut:], first.last)
        for whole, *parts in zip(state, first, rest):
            assert torch.equal(whole, torch.cat(parts, dim=1))


@pytest.mark.parametrize("shift", [0, 12])
def test_what_sounds_when_a_row_begins_is_known_from_its_record(store: Store, shift: int) -> None:
    """Rows of an eval set follow one another: what sounds after one is what sounds before the next."""
    rows = Performances(records(store), 40, Augment((), shift), False, has_state=True)
    ids = np.arange(rows.num_rows)
    gathered = rows.gather(ids, Draw(3, 1, ids))
    at_rest = Performances(records(store), 40, Augment(), False, has_state=True).gather(ids, Draw(3, 1, ids))
    tokens = torch.from_numpy(at_rest["tokens"].astype(np.int64))
    after = follow(tokens[:, :-1], start(len(ids), "cpu", torch.from_numpy(at_rest["sounding"]))).age_BTK[:, -1].numpy()
    num_sounding = 0
    for row in ids[1:]:
        if at_rest["tokens"][row, 0] == CLS:
            assert (gathered["sounding"][row] == SILENT).all()
            continue
        assert np.array_equal(at_rest["sounding"][row], after[row - 1])
        is_note = (at_rest["tokens"][row] >= 2) & (at_rest["tokens"][row] < 178)
        by = int(np.subtract(gathered["tokens"][row], at_rest["tokens"][row], dtype=np.int64)[is_note][0])
        keys = np.flatnonzero(at_rest["sounding"][row] >= 0)
        kept = keys[(keys + by >= 0) & (keys + by < NUM_PITCHES)]
        assert np.array_equal(np.flatnonzero(gathered["sounding"][row] >= 0), kept + by)
        assert np.array_equal(gathered["sounding"][row][kept + by], at_rest["sounding"][row][kept])
        num_sounding += len(keys)
    assert num_sounding > 100


def test_sounding_after_is_what_follow_says(store: Store) -> None:
    tokens = store.arrays["tokens"][: int(store.lengths[0])].astype(np.int64)
    ages = follow(torch.from_numpy(tokens[None])).age_BTK[0]
    for place in range(0, len(tokens), 7):
        assert np.array_equal(sounding_after(tokens[: place + 1]), ages[place].numpy())


def test_rows_cut_at_other_places_hold_each_token_as_often(store: Store) -> None:
    """The last row of a record has room; by a part of it all rows move, so the ends are always there."""
    still, moving = (Performances(records(store), 50, Augment(), False, has_end=True, moves=m) for m in (False, True))
    assert (still.num_rows, still.targets_per_row) == (moving.num_rows, moving.targets_per_row)
    assert still.fingerprint != moving.fingerprint
    ids = np.arange(still.num_rows)
    at_rest = still.gather(ids, Draw(0, 0, ids))["tokens"]
    seen, num_targets = set(), []
    for step in range(300):
        tokens = moving.gather(ids, Draw(0, step, ids))["tokens"]
        assert np.array_equal(tokens, moving.gather(ids, Draw(0, step, ids))["tokens"])
        assert (tokens == EOGENAI).sum() == (at_rest == EOGENAI).sum() == len(records(store).numbers)
        assert (tokens == CLS).sum() == (at_rest == CLS).sum()
        seen |= {tuple(row) for row in tokens[1:2].tolist()}
        num_targets.append((tokens[:, 1:] != PAD).sum())
    assert len(seen) > 5
    assert np.mean(num_targets) == pytest.approx((at_rest[:, 1:] != PAD).sum(), rel=0.01)


# The model


def keys_model(context: int = 32) -> KeysTransformer:
    model = build_model(
        Model(n_layer=2, n_head=2, n_embd=16, context_size=context, positions="rotary", sounding_keys=True), seed=1
    )
    assert isinstance(model, KeysTransformer)
    with torch.no_grad():
        model.keys.weight.mul_(20)  # so that what it is told matters
    return model


def melody_notes(num: int) -> np.ndarray:
    starts = np.arange(num) * 0.11
    return make(starts, starts + 0.35, 50 + np.arange(num) % 7, 66)


def melody(num: int) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[CLS], TOKENIZER.encode(melody_notes(num))]).astype(np.int64)[None])


def test_the_keys_change_nothing_else_of_the_draw() -> None:
    plain = build_model(Model(n_layer=2, n_head=2, n_embd=16, context_size=32, positions="rotary"), seed=1)
    ours = dict(keys_model().named_parameters())
    assert set(ours) - {name for name, _ in plain.named_parameters()} == {"keys.weight"}
    assert all(torch.equal(value, ours[name]) for name, value in plain.named_parameters())


def test_generation_gives_the_logits_of_a_whole_forward_also_after_the_window_has_moved() -> None:
    model, ids = keys_model(), melody(6)[:, :26]
    model.eval()
    follower = Follower(list(ids.numpy()))

    def embed(ids_BT: torch.Tensor, num: int) -> torch.Tensor:
        follower.update(ids_BT)
        return model.embed(ids_BT[:, -num:], follower.ages(num))

    no_end = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    no_end[VELOCITY : TIME + len(TIME_STEPS)] = True
    begin, seen = 0, ids
    for step in generate_steps(model, ids, 60, temperature=0, embed=embed, allowed=lambda _: no_end):
        if seen.shape[1] - begin > 32:
            begin = seen.shape[1] - 16
        ages = follow(seen).age_BTK  # of all tokens, also of those that have left the window
        whole = model(seen[:, begin:], age_BTK=ages[:, begin:])
        assert torch.allclose(step.logits_BV[:, no_end], whole[:, -1, no_end], atol=1e-5)
        seen = torch.cat([seen, step.ids_B[:, None]], dim=1)
    assert begin > 32
    assert (ages[0, -1] >= 0).any()  # keys that were struck before the window


def test_samples_with_keys_do_not_depend_on_what_shares_their_batch() -> None:
    model = keys_model()
    long, short = melody(9)[0].numpy(), melody(3)[0].numpy()
    sounding = np.full(NUM_PITCHES, SILENT)
    sounding[30] = 44
    prompts = [
        Prompt(ids, melody_notes(0), None, (), 0.0, "a melody", may_end=True, sounding=keys)
        for ids, keys in ((long, None), (short, None), (short, sounding))
    ]
    params = Sampling(num_tokens=50, temperature=0)
    together = complete(model, prompts, params, None)
    for prompt, made in zip(prompts, together):
        (alone,) = complete(model, [prompt], params, None)
        assert np.array_equal(alone.notes, made.notes)


def test_the_future_changes_nothing() -> None:
    model, ids = keys_model(64), melody(8)
    model.eval()
    other = ids.clone()
    other[:, 20:] = 2 + 40
    a, b = model(ids[:, :30]), model(other[:, :30])
    assert torch.equal(a[:, :20], b[:, :20])
    assert not torch.allclose(a[:, 20:], b[:, 20:])


def test_the_loss_with_the_grammar_is_that_among_what_can_come_next() -> None:
    model, ids = keys_model(64), melody(8)[:, :40]
    batch = {"tokens": ids, "sounding": torch.full((1, NUM_PITCHES), -1, dtype=torch.int16)}
    draw = Draw(0, 0, np.arange(1))
    loss = PianoLoss(model, has_grammar=True)(batch, draw)
    logits = model(ids[:, :-1])
    by_hand = 0.0
    for place in range(39):
        can = allowed(follow(ids[:, : place + 1]).last)[0, 0]
        shares = logits[0, place, :NUM_EVENTS][can].detach().log_softmax(0)
        by_hand -= float(shares[can.nonzero()[:, 0].tolist().index(int(ids[0, place + 1]))])
    assert loss.sum.item() == pytest.approx(by_hand, rel=1e-5)
    assert loss.sum.item() < PianoLoss(model)(batch, draw).sum.item()


def test_a_model_that_knows_nothing_guesses_among_what_can_come_next() -> None:
    model, ids = keys_model(64), melody(8)[:, :40]
    with torch.no_grad():
        model.norm.weight.zero_()
    loss = PianoLoss(model, has_grammar=True)({"tokens": ids}, Draw(0, 0, np.arange(1)))
    num_choices = allowed(follow(ids[:, :-1])).sum(dim=2)
    assert loss.sum.item() == pytest.approx(num_choices.log().sum().item(), rel=1e-5)
    assert num_choices[0, 1].item() == 88  # after a velocity


def test_a_row_that_ends_early_gives_no_gradient_that_is_not_a_number() -> None:
    model = keys_model(16)
    tokens = torch.tensor([[CLS, EOGENAI, PAD, PAD, PAD]])
    loss = PianoLoss(model, has_grammar=True, has_end=True)({"tokens": tokens}, Draw(0, 0, np.arange(1)))
    loss.sum.backward()
    assert float(loss.count) == 1
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
