"""Sweeps made up for a report: run folders of the form that `rung train --sweep` and `rung eval --split test` leave."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rung.runs.files import to_json, write_json
from rung.runs.query import Run, open_run
from rung.runs.record import Record
from tests.compare import made

NAMES = ["cs.AI", "cs.CE", "cs.CV", "cs.DS", "cs.IT", "cs.NE", "cs.PL", "cs.SY", "math.AC", "math.GR", "math.ST"]
# Mean cross-entropy by seed and K, as a study of eleven arXiv categories measured it.
REFERENCE = {
    0: {1: 2.713, 3: 2.689, 5: 2.665, 8: 2.561, 11: 2.544},
    1: {1: 3.520, 3: 3.430, 5: 3.279, 8: 3.296, 11: 3.188},
    2: {1: 3.366, 3: 3.221, 5: 3.083, 8: 3.125, 11: 3.093},
    3: {1: 4.412, 3: 4.022, 5: 3.887, 8: 4.000, 11: 3.828},
}


def chosen(num: int, seed: int) -> list[str]:
    """The components of a run: nested in their number for one seed."""
    names = sorted(NAMES)
    random.Random(seed).shuffle(names)
    return sorted(names[:num])


def point(root: Path, varies: Mapping[str, Any], name: str = "study", **more: Any) -> Record:
    """An open run of a sweep; `varies` goes into its config too."""
    seed = varies.get("seed", 7)
    config = made.changed(made.CONFIG, **{key.replace(".", "__"): value for key, value in varies.items()})
    config = made.changed(config, **more.pop("config", {}))
    (code := root.parent / "code").mkdir(parents=True, exist_ok=True)
    (code / "model.py").touch()
    sweep = {"name": name, "point": to_json(varies).decode(), "varies": dict(varies)}
    more = {"code_root": code, **more}
    return made.start_run(root, more.pop("experiment", "text"), seed=seed, config=config, sweep=sweep, **more)


def trained(record: Record, root: Path, loss: float = 2.0, status: str = "finished", steps: int = 40) -> Run:
    for step in range(4):
        record.log(step, {"loss": 5.0 - step, "targets": 1600.0, "step_s": 0.5})
    for step in (20, 40):
        record.event("eval", step=step, results={"val": {"loss": loss + (40 - step) / 100, "targets": 1000.0}})
    record.update(best={"step": 40, "set": "val", "loss": loss})
    record.finish(status, last_step=steps, totals={"step": steps, "targets": 64_000})
    return open_run(record.path, root)


def examined(
    run: Run, losses: Mapping[str, float], se: float = 0.02, offset: int = 0, step: int = 40, split: str = "test"
) -> None:
    """What an eval of a split leaves: `losses` by component, on windows that begin at `offset`."""

    def positions(loss: float) -> dict[str, list[float]]:
        return {"loss": [loss + 2.0 / (1 + i) - 0.1 for i in range(20)], "se": [se] * 20, "targets": [1.0] * 20}

    groups = {
        name: {
            "loss": loss, "se": se, "perplexity": 2.718**loss, "targets": 990.0, "rows": 10,
            "positions": positions(loss),
        }
        for name, loss in losses.items()
    }  # fmt: skip
    mean = sum(losses.values()) / len(losses)
    figures = {
        "loss": mean, "se": se, "perplexity": 2.718**mean, "targets": 990.0 * len(losses), "rows": 10 * len(losses),
        "mean_of_groups": {"loss": mean, "se": se / len(losses) ** 0.5}, "groups": groups,
        "positions": positions(mean),
    }  # fmt: skip
    folder = run.path / "evals"
    folder.mkdir(exist_ok=True)
    document = {"schema": 1, "run": run.id, "split": split, "step": step, "weights": f"checkpoint {step}"}
    write_json(folder / f"{split}-{step}.json", {**document, "sets": {split: figures}})
    rows = [
        {
            "set": split,
            "row": i * 10 + j,
            "component": name,
            "document": f"{name}_{j}",
            "offset": offset + j,
            "loss": 1.5 + j,
        }
        for i, name in enumerate(losses)
        for j in range(10)
    ]
    (folder / f"{split}-{step}.windows.jsonl").write_bytes(b"".join(to_json(row) + b"\n" for row in rows))


def levels() -> dict[str, float]:
    """How hard each component is, whoever learns it."""
    draw = random.Random(1000)
    return {name: 3.0 + 0.8 * draw.gauss(0, 1) for name in NAMES}


def by_component(
    root: Path,
    effect: float = -0.1,
    seeds: Sequence[int] = range(3),
    amounts: Sequence[int] = (1, 3, 5, 8, 11),
    noise: float = 0.01,
    is_control: bool = False,
    tokens: Mapping[int, int] = {},
) -> list[Run]:
    """Runs whose loss on each component moves by `effect` with every doubling of their number."""
    runs = []
    for seed in seeds:
        for num in amounts:
            draw = random.Random(f"{seed}/{num}/{is_control}")
            varies: dict[str, Any] = {"dataset.num_components": num, "seed": seed}
            varies |= {"dataset.shuffle_labels": True} if is_control else {}
            data = made.changed(made.DATA)
            data["train"]["about"] = {"source": "arxiv", "unique_tokens": tokens.get(num, 1_000_000)}
            data["train"]["fingerprint"] = f"7c1e/train/{num}/{seed}"
            run = trained(point(root, varies, data=data), root)
            move = effect * math.log2(num)
            examined(run, {c: levels()[c] + move + noise * draw.gauss(0, 1) for c in chosen(num, seed)})
            runs.append(run)
    return runs
