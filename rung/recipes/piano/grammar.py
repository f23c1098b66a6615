"""What the tokens of a row say of the next one: which keys sound and for how long, and which tokens the encoder could
write.

`follow` and `allowed` are functions of all tokens of a row at once: the same for the loss, an eval and generation,
where a `Follower` continues from what it has seen. `Grammar` adds what a budget asks for when sampling: every note that
the model begins also ends within it. A token is allowed only if the shortest way to the end (the velocity's note, one
time step, a NOTE_OFF for each sounding key, the end token) still fits after it. A row that cannot continue, because no
further note fits or because its prompt leaves more keys sounding than the budget can end, is ended with <EOGENAI> even
where no end was asked for.

Shapes: B rows, K keys of the piano, P powers of two (the time steps), T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rung.recipes.piano import tokenizer as tok

NUM_EVENTS = tok.EOGENAI + 1  # ids of music and of its end
LONGEST = len(tok.TIME_STEPS) - 1  # the power that may repeat
SILENT = -1  # the age of a key that does not sound
OLDEST = 1 << 30  # units; the clock of a row begins here, so that what was struck before it has a time too
# Tokens that leave what sounds as it is: padding before a prompt, and the prefix before a row that begins mid-piece.
NEUTRAL = (tok.PAD, *(id for id in range(tok.PLACE, tok.PLACE + len(tok.SPECIALS))
                      if tok.TOKENIZER.names[id].startswith(("<DATASET_", "<COMPOSER_"))))  # fmt: skip
LAST_NEUTRAL = tok.EOGENAI + len(tok.DATASETS) + len(tok.COMPOSERS)
assert (tok.PAD, *range(tok.EOGENAI + 1, LAST_NEUTRAL + 1)) == NEUTRAL  # one range: no table has to go to a device


class State(NamedTuple):
    """What is known after each of T tokens."""

    age_BTK: Tensor  # units since each key was struck; SILENT where it does not sound
    last_on_BT: Tensor  # the key that began last at this moment; -1 = none
    last_off_BT: Tensor  # the key that ended last
    most_wait_BT: Tensor  # the largest power that may come next
    is_loud_BT: Tensor  # a velocity wants its note
    has_waited_BT: Tensor  # a time step wants its event
    is_answer_BT: Tensor  # <GENAI> came before

    @property
    def last(self) -> State:
        return State(*(value[:, -1:] for value in self))


def start(num_rows: int, device: torch.device | str, age_BK: Tensor | None = None) -> State:
    """The state before a row (T = 1), in which nothing sounds unless `age_BK` says so."""
    if age_BK is None:
        age_BK = torch.full((num_rows, tok.NUM_PITCHES), SILENT, device=device)
    none_B1 = torch.full((num_rows, 1), -1, device=device)
    no_B1 = torch.zeros((num_rows, 1), dtype=torch.bool, device=device)
    return State(age_BK.long()[:, None], none_B1, none_B1, torch.full_like(none_B1, LONGEST), no_B1, no_B1, no_B1)


def follow(ids_BT: Tensor, before: State | None = None) -> State:
    """The states after each of these ids; `before` (T = 1) is that after those that came before them.

    A special token begins anew: nothing sounds.
    """
    device, (num_rows, num_ids) = ids_BT.device, ids_BT.shape
    before = start(num_rows, device) if before is None else before
    ids_BT = ids_BT.long()
    is_on_BT = (ids_BT >= tok.NOTE_ON) & (ids_BT < tok.NOTE_OFF)
    is_off_BT = (ids_BT >= tok.NOTE_OFF) & (ids_BT < tok.VELOCITY)
    is_wait_BT = (ids_BT >= tok.TIME) & (ids_BT < tok.PLACE)
    is_special_BT = (ids_BT < tok.NOTE_ON) | (ids_BT >= tok.PLACE)
    is_neutral_BT = (ids_BT == tok.PAD) | ((ids_BT > tok.EOGENAI) & (ids_BT <= LAST_NEUTRAL))
    clears_BT = is_special_BT & ~is_neutral_BT
    is_new_BT = is_wait_BT | is_special_BT
    key_BT = torch.where(is_on_BT, ids_BT - tok.NOTE_ON, ids_BT - tok.NOTE_OFF).clamp(0, tok.NUM_PITCHES - 1)
    power_BT = (ids_BT - tok.TIME).clamp(0, LONGEST)
    clock_BT = OLDEST + torch.where(is_wait_BT, 1 << power_BT, 0).cumsum(dim=1)

    # The last event of each key, as one number: its place, its time, and whether the key has sounded since.
    places_T = torch.arange(1, num_ids + 1, device=device)
    moment_BT = (places_T << 33) + (clock_BT << 1)
    code_BT = torch.where(is_on_BT | is_off_BT, moment_BT + is_on_BT, 0)
    event_BTK = torch.where(clears_BT, moment_BT, 0)[:, :, None].repeat(1, 1, tok.NUM_PITCHES)
    event_BTK.scatter_reduce_(2, key_BT[:, :, None], code_BT[:, :, None], "amax")
    age_B1K = before.age_BTK
    before_B1K = torch.where(age_B1K < 0, 0, ((OLDEST - age_B1K) << 1) + 1)
    event_BTK[:, :1] = torch.maximum(event_BTK[:, :1], before_B1K)
    event_BTK = event_BTK.cummax(dim=1).values
    age_BTK = clock_BT[:, :, None] - ((event_BTK >> 1) & ((1 << 32) - 1))
    age_BTK = torch.where(event_BTK & 1 == 1, age_BTK, SILENT)

    def last_key(is_event_BT: Tensor, key_B1: Tensor) -> Tensor:
        """The key of the last such event, unless time has passed since."""
        events_BT = torch.where(is_event_BT, places_T, 0).cummax(dim=1).values
        resets_BT = torch.where(is_new_BT, places_T, 0).cummax(dim=1).values
        known_BT = torch.cat([key_B1, key_BT], dim=1).gather(1, events_BT)
        return torch.where((events_BT > resets_BT) | (resets_BT == 0), known_BT, -1)

    below_BT = torch.where(power_BT == LONGEST, LONGEST, power_BT - 1)
    return State(
        age_BTK,
        last_key(is_on_BT, before.last_on_BT),
        last_key(is_off_BT, before.last_off_BT),
        torch.where(is_wait_BT, below_BT, LONGEST),
        (ids_BT >= tok.VELOCITY) & (ids_BT < tok.TIME),
        is_wait_BT,
        ((ids_BT == tok.GENAI).cumsum(dim=1) > 0) | before.is_answer_BT,
    )


def allowed(state: State, may_end: bool = False, may_ask: bool = False) -> Tensor:
    """(B, T, V): what the encoder could write after each token.

    `may_end`: <EOGENAI> can come wherever nothing sounds. `may_ask`: rows of tasks, whose question has special tokens;
    without it V is NUM_EVENTS, as no later id can come.
    """
    sounds_BTK, is_loud_BT1 = state.age_BTK >= 0, state.is_loud_BT[:, :, None]
    keys_K = torch.arange(tok.NUM_PITCHES, device=sounds_BTK.device)
    is_free_BTK = ~sounds_BTK & (keys_K > state.last_on_BT[:, :, None])
    can_off_BT1 = ~is_loud_BT1 & (state.last_on_BT < 0)[:, :, None]  # ends come before beginnings, and never of these
    is_quiet_BT1 = ~is_loud_BT1 & ~state.has_waited_BT[:, :, None] & ~sounds_BTK.any(dim=2, keepdim=True)
    can_ask_BT1 = is_quiet_BT1 & ~state.is_answer_BT[:, :, None] & may_ask
    can_end_BT1 = is_quiet_BT1 & (may_end | (state.is_answer_BT[:, :, None] & may_ask))
    powers_P = torch.arange(len(tok.TIME_STEPS), device=sounds_BTK.device)
    parts = [
        torch.zeros_like(can_ask_BT1),  # padding
        can_ask_BT1,
        is_free_BTK & is_loud_BT1,
        sounds_BTK & can_off_BT1 & (keys_K > state.last_off_BT[:, :, None]),
        (~is_loud_BT1 & is_free_BTK.any(dim=2, keepdim=True)).expand(-1, -1, tok.NUM_VELOCITIES),
        ~is_loud_BT1 & (powers_P <= state.most_wait_BT[:, :, None]),
        can_ask_BT1,  # <GENAI>
        can_end_BT1,
    ]
    if may_ask:
        parts.append(can_ask_BT1.expand(-1, -1, tok.VOCAB_SIZE - NUM_EVENTS))
    return torch.cat(parts, dim=2)


class Follower:
    """The states of one call of generation, as its ids grow.

    `prompts` are the ids that each row begins with, `age_BK` is what sounds before them.
    """

    def __init__(
        self, prompts: Sequence[np.ndarray], device: torch.device | str = "cpu", age_BK: Tensor | None = None
    ) -> None:
        ids_BT = torch.from_numpy(left_padded(prompts)).to(device)
        before = start(len(prompts), device, age_BK)
        state = follow(ids_BT, before) if ids_BT.shape[1] else before
        self.last, self._ages = state.last, [state.age_BTK]
        self._num_followed: int | None = None  # places of the ids of the call

    def update(self, ids_BT: Tensor) -> State:
        """The state after all these ids (T = 1); the first ones it is given are the prompts."""
        if self._num_followed is None:
            self._num_followed = ids_BT.shape[1]
        if ids_BT.shape[1] > self._num_followed:
            state = follow(ids_BT[:, self._num_followed :], self.last)
            self._ages.append(state.age_BTK)
            self.last, self._num_followed = state.last, ids_BT.shape[1]
        return self.last

    def ages(self, num: int) -> Tensor:
        """(B, num, K): of the last so many places."""
        if num > self._ages[-1].shape[1]:
            self._ages = [torch.cat(self._ages, dim=1)]
        return self._ages[-1][:, -num:]


class Grammar:
    """`allowed` of rung.nn.generate, for one call of it; follows all rows at once, on the model's device.

    `budgets` are the tokens that each row may be given, `may_end` says whether it can end before, with <EOGENAI>. What
    the prompts leave sounding may be ended. A `follower` of the same prompts may be shared.
    """

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        budgets: Sequence[int],
        may_end: Sequence[bool],
        device: torch.device | str = "cpu",
        follower: Follower | None = None,
    ) -> None:
        self.follower = Follower(prompts, device) if follower is None else follower
        self.left_B = torch.tensor(list(budgets), device=device)
        self.may_end_B = torch.tensor(list(may_end), dtype=torch.bool, device=device)
        self.is_cut_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)  # the budget forbade a further note
        self.has_ended_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.num_seen: int | None = None

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """(B, V): which token may come next in each row."""
        self.num_seen = ids_BT.shape[1] if self.num_seen is None else self.num_seen
        self.has_ended_B |= (ids_BT[:, self.num_seen :] == tok.EOGENAI).any(dim=1)
        self.left_B = self.left_B - (ids_BT.shape[1] - self.num_seen)
        self.num_seen = ids_BT.shape[1]
        state = self.follower.update(ids_BT)
        can_BV = F.pad(allowed(state, may_end=True)[:, 0], (0, tok.VOCAB_SIZE - NUM_EVENTS))

        # What the budget could still bring to an end.
        sounds_BK = state.age_BTK[:, 0] >= 0
        num_sounding_B = sounds_BK.sum(dim=1)
        room_B = self.left_B - 1 - self.may_end_B.long()  # after the next token, with the end token kept back
        must_wait_BK = (sounds_BK.cumsum(dim=1) - sounds_BK.long()) > 0  # a lower key sounds on
        fits_off_BK = num_sounding_B[:, None] - 1 + must_wait_BK.long() <= room_B[:, None]
        fits_on_B = num_sounding_B + 2 <= room_B  # a step, then all keys and this one
        fits_loud_B = num_sounding_B + 3 <= room_B
        # A step with nothing sounding must lead to a note: velocity, NOTE_ON, a step, NOTE_OFF.
        fits_wait_B = torch.where(num_sounding_B > 0, num_sounding_B, 4) <= room_B
        self.is_cut_B |= can_BV[:, tok.VELOCITY] & ~fits_loud_B & ~self.has_ended_B

        can_BV[:, tok.NOTE_ON : tok.NOTE_OFF] &= fits_on_B[:, None]
        can_BV[:, tok.NOTE_OFF : tok.VELOCITY] &= fits_off_BK
        can_BV[:, tok.VELOCITY : tok.TIME] &= fits_loud_B[:, None]
        can_BV[:, tok.TIME : tok.PLACE] &= fits_wait_B[:, None]
        can_BV[:, tok.EOGENAI] &= self.may_end_B
        can_BV &= ~self.has_ended_B[:, None]
        can_BV[:, tok.EOGENAI] |= ~can_BV.any(dim=1)
        return can_BV


def left_padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """(B, T) out of rows of ids that all end in the last column."""
    width = max(map(len, rows), default=0)
    ids_BT = np.full((len(rows), width), tok.PAD, dtype=np.int64)
    for number, ids in enumerate(rows):
        ids_BT[number, width - len(ids) :] = ids
    return ids_BT
