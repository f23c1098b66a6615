"""Which token may come next, so that a model writes nothing but what the encoder could have written.

Made for `allowed` of rung.nn.generate: it follows every row, all at once and on the model's device. Within the budget
of a row every note that the model began is ended: a token is allowed only if, after it, enough of the budget is left
for the shortest way to the end (the velocity's note, one time step, a NOTE_OFF for each key that sounds, the end
token). So nothing is forced before it must be, and the last few tokens are.

The one surprising thing: a row that may go nowhere is ended with <EOGENAI>, also where no end was asked for. That
happens when the rest of the budget has no room for another note, or when a prompt leaves more keys sounding than the
budget could end.

Shapes: B rows, K keys of the piano, P powers of two (the time steps), T places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rung.recipes.piano.tokenizer import (
    CLASS_OF_ID,
    EOGENAI,
    NOTE_OFF,
    NOTE_ON,
    NUM_PITCHES,
    PAD,
    PLACE,
    SPECIAL,
    TIME,
    TIME_STEPS,
    VELOCITY,
    VOCAB_SIZE,
)

LONGEST = len(TIME_STEPS) - 1  # the power that may repeat


class Rows:
    """Where each row stands: what sounds, and what was written at this very moment."""

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        self.sounds_BK = torch.zeros(num_rows, NUM_PITCHES, dtype=torch.bool, device=device)
        # The keys that ended and began last at this moment; -1 = none.
        self.last_off_B = torch.full((num_rows,), -1, device=device)
        self.last_on_B = torch.full((num_rows,), -1, device=device)
        self.most_wait_B = torch.full((num_rows,), LONGEST, device=device)  # the largest power that may come next
        self.is_loud_B = torch.zeros(num_rows, dtype=torch.bool, device=device)  # a velocity wants its note
        self.has_waited_B = torch.zeros(num_rows, dtype=torch.bool, device=device)  # a time step wants its event

    def follow(self, ids_B: Tensor) -> None:
        """One token further. A special token begins anew: nothing sounds."""
        is_on_B = (ids_B >= NOTE_ON) & (ids_B < NOTE_OFF)
        is_off_B = (ids_B >= NOTE_OFF) & (ids_B < VELOCITY)
        is_wait_B = (ids_B >= TIME) & (ids_B < PLACE)
        is_special_B = (ids_B < NOTE_ON) | (ids_B >= PLACE)
        is_new_B = is_wait_B | is_special_B
        key_B = torch.where(is_on_B, ids_B - NOTE_ON, ids_B - NOTE_OFF).clamp(0, NUM_PITCHES - 1)
        is_key_BK = torch.arange(NUM_PITCHES, device=ids_B.device) == key_B[:, None]
        ended_BK = is_special_B[:, None] | (is_off_B[:, None] & is_key_BK)
        self.sounds_BK = (self.sounds_BK | (is_on_B[:, None] & is_key_BK)) & ~ended_BK
        self.last_off_B = torch.where(is_off_B, key_B, self.last_off_B).masked_fill(is_new_B, -1)
        self.last_on_B = torch.where(is_on_B, key_B, self.last_on_B).masked_fill(is_new_B, -1)
        power_B = ids_B - TIME
        below_B = torch.where(power_B == LONGEST, LONGEST, power_B - 1)
        self.most_wait_B = torch.where(is_wait_B, below_B, LONGEST)
        self.is_loud_B = (ids_B >= VELOCITY) & (ids_B < TIME)
        self.has_waited_B = is_wait_B

    def to(self, device: torch.device) -> Rows:
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))
        return self


class Grammar:
    """`allowed` of generate(), for one call of it.

    `prompts` are the ids that each row begins with: what they leave sounding may be ended. `budgets` are the tokens
    that each row may be given, `may_end` says whether it can end before, with <EOGENAI>.
    """

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        budgets: Sequence[int],
        may_end: Sequence[bool],
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.device(device)
        self.rows = _after(prompts).to(device)
        self.left_B = torch.tensor(list(budgets), device=device)
        self.may_end_B = torch.tensor(list(may_end), dtype=torch.bool, device=device)
        self.is_cut_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)  # the budget forbade a further note
        self.has_ended_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.num_followed: int | None = None  # places of the ids that are in `rows`

    def __call__(self, ids_BT: Tensor) -> Tensor:
        if self.num_followed is None:
            self.num_followed = ids_BT.shape[1]
        for place in range(self.num_followed, ids_BT.shape[1]):
            ids_B = ids_BT[:, place].long()
            self.has_ended_B |= ids_B == EOGENAI
            self.rows.follow(ids_B)
            self.left_B = self.left_B - 1
        self.num_followed = ids_BT.shape[1]
        return self._allowed()

    def _allowed(self) -> Tensor:
        """(B, V): what the encoder could write here, less what the budget could not bring to an end."""
        rows, keys_K = self.rows, torch.arange(NUM_PITCHES, device=self.left_B.device)
        sounds_BK, num_sounding_B = rows.sounds_BK, rows.sounds_BK.sum(dim=1)
        is_free_BK = ~sounds_BK & (keys_K > rows.last_on_B[:, None])
        can_off_B = ~rows.is_loud_B & (rows.last_on_B < 0)  # ends come before beginnings, and never of these
        can_off_BK = sounds_BK & can_off_B[:, None] & (keys_K > rows.last_off_B[:, None])
        can_wait_B = ~rows.is_loud_B
        can_loud_B = ~rows.is_loud_B & is_free_BK.any(dim=1)
        can_end_B = ~rows.is_loud_B & ~rows.has_waited_B & (num_sounding_B == 0) & self.may_end_B

        room_B = self.left_B - 1 - self.may_end_B.long()  # after the next token, with the end token kept back
        must_wait_BK = (sounds_BK.cumsum(dim=1) - sounds_BK.long()) > 0  # a lower key sounds on
        fits_off_BK = num_sounding_B[:, None] - 1 + must_wait_BK.long() <= room_B[:, None]
        fits_on_B = num_sounding_B + 2 <= room_B  # a step, then all keys and this one
        fits_loud_B = num_sounding_B + 3 <= room_B
        # A step with nothing sounding must lead to a note: velocity, NOTE_ON, a step, NOTE_OFF.
        fits_wait_B = torch.where(num_sounding_B > 0, num_sounding_B, 4) <= room_B
        self.is_cut_B |= can_loud_B & ~fits_loud_B & ~self.has_ended_B

        allowed_BV = torch.zeros(len(self.left_B), VOCAB_SIZE, dtype=torch.bool, device=self.left_B.device)
        allowed_BV[:, NOTE_ON:NOTE_OFF] = is_free_BK & (rows.is_loud_B & fits_on_B)[:, None]
        allowed_BV[:, NOTE_OFF:VELOCITY] = can_off_BK & fits_off_BK
        allowed_BV[:, VELOCITY:TIME] = (can_loud_B & fits_loud_B)[:, None]
        powers_P = torch.arange(len(TIME_STEPS), device=self.left_B.device)
        allowed_BV[:, TIME:PLACE] = (can_wait_B & fits_wait_B)[:, None] & (powers_P <= rows.most_wait_B[:, None])
        allowed_BV[:, EOGENAI] = can_end_B
        allowed_BV &= ~self.has_ended_B[:, None]
        allowed_BV[:, EOGENAI] |= ~allowed_BV.any(dim=1)
        return allowed_BV


def _after(prompts: Sequence[np.ndarray]) -> Rows:
    """The rows as their prompts leave them. On the CPU, as it takes many small steps."""
    begun = [ids[_num_until_begun(ids) :] for ids in prompts]
    num_places = max((len(ids) for ids in begun), default=0)
    ids_BT = np.full((len(begun), num_places), PAD, dtype=np.int64)
    for row, ids in enumerate(begun):
        ids_BT[row, num_places - len(ids) :] = ids
    rows = Rows(len(prompts), "cpu")
    for ids_B in torch.from_numpy(ids_BT.T.copy()):
        rows.follow(ids_B)
    return rows


def _num_until_begun(ids: np.ndarray) -> int:
    """Past the last special token: what comes before it leaves nothing, and a question is all before <GENAI>."""
    places = np.flatnonzero(CLASS_OF_ID[ids] == SPECIAL)
    return int(places[-1]) + 1 if len(places) else 0
