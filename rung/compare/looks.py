"""The verdicts that were given before on two arms, kept beside the runs, so that none is a free try.

Judging by a second metric, or again with more seeds, gives chance another try. Each verdict that shows a figure adds a
line to <runs>/.verdicts.ndjson; the runs themselves are not touched. The same runs by the same metric show the same
figure again, which is no further try.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.compare.decide import AlphaSpending, Look
from rung.compare.gate import identity
from rung.compare.noise import config_key
from rung.compare.reading import main_metric
from rung.errors import RunError
from rung.runs.files import LineFile, from_json, read_lines, to_json
from rung.runs.query import Run

if TYPE_CHECKING:
    from rung.compare.judge import Judgement

FILE = ".verdicts.ndjson"
ENDED = ("finished", "diverged")  # statuses of runs that a verdict counts


def counted(
    a: Sequence[Run], b: Sequence[Run], metric: str, metrics: Sequence[str], planned: int | None, num_variants: int = 1
) -> AlphaSpending:
    """What a verdict on B against A by `metric` may spend; `metrics` are all that this call judges by."""
    earlier = []
    for line in _about(a, b):
        look = Look(line["metric"], tuple(line["metrics"]), line["num_pairs"])
        if look.metric == metric and line["data"] == _data(a, b):
            metrics = look.metrics  # what came later does not count against what was seen before it
            break
        earlier.append(look)
    return AlphaSpending(planned, num_variants, tuple(metrics), metric, tuple(earlier))


def count(a: Sequence[Run], b: Sequence[Run], metric: str, metrics: Sequence[str], num_pairs: int, word: str) -> bool:
    """Adds a verdict; False where the folder cannot be written, so that later ones will not know of it."""
    if any((line["metric"], line["data"]) == (metric, _data(a, b)) for line in _about(a, b)):
        return True
    line = {
        "metric": metric, "metrics": list(metrics), "num_pairs": num_pairs, "word": word, "unix_s": time.time(),
        "data": _data(a, b), "runs": [sorted(map(identity, arm)) for arm in (a, b)],
        "configs": [_configs(arm) for arm in (a, b)],
    }  # fmt: skip
    try:
        file = LineFile(_path(a))
    except OSError:
        return False
    try:
        file.append(to_json(line) + b"\n")
    except RunError:
        return False
    finally:
        file.close()
    return True


def judge_and_count(
    a: Sequence[Run], b: Sequence[Run], judged: Callable[..., Judgement], metrics: Sequence[str], planned: int | None,
    num_variants: int, may_write: bool = True,
) -> list[Judgement]:  # fmt: skip
    """One judgement for each metric, each at what the verdicts before have left, and kept for those that come after."""
    # The arms of `rung ab` may be empty; then the judge says so.
    names = [name.removeprefix("eval/") for name in metrics or ([main_metric(a[0])] if a else [""])]
    names = list(dict.fromkeys(names))
    found = []
    for name in names:
        spending = counted(a, b, name, names, planned, num_variants) if a and b else None
        one = judged(a, b, metric=name or None, **({"spending": spending} if spending else {}))
        found.append(one)
    for one in found:
        if not math.isfinite(one.effect):
            continue
        if not (may_write and count(a, b, one.metric, names, one.num_pairs, one.word)):
            one.reasons.append(f"this verdict could not be kept in {a[0].path.parent.parent}: later ones miss it")
    return found


def _path(arm: Sequence[Run]) -> Path:
    return arm[0].path.parent.parent / FILE


def _about(a: Sequence[Run], b: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """The verdicts on these two arms, either way round: on some of these runs, or on others of their configs and code.

    One that is damaged counts nothing.
    """
    mine = [{*map(identity, arm), *_configs(arm)} for arm in (a, b)]
    with contextlib.suppress(OSError):
        for text in read_lines(_path(a)):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = from_json(text)
                one, other = ({*runs, *configs} for runs, configs in zip(line["runs"], line["configs"], strict=True))
                is_about = (mine[0] & one and mine[1] & other) or (mine[0] & other and mine[1] & one)
                if is_about and isinstance(line["metric"], str) and isinstance(line["num_pairs"], int):
                    yield {**line, "metrics": [str(name) for name in line["metrics"]], "data": line["data"]}


def _configs(arm: Sequence[Run]) -> list[str]:
    # With its experiment: loops of one's own may record neither a config nor code, and are not all the same.
    keys = [to_json(str(run.document.get("experiment"))) + config_key(run) for run in arm]
    return sorted({hashlib.blake2b(key, digest_size=8).hexdigest() for key in keys})


def _data(a: Sequence[Run], b: Sequence[Run]) -> str:
    """Which runs have ended, and where: one that goes on shows another figure later. Either way round the same."""
    ended = [{f"{identity(run)} {run.status} {run.step}" for run in arm if run.status in ENDED} for arm in (a, b)]
    return hashlib.blake2b(to_json(sorted(map(sorted, ended))), digest_size=8).hexdigest()
