"""The pictures of a run: what the model sees and makes, and a film of its dream beside the recording."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rung.data.store import Store
from rung.recipe import Draw, Sample
from rung.recipes.world.config import Scale
from rung.recipes.world.dream import Dreamer, memory_of
from rung.recipes.world.memory import to_frame
from rung.recipes.world.pictures import Moment, contact_sheet, film, rollout_sheet
from rung.recipes.world.stream import Moments

HORIZONS = (1, 2, 4, 8, 16, 32, 64)


def samples(
    dreamer: Dreamer, store: Store, scales: Sequence[Scale], num_rows: int, num_frames: int, draw: Draw
) -> list[Sample]:
    """Held-out moments, the same ones every time; the noise is that of an eval, so that pictures can be compared."""
    split = "validation" if "validation" in store.splits else "train"
    stream = Moments(store, split, scales, lambda step: num_frames)
    places = np.linspace(0, stream.num_rows - 1, num_rows + 2).astype(int)[1:-1]
    device = next(dreamer.world.parameters()).device
    moments = []
    for number, place in enumerate(places):
        shown = Draw(draw.seed, -1, np.array([number]))
        batch = {k: torch.from_numpy(v).to(device) for k, v in stream.gather(np.array([place]), shown).items()}
        memory, num_valid = memory_of(batch), int(batch["valid"].sum())
        if number == 0:  # the one film begins where the sheet does
            made = [to_frame(m)[0] for _, m in dreamer.roll(memory, batch["controls"][:, :num_valid], shown)]
            dreamed, real = torch.stack(made).cpu().numpy(), batch["frames"][0, :num_valid].cpu().numpy()
            last = memory[0][0, -1].cpu().numpy()
        made_now = to_frame(dreamer.make(memory, batch["controls"][:, 0], shown, 0))[0].cpu().numpy()
        levels = [level[0].cpu().numpy() for level in memory]
        moments.append(Moment(levels, levels[0][-1], batch["frames"][0, 0].cpu().numpy(), made_now, f"row {place}"))
    rate_hz = float(store.info["rate_hz"])
    suffix, video = film(real, dreamed, rate_hz)
    horizons = [h for h in HORIZONS if h <= len(real)]
    seconds = len(real) / rate_hz
    return [
        Sample(
            "contact-sheet.png", contact_sheet(moments), f"{num_rows} held-out moments: memory, real, made, difference"
        ),
        Sample(
            "rollout.png", rollout_sheet(real, dreamed, horizons, last), "real above, dreamed below, and how far apart"
        ),
        Sample(f"rollout{suffix}", video, f"{seconds:.1f} s: real left, dreamed from its own frames right"),
    ]
