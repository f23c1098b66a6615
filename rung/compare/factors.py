"""What differs between two runs, and whether that was one change.

Code is not a declared factor. A config key that differs was set by somebody and is written down; an edit in a file is
what people forget, so it confounds a comparison unless it is declared by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from rung.compare import conditions
from rung.compare.code import ChangedFile, CodeDiff
from rung.compare.code import diff as code_diff
from rung.compare.difference import ABSENT, PARTS, WEIGHTS, Comparison, Difference
from rung.compare.reading import fell_short, is_of_engine, part_of
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
_NUM_SHOWN = 4
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
    environment = list(conditions.environment(a, b, keys, same))

    of_seed, seeds = [], (a.document.get("seed"), b.document.get("seed"))
    if seeds[0] != seeds[1]:
        of_seed.append(Difference("seed", "seed", *seeds, "hidden"))
    elif seeds[0] is None:
        of_seed.append(Difference("seed", "seed", None, None, "note", "neither run says its seed"))
    else:
        same.append(f"seed ({seeds[0]})")

    differences = [
        *config,
        *of_code,
        *data,
        *environment,
        *of_seed,
        *conditions.budget(a, b, same),
        *conditions.metric(a, b, same, has_rows),
        *conditions.pairing(a, b, keys, same),
        *(conditions.batches(a, b, same) if has_rows and is_same_data else ()),
    ]

    # What to know of a run before its figures are read.
    notes = []
    if a.path == b.path or (a.document.get("uid") and a.document.get("uid") == b.document.get("uid")):
        notes.append(f"both are the same run, {a.id}")
    for run in (a, b):
        if run.status != "finished":
            notes.append(f"{run.id} is {run.status_text}, at step {'none' if run.step is None else run.step}")
        if run.status != "running" and (did := fell_short(run)):
            notes.append(f"{run.id} did {did}")
    return Comparison(a, b, differences, code, same, notes)


def _config(a: Run, b: Run, is_other_code: bool) -> Iterator[Difference]:
    trees = []
    for run in (a, b):
        tree = run.config()
        if not isinstance(tree, dict):
            raise RunError(f"{run.path / 'config.yaml'} is damaged: it holds no keys.", code="run-damaged")
        trees.append(dict(leaves(tree)))
    was, now = trees
    sources = (a.sources(), b.sources())
    names = [name for name in dict.fromkeys([*was, *now]) if not _is_equal(name, was, now)]
    if a.document.get("recipe") != b.document.get("recipe"):
        yield Difference("config", "recipe", a.document.get("recipe"), b.document.get("recipe"), "factor")
    is_known = is_of_engine(a) and is_of_engine(b)
    is_plateau = "plateau" in (was.get("lr.schedule"), now.get("lr.schedule"))
    cuts: list[list[Any]] = [[tree.get(name) for name in _CUT] for tree in (was, now)]
    has_cuts = is_known and all(type(number) is int for cut in cuts for number in cut)
    is_same_rows = has_cuts and math.prod(cuts[0]) == math.prod(cuts[1])

    for name in names:
        if name == "seed" and a.document.get("seed") != b.document.get("seed"):
            continue  # reported as the seed
        set_by = [str(sources[i].get(name, "")) if name in tree else ABSENT for i, tree in enumerate((was, now))]
        origins = {source.partition(": from ")[2] for source in set_by}
        if len(origins) == 1 and (origin := origins.pop()) in names:
            weight, detail = "follows", f"follows from {origin}"
        elif set(set_by) == {ABSENT, "default"} and is_other_code:
            weight, detail = "follows", "the key was added or removed with the code"
        else:
            changed = [source for source in set_by if source.startswith(CHANGED)]
            weight, detail = "factor", ", ".join(dict.fromkeys(changed))
        if weight == "factor" and is_known:
            if name in _CUT and is_same_rows:
                rows = math.prod(cuts[0])
                weight, detail = "note", f"the same {rows} rows a step, split differently: only dropout draws differ"
            elif name == "eval_iters":
                weight, detail = "metric", "evals see other rows"
            elif name.startswith(NO_LEARNING) and not (name == "eval_interval" and is_plateau):
                weight = "note"
        yield Difference("config", name, was.get(name), now.get(name), weight, detail, *set_by)

    # Keys that end alike, and that a script set anew while it trained: the config holds the last value only.
    for name in (name for name in was if name in now and name not in names):
        set_by = [str(one.get(name, "")) for one in sources]
        changed = [f"{source} of the {which}" for source, which in zip(set_by, ("first", "second"))
                   if source.startswith(CHANGED)]  # fmt: skip
        if set_by[0] != set_by[1] and changed:
            detail = f"{', '.join(changed)}: it was another value before"
            yield Difference("config", name, was[name], now[name], "hidden", detail, *set_by)


def _is_equal(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if name not in was or name not in now or isinstance(was[name], bool) != isinstance(now[name], bool):
        return False
    return bool(was[name] == now[name]) or to_json(was[name]) == to_json(now[name])  # NaN is equal to NaN here


def _code(a: Run, b: Run, code: CodeDiff, same: list[str]) -> Iterator[Difference]:
    def name_of(run: Run) -> str | None:
        kept = part_of(run, "code")
        return next((str(kept[key])[:12] for key in ("commit", "sha256") if kept.get(key)), None)

    if code.problem:
        yield Difference("code", "code", name_of(a), name_of(b), "hidden", f"unknown: {code.problem}")
    elif not code.files:
        same.append(f"code ({name_of(a)})")
    for file in code.files:
        count = "binary" if file.added is None else f"+{file.added} -{file.removed}"
        detail = {"A": f"new, {count}", "D": f"gone, {count}"}.get(file.status, count)
        yield Difference("code", file.path, file.removed, file.added, _weight_of_file(file), detail)
    for one in code.resumed:
        is_harmless = not one.problem and all(_weight_of_file(file) == "note" for file in one.files)
        what = one.problem or ", ".join(file.path for file in one.files)
        detail = f"{one.run_id} continued at step {one.step} with other code: {what}"
        yield Difference("code", f"resume of {one.run_id}", None, None, "note" if is_harmless else "hidden", detail)


def _weight_of_file(file: ChangedFile) -> str:
    path = PurePosixPath(file.path)
    is_document = path.suffix.lower() in _DOCUMENTS or path.name in _DOCUMENT_NAMES
    return "note" if is_document else "hidden"


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
    accepted = [d for d in weighty if d not in meant and (d.part in allowed or d.name in allowed)]
    rest = [d for d in weighty if d not in meant and d not in accepted]
    factors = [d for d in rest if d.weight == "factor"]
    hidden = [d for d in rest if d.weight != "factor"]
    if declared is not None and not meant:
        words = f"not a strict A/B: {declared} was declared as the change, and does not differ"
        return Strictness(False, None, [*factors, *hidden], accepted, words)
    if len(meant) == 1:
        factors.insert(0, meant[0]._replace(weight="factor"))
    elif meant:  # several differences of the part that was declared, as one
        names = ", ".join(d.name for d in meant)
        factors.insert(0, Difference(meant[0].part, str(declared), None, None, "factor", names))

    factor = factors[0] if len(factors) == 1 else None
    besides = f" (allowed: {_listed(accepted)})" if accepted else ""
    if factor is not None and not hidden:
        return Strictness(True, factor, [], accepted, f"strict A/B: {change_of(factor)}{besides}")
    if not factors and not hidden:
        words = f"not an A/B: nothing that matters differs{besides}"
    elif not factors and all(d.part == "seed" for d in hidden):
        words = f"not an A/B: a repeat with another seed{besides}"
    else:
        counts = []
        if factor is None:
            counts.append(f"{len(factors)} factors ({_listed(factors)})" if factors else "no factor")
        if hidden:
            num = len({d.name if d.part != "code" else "code" for d in hidden})
            counts.append(f"{num} confounder{'s' if num != 1 else ''} ({_listed(hidden)})")
        beside = f" beside {change_of(factor)}" if factor is not None else ""
        words = f"not a strict A/B: {', '.join(counts)}{beside}{besides}"
    confounders = hidden if factor is not None else [*factors, *hidden]
    return Strictness(False, factor, confounders, accepted, words)


def change_of(difference: Difference) -> str:
    """optimizer.grad_clip 1.0 -> 0.5; for code the files."""
    if not difference.has_values:
        return f"{difference.name} ({difference.detail})" if difference.detail else difference.name
    before = "(absent)" if difference.source_before == ABSENT else difference.before
    after = "(absent)" if difference.source_after == ABSENT else difference.after
    return f"{difference.name} {before} -> {after}"


def _listed(differences: Sequence[Difference]) -> str:
    """Names, the files of the code as one."""
    files = [d.name for d in differences if d.part == "code"]
    names = [d.name for d in differences if d.part != "code"]
    if files:
        more = f" and {len(files) - _NUM_SHOWN} more" if len(files) > _NUM_SHOWN else ""
        names.append("code" if files == ["code"] else f"code: {', '.join(files[:_NUM_SHOWN])}{more}")
    return ", ".join(names)
