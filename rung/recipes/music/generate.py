"""Draws codes from a model, step by step, with a key/value cache.

All randomness comes from the generator passed in. A row that is to obey its text more is run twice, with and without
it (classifier-free guidance). Special tokens are never drawn, but for the end of a piece, which one channel may
announce where it is the likeliest of all; the others then end as their delays say.

Shapes: B rows, R rows of the forward (twice as many under guidance), S steps, C channels, V ids, T frames, L bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rung.errors import ConfigError, DataError
from rung.nn.generate import choose, evaluating
from rung.nn.pack import packed
from rung.recipes.music.delay import DelayPattern, Specials, undo_delay
from rung.recipes.music.model import MusicModel


@dataclass(frozen=True)
class SamplingParams:
    num_frames: int  # at most, those of an audio prompt included
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    guidance: Literal["musicgen", "dia"] = "musicgen"
    guidance_scale: float = 1.0
    can_end: bool = False  # whether the model has learned where pieces end
    num_beyond: int = 0  # frames that go on after the last in channels that are ahead, and are cut off

    @property
    def is_guided(self) -> bool:
        return self.guidance_scale != (1.0 if self.guidance == "musicgen" else 0.0)


@torch.no_grad()
def generate(
    model: MusicModel,
    text_BL: Tensor,
    text_length_B: Tensor,
    params: SamplingParams,
    delays: Sequence[int],
    specials: Specials,
    generator: torch.Generator | None = None,
    prompt_TC: np.ndarray | None = None,
) -> list[np.ndarray]:
    """The codes of each row, (T, C) uint16, those of the prompt included; shorter where the model ended the piece.

    While the late channels finish the last frames, those ahead hold PAD, as in a row of training that is cut off there;
    a row that goes on has codes in its place, `num_beyond` of them.
    """
    num_rows, num_frames, num_given = len(text_BL), params.num_frames, 0 if prompt_TC is None else len(prompt_TC)
    num_steps = num_frames + max(delays)
    if num_steps > model.decoder.shape.context_size:
        most = model.decoder.shape.context_size - max(delays)
        raise ConfigError(f"{num_frames} frames are more than the model has places for ({most})", code="too-large")
    if num_given >= num_frames:
        raise ConfigError(f"the audio prompt has {num_given} frames, of {num_frames} to make", code="too-large")
    device, delays_C = text_BL.device, torch.tensor(delays, device=text_BL.device)
    leader = int(np.argmin(delays))  # the channel that may announce the end

    # What is known before anything is drawn: BOS before a channel begins, and the codes of the prompt; -1 is unknown.
    if prompt_TC is None:
        prompt_TC = np.zeros((0, len(delays)), np.uint16)
    pattern = DelayPattern(delays, num_frames, specials, has_end=False)
    padded = np.concatenate([prompt_TC, np.zeros((num_frames - num_given, len(delays)), np.uint16)])
    laid_out = pattern.lay_out(padded[None], np.array([num_given]), np.array([False]))[0].astype(np.int64)
    laid_out[laid_out == specials.pad] = -1
    known_SC = torch.from_numpy(laid_out).to(device)

    rows_BSC = torch.full((num_rows, num_steps + 1, len(delays)), specials.pad, device=device)
    first = num_given + 1  # steps that hold nothing unknown in any channel
    rows_BSC[:, :first] = known_SC[:first]
    cut_at = num_frames + params.num_beyond
    end_B = torch.full((num_rows,), cut_at, device=device)  # the frame after the last
    with evaluating(model):
        if params.is_guided:
            text_BL, text_length_B = text_BL.repeat(2, 1), torch.cat([text_length_B, torch.zeros_like(text_length_B)])
        memory, mask = model.encode(text_BL, text_length_B)
        model = packed(model, len(text_BL), num_steps)
        # A GPU is not waited for at every step: what is drawn after the end, or after a bad number, is not returned.
        check_every = 16 if device.type == "cuda" else 1
        is_finite = torch.ones((), dtype=torch.bool, device=device)
        cache = model.decoder.new_cache(len(text_BL), num_steps)
        for step in range(first, num_steps + 1):
            new_BSC = rows_BSC[:, :first] if step == first else rows_BSC[:, step - 1 : step]
            if params.is_guided:
                new_BSC = new_BSC.repeat(2, 1, 1)
            x_RSW = model.hidden(new_BSC, memory, mask, cache)
            logits_RCV = model.logits(x_RSW[:, -1:])[:, 0].float()
            is_finite &= logits_RCV.isfinite().all()
            logits_BCV = guide(logits_RCV, params) if params.is_guided else logits_RCV
            logits_BCV = restrict(logits_BCV, specials, leader if params.can_end and step > first else None)
            drawn = choose(logits_BCV.flatten(0, 1), params.temperature, params.top_k, params.top_p, generator)
            drawn_BC = drawn.view(num_rows, len(delays)).to(device)
            frame_C = step - 1 - delays_C
            has_ended_B = (drawn_BC[:, leader] == specials.eos) & (end_B > frame_C[leader])
            end_B = torch.where(has_ended_B, frame_C[leader], end_B)
            # A channel past the end says so once and is silent then, unless the piece is only cut off there.
            after_BC = torch.where((frame_C == end_B[:, None]) & (end_B < cut_at)[:, None], specials.eos, specials.pad)
            drawn_BC = torch.where(frame_C >= end_B[:, None], after_BC, drawn_BC)
            rows_BSC[:, step] = torch.where(known_SC[step] >= 0, known_SC[step], drawn_BC)
            if (step - first + 1) % check_every == 0 or step == num_steps:
                if not bool(is_finite):
                    remedy = "take an earlier save, or system.dtype=float32"
                    raise DataError(f"the model gives logits that are not finite; {remedy}", code="not-finite")
                if bool((step >= end_B + max(delays)).all()):
                    break
    rows = rows_BSC[:, 1:].cpu().numpy().astype(np.uint16)
    return [undo_delay(row, delays, min(end, num_frames)) for row, end in zip(rows, end_B.tolist())]


def guide(logits_RCV: Tensor, params: SamplingParams) -> Tensor:
    """The first half of the rows has a text, the second is the same without.

    MusicGen draws from without + scale (with - without). Dia only ranks the codes by with + scale (with - without),
    and draws among the best top_k by their own logits.
    """
    with_BCV, without_BCV = logits_RCV.chunk(2)
    difference = with_BCV - without_BCV
    if params.guidance == "musicgen":
        return without_BCV + params.guidance_scale * difference
    guided_BCV = with_BCV + params.guidance_scale * difference
    if params.top_k is None or params.top_k >= guided_BCV.shape[-1]:
        return guided_BCV
    best = guided_BCV.topk(params.top_k, dim=-1).indices
    is_out = torch.ones_like(guided_BCV, dtype=torch.bool).scatter(-1, best, False)
    return with_BCV.masked_fill(is_out, -torch.inf)


def restrict(logits_BCV: Tensor, specials: Specials, leader: int | None) -> Tensor:
    """Forbids special tokens; the leading channel ends the piece where that is likelier than every code."""
    logits_BCV = logits_BCV.clone()
    eos_B = logits_BCV[:, leader, specials.eos].clone() if leader is not None else None
    logits_BCV[..., specials.eos :] = -torch.inf
    # Guidance may have left special tokens alone: then all codes are alike.
    stuck_BC1 = ~logits_BCV.isfinite().any(dim=-1, keepdim=True)
    logits_BCV[..., : specials.eos] = logits_BCV[..., : specials.eos].masked_fill(stuck_BC1, 0.0)
    if eos_B is not None:
        assert leader is not None
        ends_B = eos_B > logits_BCV[:, leader].amax(dim=-1)
        leader_BV = logits_BCV[:, leader].masked_fill(ends_B[:, None], -torch.inf)
        leader_BV[:, specials.eos] = leader_BV[:, specials.eos].masked_fill(ends_B, 0.0)
        logits_BCV[:, leader] = leader_BV
    return logits_BCV
