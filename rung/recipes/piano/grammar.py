"""Which token may come next, so that a model writes only what the encoder could have written.

Every note that the model begins also ends within the row's budget: a token is allowed only if the shortest way to the
end (the velocity's note, one time step, a NOTE_OFF for each sounding key, the end token) still fits after it. A row
that cannot continue, because no further note fits or because its prompt leaves more keys sounding than the budget can
end, is ended with <EOGENAI> even where no end was asked for.

Shapes: B rows, K keys of the piano, P powers of two (the time steps), T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rung.recipes.piano import tokenizer as tok

LONGEST = len(tok.TIME_STEPS) - 1  # the power that may repeat


class Grammar:
    """`allowed` of rung.nn.generate, for one call of it; follows all rows at once, on the model's device.

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
        num_rows = len(prompts)
        self.sounds_BK = torch.zeros(num_rows, tok.NUM_PITCHES, dtype=torch.bool)
        # The keys that ended and began last at this moment; -1 = none.
        self.last_off_B, self.last_on_B = torch.full((num_rows,), -1), torch.full((num_rows,), -1)
        self.most_wait_B = torch.full((num_rows,), LONGEST)  # the largest power that may come next
        self.is_loud_B = torch.zeros(num_rows, dtype=torch.bool)  # a velocity wants its note
        self.has_waited_B = torch.zeros(num_rows, dtype=torch.bool)  # a time step wants its event
        self.left_B = torch.tensor(list(budgets))
        self.may_end_B = torch.tensor(list(may_end), dtype=torch.bool)
        self.is_cut_B = torch.zeros(num_rows, dtype=torch.bool)  # the budget forbade a further note
        self.has_ended_B = torch.zeros(num_rows, dtype=torch.bool)

        # What comes before the last special token leaves nothing, and a question is all before <GENAI>. The prompts are
        # followed on the CPU, as it takes many small steps.
        lasts = [int(np.flatnonzero(tok.CLASS_OF_ID[ids] == tok.SPECIAL).max(initial=-1)) for ids in prompts]
        ids_BT = left_padded([ids[last + 1 :] for ids, last in zip(prompts, lasts)])
        for ids_B in torch.from_numpy(ids_BT).T:
            self._follow(ids_B)
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))
        self.num_followed: int | None = None  # places of the ids of the call

    def _follow(self, ids_B: Tensor) -> None:
        """One token further. A special token begins anew: nothing sounds."""
        is_on_B = (ids_B >= tok.NOTE_ON) & (ids_B < tok.NOTE_OFF)
        is_off_B = (ids_B >= tok.NOTE_OFF) & (ids_B < tok.VELOCITY)
        is_wait_B = (ids_B >= tok.TIME) & (ids_B < tok.PLACE)
        is_special_B = (ids_B < tok.NOTE_ON) | (ids_B >= tok.PLACE)
        is_new_B = is_wait_B | is_special_B
        key_B = torch.where(is_on_B, ids_B - tok.NOTE_ON, ids_B - tok.NOTE_OFF).clamp(0, tok.NUM_PITCHES - 1)
        is_key_BK = torch.arange(tok.NUM_PITCHES, device=ids_B.device) == key_B[:, None]
        ended_BK = is_special_B[:, None] | (is_off_B[:, None] & is_key_BK)
        self.sounds_BK = (self.sounds_BK | (is_on_B[:, None] & is_key_BK)) & ~ended_BK
        self.last_off_B = torch.where(is_off_B, key_B, self.last_off_B).masked_fill(is_new_B, -1)
        self.last_on_B = torch.where(is_on_B, key_B, self.last_on_B).masked_fill(is_new_B, -1)
        power_B = ids_B - tok.TIME
        below_B = torch.where(power_B == LONGEST, LONGEST, power_B - 1)
        self.most_wait_B = torch.where(is_wait_B, below_B, LONGEST)
        self.is_loud_B = (ids_B >= tok.VELOCITY) & (ids_B < tok.TIME)
        self.has_waited_B = is_wait_B

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """(B, V): which token may come next in each row."""
        if self.num_followed is None:
            self.num_followed = ids_BT.shape[1]
        for place in range(self.num_followed, ids_BT.shape[1]):
            ids_B = ids_BT[:, place].long()
            self.has_ended_B |= ids_B == tok.EOGENAI
            self._follow(ids_B)
            self.left_B = self.left_B - 1
        self.num_followed = ids_BT.shape[1]

        # What the encoder could write here.
        keys_K = torch.arange(tok.NUM_PITCHES, device=self.left_B.device)
        sounds_BK, num_sounding_B = self.sounds_BK, self.sounds_BK.sum(dim=1)
        is_free_BK = ~sounds_BK & (keys_K > self.last_on_B[:, None])
        can_off_B = ~self.is_loud_B & (self.last_on_B < 0)  # ends come before beginnings, and never of these
        can_off_BK = sounds_BK & can_off_B[:, None] & (keys_K > self.last_off_B[:, None])
        can_loud_B = ~self.is_loud_B & is_free_BK.any(dim=1)
        can_end_B = ~self.is_loud_B & ~self.has_waited_B & (num_sounding_B == 0) & self.may_end_B

        # What the budget could still bring to an end.
        room_B = self.left_B - 1 - self.may_end_B.long()  # after the next token, with the end token kept back
        must_wait_BK = (sounds_BK.cumsum(dim=1) - sounds_BK.long()) > 0  # a lower key sounds on
        fits_off_BK = num_sounding_B[:, None] - 1 + must_wait_BK.long() <= room_B[:, None]
        fits_on_B = num_sounding_B + 2 <= room_B  # a step, then all keys and this one
        fits_loud_B = num_sounding_B + 3 <= room_B
        # A step with nothing sounding must lead to a note: velocity, NOTE_ON, a step, NOTE_OFF.
        fits_wait_B = torch.where(num_sounding_B > 0, num_sounding_B, 4) <= room_B
        self.is_cut_B |= can_loud_B & ~fits_loud_B & ~self.has_ended_B

        allowed_BV = torch.zeros(len(self.left_B), tok.VOCAB_SIZE, dtype=torch.bool, device=self.left_B.device)
        allowed_BV[:, tok.NOTE_ON : tok.NOTE_OFF] = is_free_BK & (self.is_loud_B & fits_on_B)[:, None]
        allowed_BV[:, tok.NOTE_OFF : tok.VELOCITY] = can_off_BK & fits_off_BK
        allowed_BV[:, tok.VELOCITY : tok.TIME] = (can_loud_B & fits_loud_B)[:, None]
        powers_P = torch.arange(len(tok.TIME_STEPS), device=self.left_B.device)
        waits_BP = (~self.is_loud_B & fits_wait_B)[:, None] & (powers_P <= self.most_wait_B[:, None])
        allowed_BV[:, tok.TIME : tok.PLACE] = waits_BP
        allowed_BV[:, tok.EOGENAI] = can_end_B
        allowed_BV &= ~self.has_ended_B[:, None]
        allowed_BV[:, tok.EOGENAI] |= ~allowed_BV.any(dim=1)
        return allowed_BV


def left_padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """(B, T) out of rows of ids that all end in the last column."""
    width = max(map(len, rows), default=0)
    ids_BT = np.full((len(rows), width), tok.PAD, dtype=np.int64)
    for number, ids in enumerate(rows):
        ids_BT[number, width - len(ids) :] = ids
    return ids_BT
