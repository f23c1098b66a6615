"""What differs between two runs, and whether that was one change.

The surprising thing: code is no declared factor. A config key that differs was set by somebody and is written down; an
edit in a file is what people forget, so it spoils a comparison unless it is declared by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from rung.compare import conditions
from rung.compare.code import Changed, CodeDiff
from rung.compare.code import diff as code_diff
from rung.compare.difference import ABSENT, PARTS, WEIGHTS, Comparison, Difference, is_of_engine, part_of
from rung.errors import RunError
from rung.runs.fields import leaves
from rung.runs.files import to_json
from rung.runs.query import Run

__all__ = ["ABSENT", "PARTS", "WEIGHTS", "Comparison", "Difference", "Strictness", "compare", "strictness"]

# Keys that change where and how a run is computed and shown, not what it learns: those that `rung resume` takes anew,
# without precision, compilation and guard, which can change results.
NO_LEARNING = (
    "system.device", "system.data_workers", "system.threads", "ddp.", "logging.", "signals.", "checkpoint.",
    "sample_interval", "sampling.", "eval_interval",
)  # fmt: skip
# Rows in one forward pass, and passes in one step. A loss is a sum over the step: only dropout knows of the cut.
_CUT = ("data.batch_size", "optimizer.gradient_accumulation_steps")
_DOCUMENTS = (".md", ".rst")
_DOCUMENT_NAMES = ("LICENSE", ".gitignore")
_NUM_TOLD = 4
CHANGED = "changed at step "  # the source of a key that a script set anew while it trained


def compare(a: Run, b: Run, *, has_rows: bool = True) -> Comparison:
    """Everything that differs from `a` to `b`; raises RunError where a file of a run is damaged.

    Without `has_rows` the rows stay unread, and whether each step saw the same data unknown: enough for a listing.
    """
    code = code_diff(a, b)
    same: list[str] = []
    of_code = list(_code(a, b, code, same))
    config = list(_config(a, b, is_other_code=any(d.weight == "hidden" for d in of_code)))
    keys = [d.name for d in config if d.weight == "factor"]
    data = list(conditions.data(a, b, keys, same))
    is_same_data = not any(d.weight in ("hidden", "follows") for d in data)
    differences = [
        *config,
        *of_code,
        *data,
        *conditions.environment(a, b, keys, same),
        *_seed(a, b, same),
        *conditions.budget(a, b, same),
        *conditions.metric(a, b, same, has_rows),
        *conditions.pairing(a, b, keys, same),
        *(conditions.batches(a, b, same) if has_rows and is_same_data else ()),
    ]
    return Comparison(a, b, differences, code, same, _standing(a, b))


def _config(a: Run, b: Run, is_other_code: bool) -> Iterator[Difference]:
    was, now = (dict(leaves(_tree(run))) for run in (a, b))
    sources = (a.sources(), b.sources())
    names = [name for name in dict.fromkeys([*was, *now]) if not _is_equal(name, was, now)]
    if a.document.get("recipe") != b.document.get("recipe"):
        yield Difference("config", "recipe", a.document.get("recipe"), b.document.get("recipe"), "factor")
    is_known = is_of_engine(a) and is_of_engine(b)
    is_plateau = "plateau" in (was.get("lr.schedule"), now.get("lr.schedule"))
    same_rows = _rows_of_cut(was, now) if is_known else None
    for name in names:
        if name == "seed" and a.document.get("seed") != b.document.get("seed"):
            continue  # told as the seed
        said = [str(sources[i].get(name, "")) if name in tree else ABSENT for i, tree in enumerate((was, now))]
        weight, detail = _weight(name, said, names, is_other_code)
        if weight == "factor" and is_known:
            if name in _CUT and same_rows is not None:
                weight, detail = "note", f"another cut of the same {same_rows} rows a step: only dropout draws anew"
            elif name == "eval_iters":
                weight, detail = "metric", "evals see other rows"
            elif name.startswith(NO_LEARNING) and not (name == "eval_interval" and is_plateau):
                weight = "note"
        yield Difference("config", name, was.get(name), now.get(name), weight, detail, said[0], said[1])
    yield from _changed_on_the_way(was, now, names, sources)


def _rows_of_cut(was: Mapping[str, Any], now: Mapping[str, Any]) -> int | None:
    """Rows of a step, where both runs have as many of them."""
    cuts: list[list[Any]] = [[tree.get(name) for name in _CUT] for tree in (was, now)]
    if not all(type(number) is int for cut in cuts for number in cut):
        return None
    rows = [math.prod(cut) for cut in cuts]
    return rows[0] if rows[0] == rows[1] else None


def _changed_on_the_way(
    was: Mapping[str, Any], now: Mapping[str, Any], names: Collection[str], sources: Sequence[Mapping[str, str]]
) -> Iterator[Difference]:
    """Keys that end alike, and that a script set anew while it trained: the config holds the last value only."""
    for name in (name for name in was if name in now and name not in names):
        said = [str(of.get(name, "")) for of in sources]
        if said[0] != said[1] and any(source.startswith(CHANGED) for source in said):
            words = [f"{source} of the {which}" for source, which in zip(said, ("first", "second"))
                     if source.startswith(CHANGED)]  # fmt: skip
            detail = f"{', '.join(words)}: it was another value before"
            yield Difference("config", name, was[name], now[name], "hidden", detail, said[0], said[1])


def _weight(name: str, sources: Sequence[str], names: Collection[str], is_other_code: bool) -> tuple[str, str]:
    """What a key that differs means, with a word on why, whoever trains."""
    origins = {source.partition(": from ")[2] for source in sources}
    if len(origins) == 1 and (origin := origins.pop()) in names:
        return "follows", f"follows from {origin}"
    if set(sources) == {ABSENT, "default"} and is_other_code:
        return "follows", "a key that came or went with the code"
    changed = [source for source in sources if source.startswith(CHANGED)]
    return "factor", ", ".join(dict.fromkeys(changed))


def _tree(run: Run) -> Mapping[str, Any]:
    tree = run.config()
    if not isinstance(tree, dict):
        raise RunError(f"{run.path / 'config.yaml'} is damaged: it holds no keys.")
    return tree


def _is_equal(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if name not in was or name not in now or isinstance(was[name], bool) != isinstance(now[name], bool):
        return False
    return bool(was[name] == now[name]) or to_json(was[name]) == to_json(now[name])  # NaN is equal to NaN here


def _code(a: Run, b: Run, code: CodeDiff, same: list[str]) -> Iterator[Difference]:
    if code.problem:
        yield Difference("code", "code", _name(a), _name(b), "hidden", f"unknown: {code.problem}")
    elif not code.files:
        same.append(f"code ({_name(a)})")
    for file in code.files:
        yield Difference("code", file.path, file.removed, file.added, _weight_of_file(file), lines_of(file))
    for one in code.resumed:
        is_harmless = not one.problem and all(_weight_of_file(file) == "note" for file in one.files)
        what = one.problem or ", ".join(file.path for file in one.files)
        detail = f"{one.run_id} went on at step {one.step} with other code: {what}"
        yield Difference("code", f"resume of {one.run_id}", None, None, "note" if is_harmless else "hidden", detail)


def lines_of(file: Changed) -> str:
    """+3 -1, or what else there is to say of a file that differs."""
    count = "binary" if file.added is None else f"+{file.added} -{file.removed}"
    return {"A": f"new, {count}", "D": f"gone, {count}"}.get(file.status, count)


def _weight_of_file(file: Changed) -> str:
    path = PurePosixPath(file.path)
    is_document = path.suffix.lower() in _DOCUMENTS or path.name in _DOCUMENT_NAMES
    return "note" if is_document else "hidden"


def _name(run: Run) -> str | None:
    code = part_of(run, "code")
    return next((str(code[key])[:12] for key in ("commit", "sha256") if code.get(key)), None)


def _seed(a: Run, b: Run, same: list[str]) -> Iterator[Difference]:
    before, after = a.document.get("seed"), b.document.get("seed")
    if before != after:
        yield Difference("seed", "seed", before, after, "hidden")
    elif before is None:
        yield Difference("seed", "seed", None, None, "note", "neither run says its seed")
    else:
        same.append(f"seed ({before})")


def _standing(a: Run, b: Run) -> list[str]:
    """What to know of a run before its figures are read."""
    notes = []
    if a.path == b.path or (a.document.get("uid") and a.document.get("uid") == b.document.get("uid")):
        notes.append(f"both are the same run, {a.id}")
    for run in (a, b):
        step, planned = run.step, part_of(run, "derived").get("num_steps")
        if run.status != "finished":
            notes.append(f"{run.id} is {run.status_text}, at step {'none' if step is None else step}")
        if isinstance(planned, int | float) and run.status != "running" and (step is None or step < planned):
            notes.append(f"{run.id} did {step or 0} of {planned:g} planned steps")
    return notes


class Strictness(NamedTuple):
    """Whether a comparison is of one change. `confounders` are all that stand in the way, several factors included."""

    is_strict: bool
    factor: Difference | None
    confounders: list[Difference]
    allowed: list[Difference]
    words: str


def strictness(comparison: Comparison, allowed: Collection[str] = (), declared: str | None = None) -> Strictness:
    """Strict: exactly one factor, and nothing hidden and no other metric beyond what is `allowed`.

    `allowed` names parts ("seed", "environment") or differences ("packages", "optimizer.beta2"). `declared` makes a
    part ("code") or a difference ("torch") the one factor.
    """
    weighty = comparison.of("factor", "hidden", "metric")
    meant = [d for d in weighty if declared is not None and declared in (d.part, d.name)]
    forgiven = [d for d in weighty if d not in meant and (d.part in allowed or d.name in allowed)]
    rest = [d for d in weighty if d not in meant and d not in forgiven]
    factors = [*([_one(meant, str(declared))] if meant else []), *(d for d in rest if d.weight == "factor")]
    hidden = [d for d in rest if d.weight != "factor"]
    factor = factors[0] if len(factors) == 1 else None
    confounders = [*(factors if factor is None else []), *hidden]
    if declared is not None and not meant:
        words = f"not a strict A/B: {declared} was declared as the change, and does not differ"
        return Strictness(False, None, [*factors, *hidden], forgiven, words)
    is_strict = factor is not None and not hidden
    return Strictness(is_strict, factor, confounders, forgiven, _words(factors, hidden, forgiven))


def _one(differences: Sequence[Difference], declared: str) -> Difference:
    """Several differences of a part that was declared as the change, as one."""
    if len(differences) == 1:
        return differences[0]._replace(weight="factor")
    names = ", ".join(d.name for d in differences)
    return Difference(differences[0].part, declared, None, None, "factor", names)


def _words(factors: Sequence[Difference], hidden: Sequence[Difference], forgiven: Sequence[Difference]) -> str:
    besides = f" (allowed: {_listed(forgiven)})" if forgiven else ""
    if len(factors) == 1 and not hidden:
        return f"strict A/B: {change_of(factors[0])}{besides}"
    if not factors and not hidden:
        return f"not an A/B: nothing that matters differs{besides}"
    if not factors and all(d.part == "seed" for d in hidden):
        return f"not an A/B: a repeat with another seed{besides}"
    counts = []
    if len(factors) != 1:
        counts.append("no factor" if not factors else f"{len(factors)} factors ({_listed(factors)})")
    if hidden:
        num = len({d.name if d.part != "code" else "code" for d in hidden})
        counts.append(f"{num} confounder{'s' if num != 1 else ''} ({_listed(hidden)})")
    beside = f" beside {change_of(factors[0])}" if len(factors) == 1 else ""
    return f"not a strict A/B: {', '.join(counts)}{beside}{besides}"


def change_of(difference: Difference) -> str:
    """optimizer.grad_clip 1.0 -> 0.5; for code the files."""
    if difference.part == "code" or (difference.before is None and difference.after is None):
        return f"{difference.name} ({difference.detail})" if difference.detail else difference.name
    before = "(absent)" if difference.source_before == ABSENT else difference.before
    after = "(absent)" if difference.source_after == ABSENT else difference.after
    return f"{difference.name} {before} -> {after}"


def _listed(differences: Sequence[Difference]) -> str:
    """Names, the files of the code as one."""
    files = [d.name for d in differences if d.part == "code"]
    names = [d.name for d in differences if d.part != "code"]
    if files:
        more = f" and {len(files) - _NUM_TOLD} more" if len(files) > _NUM_TOLD else ""
        names.append("code" if files == ["code"] else f"code: {', '.join(files[:_NUM_TOLD])}{more}")
    return ", ".join(names)
