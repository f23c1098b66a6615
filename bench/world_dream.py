"""How long a dream of the world recipe stays sharp, over several seeds; `small` needs a GPU and eight minutes a seed.

    python -m bench.world_dream [--preset small] [--seeds 3] [--seconds 400] [--runs runs] [--quick] [KEY=VALUE ...]

Walks the embedded place unless `--data` names a store. Then, for each seed, `open` learns the next frame with 45 % of
the seconds and `closed` goes on from its own frames with the rest; the first seed also trains `last`, the same open
loop that copies pixels from its own last frame, as a baseline. All are recorded as runs, with their contact sheets, and
measured on held-out walks with recorded controls: the table has the figures at dreamed steps 1, 8, 16, 32 and 64, of
known and unseen places. `still` is the sharpness after 200 frames without any control, against the real frame it
began after: the median of 16 places. Words after the options are keys of all runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rung import api
from rung.bench.report import facts, verdict
from rung.recipes.world.losses import gradient_energy
from rung.recipes.world.memory import to_signal
from rung.resolve import resolve

SHOWN_AT = (1, 8, 16, 32, 64)
STILL_FRAMES, STILL_PLACES = 200, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=400, help="of training, for each seed; evals come on top")
    parser.add_argument("--data", default="world", help="a prepared store; walked if there is none")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--quick", action="store_true", help="a few steps and frames: does it run at all?")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    words = [f"dataset.base_dataset_name={args.data}", *args.words]
    if args.quick:
        args.seeds, args.seconds = 1, 10
        words += ["evaluation.num_rollouts=4", "optimizer.max_iters=2", "closed_loop.steps=1", "data.batch_size=2"]
        words += ["lr.warmup_iters=0", "sampling.num_frames=4", "sampling.num_rows=1"]
    print(facts("torch", preset=args.preset, cuda=torch.cuda.is_available(), seeds=args.seeds), flush=True)
    prepare(args.preset, words)

    share = {"last": 0.45, "open": 0.45, "closed": 0.55}
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in share}
    still: dict[str, list[float]] = {name: [] for name in share}
    for seed in range(1, args.seeds + 1):
        first = ""
        for name in ("last", "open", "closed") if seed == 1 else ("open", "closed"):
            more = [f"seed={seed}", *words]
            more += ["model.warp=last"] if name == "last" else []
            more += ["stage=closed_loop", f"init_from={first}"] if name == "closed" else []
            more = timed(args.preset, more, args.seconds * share[name])
            begun = time.perf_counter()
            run = api.train(
                "world", more, preset=args.preset, experiment=f"dream-{name}", runs=args.runs, display=False,
                why=f"how long the dream stays sharp, seed {seed}",
            )  # fmt: skip
            first = run.id if name == "open" else first
            sets = api.evaluate(run.id, runs=args.runs).sets
            found[name].append(sets)
            still[name].append(standing_still(run.id, args.runs, 10 if args.quick else STILL_FRAMES))
            print(f"{run.id}  {run.status}  {time.perf_counter() - begun:.0f} s", flush=True)
            print("\n".join(table(sets)), f"  still {still[name][-1]:.3f}", sep="\n", flush=True)
    steps = [int(name.partition("@")[2]) for name in found["open"][0]["rollout"] if name.startswith("sharpness@")]
    middle, last = max(step for step in steps if step <= 16), max(steps)
    print(f"sharpness: early is at step {middle}, late at step {last}")
    for name in ("open", "closed"):
        rollouts = [sets["rollout"] for sets in found[name]]
        response = [sets["turn_followed_late"] / sets["turn_followed_real"] for sets in rollouts]
        print(verdict(f"dream-{name}-still", still[name], 0.5))
        print(verdict(f"dream-{name}-response", response, 1))
        if "dreams" in found["last"][0]:
            bar = found["last"][0]["dreams"]["feature_distance@8"]
            distances = [sets["dreams"][f"feature_distance@{last}"] for sets in found[name]]
            print(verdict(f"dream-{name}-distance", distances, bar, is_least=False))
        print(verdict(f"dream-{name}-early", [sets[f"sharpness@{middle}"] for sets in rollouts], 0.7))
        print(verdict(f"dream-{name}-late", [sets[f"sharpness@{last}"] for sets in rollouts], 0.5))


def prepare(preset: str, words: Sequence[str]) -> None:
    from rung.data.store import place

    resolved = resolve("world", [f"preset={preset}", *words])
    cfg = resolved.config.view("recipe")
    if not place(cfg.dataset.base_dataset_name).exists():
        _, summary = resolved.recipe_class.prepare(cfg, 1337, None, None, False, lambda what, done, total: None)
        print(summary, flush=True)


def timed(preset: str, words: Sequence[str], seconds: float) -> list[str]:
    """The words with the number of steps that they and the preset say, or this time, whichever ends first."""
    steps = str(resolve("world", [f"preset={preset}", *words]).config.tree()["optimizer"]["max_iters"])
    others = [word for word in words if not word.startswith("optimizer.max_iters=")]
    return [*others, f"lr.lr_decay_iters={steps}", f"optimizer.max_iters={steps}, {seconds:.0f} s"]


def table(sets: dict[str, Any]) -> list[str]:
    lines = []
    for name, kind in (("rollout", "known"), ("unseen", "unseen")):
        if name in sets:
            lines += [f"  {kind:8} {part:18}{row(sets[name], part)}" for part in ("sharpness", "l1")]
            late = {key: value for key, value in sets[name].items() if key.endswith(("_right_late", "_followed_late"))}
            lines.append("  " + " " * 9 + "  ".join(f"{key} {value:.2f}" for key, value in late.items()))
    if "dreams" in sets:
        lines += [f"  {'known':8} {part:18}{row(sets['dreams'], part)}" for part in ("feature_distance", "told_apart")]
    return lines


def row(figures: dict[str, float], part: str) -> str:
    return "".join(f"  @{at} {figures[f'{part}@{at}']:.3f}" for at in SHOWN_AT if f"{part}@{at}" in figures)


@torch.no_grad()
def standing_still(run: str, runs: Path, num_frames: int) -> float:
    """The gradient energy after so many frames without a control, over that of the last real one: the median."""
    loaded = api.load(run, runs=runs)
    player = loaded.recipe.player(loaded.model)
    kept = []
    for place in np.linspace(0, len(player.places) - 1, STILL_PLACES).astype(int):
        record = player.places[place]
        offset = (record["length"] - player.past) // 2
        walk, real = player.walk(int(place), offset), player.frames[record["start"] + player.past + offset - 1]
        for _ in range(num_frames):
            made = walk.step({}).frame
        after, before = (gradient_energy(to_signal(torch.from_numpy(np.array(x)))[None]).mean() for x in (made, real))
        kept.append(float(after / before))
    return statistics.median(kept)


if __name__ == "__main__":
    main()
