"""What differs between two runs, and whether that was one change.

A config key that differs was set by somebody and is written down. An edit in a file is what people forget, so code
confounds a comparison unless it is declared by name. So do words of the command and variables of the environment that
no config key tells of, and counts of targets. Nobody declares data, machine, budget, the meaning of a metric or
the initial weights either: a difference there is hidden unless a config key that differs explains it. A value known for
one run only counts as a difference; one known for neither becomes a note.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from rung.compare.code import ChangedFile, CodeDiff, Ran
from rung.compare.code import diff as code_diff
from rung.compare.reading import (
    COUNTED,
    column,
    evals,
    fell_short,
    is_of_engine,
    list_of,
    mapping,
    number_of,
    part_of,
    planned_targets,
    segments_of,
)
from rung.errors import RunError
from rung.runs.fields import leaves
from rung.runs.files import read_json, to_json
from rung.runs.paths import inside
from rung.runs.query import Run

PARTS = ("config", "code", "data", "environment", "seed", "budget", "metric", "pairing")
# What a difference means for a verdict:
#   factor   what was changed on purpose, a candidate for "the one change": a config key that somebody set
#   hidden   a difference nobody declared: code, data, packages, another horizon; spoils a verdict unless allowed
#   metric   the metric itself means something else: the figures cannot be compared at all
#   follows  a consequence of a factor, as a key derived from another
#   note     shown, and harmless: the host, where files lie, how often it was logged
WEIGHTS = ("factor", "hidden", "metric", "follows", "note")
ABSENT = "absent"  # the source of a value that is not there, as opposed to one that is null

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
_NUM_FILES, _NUM_PARAMETERS = 4, 6  # shown in a sentence
CHANGED = "changed at step "  # the source of a key that a script set anew while it trained
# Sections of the engine that cannot change what data is read; any other key may be one of the recipe's data.
_NOT_DATA = ("optimizer.", "lr.", "system.", "ddp.", "guard.", "eval_", "init_from", "model.", "data.batch_size")
_MACHINE = ("host", "platform", "cpu", "memory_bytes")
# Keys of updates alone, by what scripts call them: such a key does not explain other initial weights.
_OF_TRAINING = re.compile(
    r"(\w+_)?lr|learning_rate|lr_\w+|batch_size|weight_decay|wd|momentum|betas?|beta[12]|eps|warmup\w*|(max_)?grad\w*"
    r"|clip\w*|(num_|max_|n_)?(epochs|steps|iters)|optim\w*|sched\w*|eval\w*|log\w*|save\w*",
    re.I,
)


# Variables that say where things lie, what is printed, and how many threads: those are compared as `threads`.
_HARMLESS_VARIABLES = re.compile(
    r".*(_HOME|CACHE\w*|_DIR|_PATH|_LOGS?|_LOG_LEVEL|VERBOSE|VERBOSITY|_DEBUG|_TIMEOUT\w*|_PORT|_ADDR|NUM_THREADS|_OFFLINE"
    r"|_IFNAME|PYTHONPATH|ALLOC_CONF|PARALLELISM|BLOCKING|_PROGRESS_BARS|_WARNINGS?|ASYNC_ERROR_HANDLING|TELEMETRY)"
    r"|CUDA_(DEVICE_ORDER|MODULE_LOADING|VERSION\w*)|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|REQUIRE_\w+"
    r"|PRODUCT_NAME|PYTORCH_VERSION\w*|BUILD_ID)|OMP_PROC_BIND|OMP_PLACES|GOMP_\w+|KMP_(AFFINITY|BLOCKTIME|\w+_SHM\w*)"
    r"|OPENBLAS_L2_SIZE|NCCL_(IB|SOCKET|NET|SHM|P2P)_\w+|HF_HUB_\w+|HF_ENDPOINT"
)
_OF_FLAGS = re.compile(r"tf32|precision|determin|benchmark|dtype|amp|cudnn|attention|sdp", re.I)
# Keys of a script that say how much a step takes.
_OF_COUNTS = re.compile(
    r"batch|\bbs\b|micro|accum|context|block|seq|len|rows|samples|tokens|targets|world|crop|size|mask|pack|data|task",
    re.I,
)
_OF_OUTPUT = re.compile(
    r"(do|run|no|with|skip)?[_-]?(test|eval|predict|validate|sample)\w*|\w*(out|output|dir|folder|log|logs|save|tag|note|why|name|project|experiment|entity|port|verbose|quiet|debug|wandb"
    r"|device|gpu|gpus|rank|resume_from|local_rank|num_workers|workers)\w*",
    re.I,
)


class Difference(NamedTuple):
    part: str  # one of PARTS
    name: str  # optimizer.grad_clip; model.py; torch; train
    before: Any
    after: Any
    weight: str  # one of WEIGHTS
    detail: str = ""  # in words, where the two values do not say enough
    source_before: str = ""  # who set it: default, preset tiny, command line; ABSENT
    source_after: str = ""

    @property
    def has_values(self) -> bool:
        """Whether the two values tell what changed; else only `detail` does, as of code."""
        return self.part != "code" and not (self.before is None and self.after is None)


@dataclass
class Comparison:
    """Two runs side by side. `code` holds the patch; `same` what was looked at and found equal, in words."""

    a: Run
    b: Run
    differences: list[Difference]
    code: CodeDiff
    same: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # how the runs stand: still running, diverged, shorter than planned
    unknown: list[str] = field(default_factory=list)  # what was not looked at, or not recorded

    def of(self, *weights: str) -> list[Difference]:
        return [difference for difference in self.differences if difference.weight in weights]


def compare(a: Run, b: Run, *, has_rows: bool = True) -> Comparison:
    """Everything that differs from `a` to `b`; raises RunError where a file of a run is damaged.

    Without `has_rows` the rows stay unread, and whether each step saw the same data unknown: enough for a listing.
    """
    code = code_diff(a, b)
    same: list[str] = []
    of_code = list(_code(a, b, code, same))
    config = list(_config(a, b, is_other_code=any(d.weight == "hidden" for d in of_code)))
    keys = [d.name for d in config if d.weight == "factor"]
    # A file that one run alone imported: another key or another file asked for it, or else nobody knows why.
    causes = [*keys, *(d.name for d in of_code if d.weight == "hidden")]
    for place, one in enumerate(of_code):
        if one.weight == "lone":
            more = f"; follows from {', '.join(causes[:_NUM_FILES])}" if causes else ""
            of_code[place] = one._replace(weight="follows" if causes else "hidden", detail=one.detail + more)
    config += _command(a, b, code)
    data = list(_data(a, b, keys, same))
    differences = [*config, *of_code, *data, *_environment(a, b, keys, same, code.ran)]
    seeds = a.document.get("seed"), b.document.get("seed")
    if seeds[0] != seeds[1]:
        differences.append(Difference("seed", "seed", *seeds, "hidden"))
    elif seeds[0] is None:
        differences.append(Difference("seed", "seed", None, None, "note", "neither run says its seed"))
    else:
        same.append(f"seed ({seeds[0]})")
    differences += _budget(a, b, same)
    if has_rows:
        differences += _counts(a, b, keys, same)
    differences += _metric(a, b, same, has_rows)
    differences += _pairing(a, b, keys, same)
    if has_rows and not any(d.weight in ("hidden", "follows") for d in data):
        differences += _batches(a, b, same)

    # What to know of a run before its figures are read.
    notes = []
    if a.path == b.path or (a.document.get("uid") and a.document.get("uid") == b.document.get("uid")):
        notes.append(f"both are the same run, {a.id}")
    for run in (a, b):
        if run.status != "finished":
            notes.append(f"{run.id} is {run.status_text}, at step {'none' if run.step is None else run.step}")
        if run.status != "running" and (did := fell_short(run)):
            notes.append(f"{run.id} did {did}")
    return Comparison(a, b, differences, code, same, notes, _unknown(a, b, code, has_rows))


def _unknown(a: Run, b: Run, code: CodeDiff, has_rows: bool) -> list[str]:
    """What this comparison says nothing of, because no record holds it."""
    found = list(code.unknown)
    if code.problem:
        found.append("files of the folders that were kept")
    elif code.is_executed:
        found.append("files read under names that no executed source spells out, where git ignores them")
    silent = [run.id for run in (a, b) if mapping(run.data().get("train")).get("fingerprint") is None]
    if silent:
        found.append(f"the data of {' and '.join(dict.fromkeys(silent))}")
    if has_rows:
        silent = [run.id for run in (a, b) if not column(run, "targets").values]
        if silent:
            found.append(f"how many targets {' and '.join(dict.fromkeys(silent))} counted")
    if not (a.initial_weights() and b.initial_weights()):
        found.append("the initial weights")
    return [*found, "libraries outside of Python", "the load of the machine"]


def _command(a: Run, b: Run, code: CodeDiff) -> Iterator[Difference]:
    """Words of the commands of two scripts that no config key tells of: `--accumulate 8` of a script that recorded no
    config. In rung's own training the config holds whatever a command said.

    A key tells of a word that has its name, or that changes as the key does; so do seed, parent and why.
    """
    if is_of_engine(a) or is_of_engine(b):
        return
    sides: list[dict[str, str]] = []
    told_of = [
        dict(leaves(run.config())) | {name: run.document.get(name) for name in ("seed", "parent", "why")}
        for run in (a, b)
    ]
    changes = [
        tuple(_plain(told.get(name)) for told in told_of)
        for name in dict.fromkeys([*told_of[0], *told_of[1]])
        if told_of[0].get(name) != told_of[1].get(name)
    ]
    for run, ran in zip((a, b), code.ran):
        if ran is None or ran.document.get("main") in ("notebook", "session"):
            return
        told = [name.lower().replace("-", "_") for name, _ in leaves(run.config())]
        names = {*told, *(name.rpartition(".")[2] for name in told)}
        words, found, place = [str(word) for word in list_of(ran.document.get("command"))[1:]], {}, 0
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if word.startswith("-") and not re.fullmatch(r"-[\d.]+(e-?\d+)?", word):
                if not equals and words and not words[0].startswith("--"):
                    value = words.pop(0)
            elif not equals:
                name, value, place = f"word {place + 1}", word, place + 1
            plain_name = name.lstrip("-").lower().replace("-", "_")
            if plain_name in names or plain_name.removeprefix("no_") in names:
                continue  # the config has it
            if plain_name in ("seed", "random_seed") and run.document.get("seed") is not None:
                continue
            found[name] = value
        sides.append(found)
    was, now = sides
    differing = []
    for name in dict.fromkeys([*was, *now]):
        said = [_plain(side[name]) if side.get(name) else None for side in (was, now)]
        is_told = any(all(word in (None, value) for word, value in zip(said, change)) for change in changes)
        if was.get(name) != now.get(name) and not (is_told and said != [None, None]):
            differing.append(name)
    for weight, chosen in (
        ("hidden", [name for name in differing if not _OF_OUTPUT.fullmatch(name.lstrip("-"))]),
        ("note", [name for name in differing if _OF_OUTPUT.fullmatch(name.lstrip("-"))]),
    ):
        if chosen:
            before, after = (
                " ".join(
                    one[name] if name.startswith("word ") else f"{name}={one[name]}" if one[name] else name
                    for name in chosen
                    if name in one
                )
                for one in sides
            )
            detail = "no config key tells of it" if weight == "hidden" else "where output goes"
            yield Difference("config", "command line", before, after, weight, detail, "command line", "command line")


def _plain(value: Any) -> float | str:
    """As a number where it is one: a command says 3e-4, a config 0.0003."""
    try:
        return float(str(value))
    except ValueError:
        return str(value)


def _config(a: Run, b: Run, is_other_code: bool) -> Iterator[Difference]:
    trees = []
    for run in (a, b):
        tree = run.config()
        if not isinstance(tree, dict):
            raise RunError(f"{run.path / 'config.yaml'} is damaged: it holds no keys.", code="run-damaged")
        trees.append(dict(leaves(tree)))
    was, now = trees
    sources = (a.sources(), b.sources())
    names = []
    for name in dict.fromkeys([*was, *now]):
        is_of_one_kind = name in was and name in now and isinstance(was[name], bool) == isinstance(now[name], bool)
        # As JSON too, where NaN is equal to NaN.
        if not is_of_one_kind or (was[name] != now[name] and to_json(was[name]) != to_json(now[name])):
            names.append(name)
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


def _code(a: Run, b: Run, code: CodeDiff, same: list[str]) -> Iterator[Difference]:
    def name_of(run: Run) -> str | None:
        kept = part_of(run, "code")
        return next((str(kept[key])[:12] for key in ("commit", "sha256") if kept.get(key)), None)

    if code.problem:
        yield Difference("code", "code", name_of(a), name_of(b), "hidden", f"unknown: {code.problem}")
    elif not any(_weight_of_file(file) != "note" for file in code.files):
        same.append(f"{code.num_executed} executed files" if code.is_executed else f"code ({name_of(a)})")
    for file in code.files:
        count = "binary" if file.added is None else f"+{file.added} -{file.removed}"
        detail = {"A": f"new, {count}", "D": f"gone, {count}"}.get(file.status, count)
        if file.why:
            detail = file.why if file.added is None else f"{detail}; {file.why}"
        yield Difference("code", file.path, file.removed, file.added, _weight_of_file(file), detail)
    for one in code.resumed:
        is_harmless = not one.problem and all(_weight_of_file(file) == "note" for file in one.files)
        what = one.problem or ", ".join(file.path for file in one.files)
        detail = f"{one.run_id} continued at step {one.step} with other code: {what}"
        yield Difference("code", f"resume of {one.run_id}", None, None, "note" if is_harmless else "hidden", detail)


def _weight_of_file(file: ChangedFile) -> str:
    path = PurePosixPath(file.path)
    is_document = path.suffix.lower() in _DOCUMENTS or path.name in _DOCUMENT_NAMES
    return "note" if is_document else file.weight


# Nobody declares what follows. `keys` are the config keys that differ; `same` is told what was found equal.


def _data(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    """What was trained on; eval sets are left to `_metric`."""
    was, now = a.data(), b.data()
    evaluated = {str(row["set"]) for run in (a, b) for row in evals(run)}
    names = [name for name in dict.fromkeys([*was, *now]) if name == "train" or name not in evaluated]
    if not names:
        yield Difference("data", "train", None, None, "note", "neither run says what data it read")
    if not (is_of_engine(a) and is_of_engine(b)):
        # The keys of a script may be any: only one that says so explains other data, as data_dir and dataset.name.
        keys = [key for key in keys if any(part.startswith("data") for part in key.split("."))]
    for name in names:
        old, new = mapping(was.get(name)), mapping(now.get(name))
        before, after = old.get("fingerprint"), new.get("fingerprint")
        if before == after and before is not None:
            same.append(f"data of {name} ({before}, {old.get('rows')} rows)")
        elif before is None or after is None:
            weight = "note" if before is after else "hidden"
            whom = "neither run says" if before is after else f"{(a if before is None else b).id} does not say"
            yield Difference("data", name, before, after, weight, f"{whom} what data it read")
        else:
            causes = [key for key in keys if not key.startswith(_NOT_DATA)]
            # A fingerprint begins with the store, then says how rows are cut from it: another context explains other
            # rows of the same store, never another store.
            stores = [str(one).partition("/") for one in (before, after)]
            if stores[0][1] and stores[1][1] and stores[0][0] != stores[1][0]:
                causes = [key for key in causes if key.startswith("dataset.")]
            about = [{**mapping(one.get("about")), "rows": one.get("rows")} for one in (old, new)]
            changes = _changes(about[0], about[1])
            detail = "; ".join(filter(None, [changes, f"follows from {', '.join(causes)}" if causes else ""]))
            yield Difference("data", name, before, after, "follows" if causes else "hidden", detail)


def _environment(
    a: Run, b: Run, keys: Collection[str], same: list[str], ran: tuple[Ran | None, Ran | None]
) -> Iterator[Difference]:
    """What it ran on, at the start of each run; and what an attempt of one run changed about it."""
    was, now = _environments(a), _environments(b)
    if not was[0] and not now[0]:
        yield Difference("environment", "environment", None, None, "note", "neither run says what it ran on")
    elif not was[0] or not now[0]:
        whom = a.id if not was[0] else b.id
        yield Difference("environment", "environment", None, None, "hidden", f"{whom} does not say what it ran on")
    else:
        documents = None if ran[0] is None or ran[1] is None else (ran[0].document, ran[1].document)
        imported = None if documents is None else [mapping(one.get("packages")) for one in documents]
        found = list(_changed_environment(was[0], now[0], (a.id, b.id), imported))
        if documents is not None:
            found += _variables(documents, (a, b), (was[0], now[0]))
            found += _flags(documents, keys)
        # What was chosen for the run: `auto` in both configs may mean two devices.
        chosen = [part_of(run, "derived") for run in (a, b)]
        for name in ("device", "dtype", "num_ranks", "threads"):
            before, after = (one.get(name) for one in chosen)
            if before != after:
                is_asked = name == "dtype" and "system.dtype" in keys
                weight = "follows" if is_asked else "note" if name == "threads" else "hidden"
                found.append(Difference("environment", name, before, after, weight))
        if not any(difference.weight == "hidden" for difference in found):
            counted = len(mapping(was[0].get("packages"))) if imported is None else len(imported[0])
            same.append(f"python, torch, device and {counted} packages{'' if imported is None else ' as imported'}")
        yield from found
    for run, attempts in ((a, was), (b, now)) if a.path != b.path else ((a, was),):
        for number, later in enumerate(attempts[1:], 1):
            ids = ("its start", "a resume")
            if changed := [d for d in _changed_environment(attempts[0], later, ids) if d.weight == "hidden"]:
                changes = ", ".join(f"{d.name} {d.detail or f'{d.before} -> {d.after}'}" for d in changed)
                detail = f"attempt {number} of {run.id} ran in another environment than its start: {changes}"
                yield Difference("environment", "resume", None, None, "hidden", detail)


def _environments(run: Run) -> list[Mapping[str, Any]]:
    """One per attempt that has a file of its own, the first first; {} where there is none."""
    names = [str(part.get("env") or "env.json") for part in segments_of(run)] or ["env.json"]
    found: list[Mapping[str, Any]] = []
    for name in dict.fromkeys(names):
        path = inside(run.path, name.rpartition("/")[2])
        try:
            found.append(mapping(read_json(path)))
        except FileNotFoundError:
            found.append({})
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}.", code="run-damaged") from error
    return [found[0], *(one for one in found[1:] if one)]


def _changed_environment(
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    ids: tuple[str, str],
    imported: Sequence[Mapping[str, Any]] | None = None,
) -> Iterator[Difference]:
    """`imported` are the packages of both runs as they were loaded: then others that are installed are a note."""
    sides, loaded = [], []
    for place, env in enumerate((was, now)):
        packages = dict(mapping(env.get("packages")))
        loaded.append({} if imported is None else {_same_name(n): n for n in imported[place]})
        if imported is not None:  # under the names that metadata has; of two installed ones, that which was loaded
            called = {_same_name(name): name for name in packages}
            packages |= {called.get(_same_name(name), name): version for name, version in imported[place].items()}
        gpus = [gpu for gpu in list_of(env.get("gpus")) if isinstance(gpu, dict)]
        named = {
            "python": f"{env.get('implementation', '')} {env.get('python')}".strip(),
            "torch": packages.pop("torch", None),
            # Version and source: a checkout that is being worked on has one version and many states.
            "rung": f"{packages.pop('rung', None)}, source {env.get('rung_sha256') or 'unknown'}",
            "GPU": ", ".join(str(gpu.get("name")) for gpu in gpus),
            "driver": ", ".join(str(gpu.get("driver")) for gpu in gpus),
        }
        sides.append((named, packages))
    (named_before, old), (named_after, new) = sides
    for name, before in named_before.items():
        after = named_after[name]
        if before != after:
            detail = "" if before and after else f"{ids[1] if before else ids[0]} does not say"
            yield Difference("environment", name, before, after, "hidden", detail)
    names = [name for name in sorted(old.keys() | new.keys(), key=str.lower) if old.get(name) != new.get(name)]

    def is_loaded(name: str) -> bool:
        """By both, or by one where the other has no such package: a script may do without it."""
        by = [_same_name(name) in one for one in loaded]
        return all(by) or (by[0] and name not in new) or (by[1] and name not in old)

    of_loaded = names if imported is None else [name for name in names if is_loaded(name)]
    others = [name for name in names if name not in of_loaded]
    for part, chosen, weight in (("packages", of_loaded, "hidden"), ("other packages", others, "note")):
        if chosen:
            parts = [{n: packages[n] for n in chosen if n in packages} for packages in (old, new)]
            detail = _changes(parts[0], parts[1], ids)
            if weight == "note":
                detail = f"installed, and not loaded by both: {detail}"
            yield Difference("environment", part, parts[0], parts[1], weight, detail)
    for name in _MACHINE:
        if was.get(name) != now.get(name):
            yield Difference("environment", name, was.get(name), now.get(name), "note")


def _same_name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _variables(
    documents: Sequence[Mapping[str, Any]], runs: tuple[Run, Run], environments: Sequence[Mapping[str, Any]]
) -> Iterator[Difference]:
    """Variables of the environment: those that libraries compute by, and those that the executed files read."""
    was, now = (mapping(one.get("variables")) for one in documents)
    read = {str(name) for one in documents for name in list_of(one.get("read_variables"))}
    trees = [dict(leaves(run.config())) for run in runs]
    for name in sorted(was.keys() | now.keys()):
        before, after = was.get(name), now.get(name)
        if before == after:
            continue
        keys = [key for key in trees[0].keys() & trees[1].keys() if key.rpartition(".")[2].lower() == name.lower()]
        visible = []
        for value, env in zip((before, after), environments):
            gpus = [str(mapping(gpu).get("name")) for gpu in list_of(env.get("gpus"))]
            chosen = gpus if value is None else [word for word in str(value).split(",") if word.strip()]
            by_number = [gpus[int(w)] for w in chosen if w.strip().isdecimal() and int(w) < len(gpus)]
            visible.append(chosen if value is None else by_number if len(by_number) == len(chosen) else chosen)
        if any(trees[0][key] != trees[1][key] for key in keys):
            weight, detail = "follows", f"follows from {keys[0]}"
        elif name == "CUDA_VISIBLE_DEVICES":
            has_gpus = any(list_of(env.get("gpus")) for env in environments)
            weight = "hidden" if has_gpus and visible[0] != visible[1] else "note"
            detail = "" if weight == "hidden" else "devices of one kind" if has_gpus else "neither run saw a GPU"
        elif _HARMLESS_VARIABLES.fullmatch(name):
            weight, detail = "note", ""
        else:
            weight, detail = "hidden", "read by a file that was executed" if name in read else ""
        yield Difference("environment", name, before, after, weight, detail)


def _flags(documents: Sequence[Mapping[str, Any]], keys: Collection[str]) -> Iterator[Difference]:
    """How torch computes, as it was set when training began or later."""
    states = [[mapping(one) for one in list_of(document.get("flags"))] for document in documents]
    if not all(states):
        return
    was, now = (state[-1] for state in states)
    for name in (name for name in was if name in now and was[name] != now[name]):
        causes = [key for key in keys if _OF_FLAGS.search(key)]
        detail = f"follows from {', '.join(causes)}" if causes else ""
        weight = "follows" if causes else "hidden"
        yield Difference("environment", f"torch {name}", was[name], now[name], weight, detail)
    if was == now and len(states[0]) != len(states[1]):
        detail = "torch's flags changed while one of the runs trained"
        yield Difference("environment", "torch flags", len(states[0]), len(states[1]), "note", detail)


def _budget(a: Run, b: Run, same: list[str]) -> Iterator[Difference]:
    """How long it trains: steps, the horizon of the schedule, targets in all.

    Another number of steps is hidden even where a config key asked for it: no two points of the curves match.
    """
    derived = [part_of(run, "derived") for run in (a, b)]
    steps = [number_of(one.get("num_steps")) for one in derived]
    if None in steps:  # no budget is declared, as in one's own loop: then how far they came
        planned = [one.get("num_steps") for one in derived]
        if planned[0] != planned[1]:
            whom = a.id if planned[0] is None else b.id
            yield Difference("budget", "num_steps", planned[0], planned[1], "hidden", f"{whom} declares no budget")
        elif (lasts := [_trained_steps(run) for run in (a, b)])[0] != lasts[1]:
            detail = "the last step; neither run declares a budget"
            yield Difference("budget", "last_step", lasts[0], lasts[1], "hidden", detail)
        return
    ends = "the schedules end at different steps; points in the middle of a schedule cannot be compared"
    horizons = [number_of(one.get("decay_steps")) for one in derived]
    targets = [planned_targets(run) for run in (a, b)]
    if steps[0] != steps[1]:
        equal = "; targets in all are equal" if targets[0] == targets[1] is not None else ""
        yield Difference("budget", "num_steps", steps[0], steps[1], "hidden", ends + equal)
    elif targets[0] != targets[1]:
        yield Difference("budget", "targets", targets[0], targets[1], "hidden", "targets in all; steps are equal")
    if horizons[0] != horizons[1] and (steps[0] == steps[1] or steps != horizons):
        yield Difference("budget", "decay_steps", horizons[0], horizons[1], "hidden", ends)
    if steps[0] == steps[1] and targets[0] == targets[1] and horizons[0] == horizons[1]:
        about = f", about {targets[0]:.0f} targets" if targets[0] is not None else ""
        same.append(f"budget ({steps[0]:g} steps{about})")


def _trained_steps(run: Run) -> int | None:
    """How far training came: an eval after it, as Lightning's `test` is, has a number of its own and trains nothing."""
    steps = part_of(run, "totals").get("step")
    return steps if type(steps) is int and steps > 0 else run.step


def _counts(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    """Predictions and rows as they were counted, a step and in all. What a config says of them may be wrong, or absent:
    a number in a file that nobody recorded changes them all the same."""
    is_same_seed = a.document.get("seed") == b.document.get("seed") is not None
    for name in COUNTED:
        columns = [column(run, name) for run in (a, b)]
        if not all(one.values for one in columns):
            continue
        was, now = (dict(zip(one.steps, one.values)) for one in columns)
        shared = [step for step in was if step in now and math.isfinite(was[step]) and math.isfinite(now[step])]
        if len(shared) < 2:
            continue
        old, new = ([of[step] for step in shared] for of in (was, now))
        sums = [math.fsum(old), math.fsum(new)]
        if not any(sums):
            continue
        # Rows of other lengths come in another order with another seed: what their means may differ by is their spread.
        spread = 0.0
        if not is_same_seed:
            mean = (sums[0] - sums[1]) / len(shared)
            spread = 4 * math.sqrt(math.fsum((x - y - mean) ** 2 for x, y in zip(old, new)))
        if abs(sums[0] - sums[1]) <= 1e-6 * max(map(abs, sums)) + spread:
            same.append(f"{name} of {len(shared)} steps")
            continue
        means = [total / len(shared) for total in sums]
        totals = [math.fsum(v for v in one.values if math.isfinite(v)) for one in columns]
        is_equal_in_all = abs(totals[0] - totals[1]) <= max(1e-2 * max(map(abs, totals)), *means)
        declared = [planned_targets(run) for run in (a, b)]
        causes = [key for key in keys if is_of_engine(a) or _OF_COUNTS.search(key.rpartition(".")[2])]
        if causes and (is_equal_in_all or None not in declared):  # what was planned is compared as the budget
            weight, detail = "follows", f"follows from {', '.join(causes)}"
        else:
            weight = "hidden"
            detail = f"mean over {len(shared)} shared steps; {totals[0]:.6g} and {totals[1]:.6g} in all"
            detail += f", from {', '.join(causes)}" if causes else ""
        old_mean, new_mean = (float(f"{mean:.6g}") for mean in means)
        yield Difference("budget", f"{name} a step", old_mean, new_mean, weight, detail)


def _metric(a: Run, b: Run, same: list[str], has_rows: bool) -> Iterator[Difference]:
    """What each eval counts. Sets that only one run evaluates are notes."""
    definitions = [a.definitions(), b.definitions()]
    sets = sorted({f"eval/{row['set']}" for run in (a, b) for row in evals(run)})
    for name in dict.fromkeys([*definitions[0], *definitions[1], *sets]):
        known = [name in one for one in definitions]
        if all(known):
            before, after = (one if isinstance(one := of[name], dict) else {"definition": one} for of in definitions)
            # A part of a loss that differs as its whole eval set does is told with that.
            of_set = "/".join(name.split("/")[:2])
            is_part = of_set != name and all(of_set in one for one in definitions)
            wholes = [mapping(one.get(of_set)) for one in definitions]
            changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
            if is_part and all(wholes[0].get(key) != wholes[1].get(key) for key in changed):
                continue
            if not changed:
                same.append(f"definition of {name}")
            else:
                old, new = _differing(before, after)
                yield Difference("metric", name, old, new, "metric", _changes(before, after))
            continue
        is_seen = []  # as an eval set "eval/val", an eval metric "val/loss" or a metric of the rows
        for run, is_known in zip((a, b), known):
            names = (n for row in evals(run) for n in (f"eval/{row['set']}", *(f"{row['set']}/{key}" for key in row)))
            is_seen.append(is_known or name in names or (has_rows and bool(column(run, name).values)))
        if is_seen != [True, True]:
            yield Difference("metric", name, known[0], known[1], "note", f"only {(a if is_seen[0] else b).id} has it")
        elif any(known):
            whom = b.id if known[0] else a.id
            yield Difference("metric", name, known[0], known[1], "hidden", f"{whom} does not say what it counts")
        else:  # older runs say of an eval set what it is, not what is counted in it
            stream = name.removeprefix("eval/")
            was, now = (mapping(run.data().get(stream)).get("fingerprint") for run in (a, b))
            detail = "another eval set" if was != now else "neither run says what it counts"
            yield Difference("metric", name, was, now, "metric" if was != now else "note", detail)
    counts = [
        {row["set"]: row["targets"] for row in evals(run) if isinstance(row.get("targets"), int | float)}
        for run in (a, b)
    ]
    for name in sorted(counts[0].keys() & counts[1].keys()):
        if counts[0][name] != counts[1][name]:
            detail = "targets of an eval: mask, ignored ids or rows differ"
            yield Difference("metric", f"targets of {name}", counts[0][name], counts[1][name], "metric", detail)


def _pairing(a: Run, b: Run, keys: Collection[str], same: list[str]) -> Iterator[Difference]:
    """Whether runs of one seed began with the same weights; runs of two seeds never do."""
    before, after = (part_of(run, "derived").get("weights_from") for run in (a, b))
    if before != after:
        is_asked = "init_from" in keys
        detail = "follows from init_from" if is_asked else "init_from led to another checkpoint"
        yield Difference("pairing", "weights_from", before, after, "follows" if is_asked else "hidden", detail)
    if a.document.get("seed") != b.document.get("seed"):
        return

    was, now = a.initial_weights(), b.initial_weights()
    if not was or not now:
        if was or now:
            whom = b.id if was else a.id
            detail = f"{whom} does not say what its weights were before the first update"
            yield Difference("pairing", "initial weights", None, None, "note", detail)
        return
    shapes = [{name: list_of(entry)[:1] for name, entry in weights.items()} for weights in (was, now)]
    shared = [name for name in was if shapes[0][name] == shapes[1].get(name)]
    other = [name for name in shared if was[name] != now[name]]
    lone = len(was.keys() | now.keys()) - len(shared)
    if other:
        causes = []
        if a.document.get("seed") is not None:
            causes = [key for key in keys if not key.startswith(("optimizer.", "lr."))
                      and not _OF_TRAINING.fullmatch(key.rpartition(".")[2])]  # fmt: skip
        detail = f"{len(other)} of {len(shared)} parameters of equal name and shape start from other values: "
        detail += ", ".join(other[:_NUM_PARAMETERS]) + (f"; follows from {', '.join(causes)}" if causes else "")
        weight = "follows" if causes else "hidden"
        yield Difference("pairing", "initial weights", was[other[0]], now[other[0]], weight, detail)
    else:
        same.append(f"initial weights of {len(shared)} parameters" + (f"; {lone} differ in shape" if lone else ""))


def _batches(a: Run, b: Run, same: list[str]) -> Iterator[Difference]:
    """Whether the steps of runs of one seed, with as many rows each of the same data, saw the same rows."""
    rows = [part_of(run, "derived").get("rows_per_step") for run in (a, b)]
    if a.document.get("seed") != b.document.get("seed") or rows[0] != rows[1]:
        return
    was, now = column(a, "batch_hash"), column(b, "batch_hash")
    if was.values and (was.steps, was.values) == (now.steps, now.values):
        same.append(f"rows of all {len(was.values)} shared steps")
        return
    old, new = (dict(zip(one.steps, one.values)) for one in (was, now))
    shared = sorted(old.keys() & new.keys())
    other = [step for step in shared if old[step] != new[step]]
    if other:
        detail = f"other rows at {len(other)} of {len(shared)} shared steps, from step {other[0]}"
        yield Difference("pairing", "batches", old[other[0]], new[other[0]], "hidden", detail)
    elif shared:
        same.append(f"rows of all {len(shared)} shared steps")
    else:
        silent = [run.id for run, hashes in ((a, old), (b, new)) if not hashes]
        whom = ["no step is in both records", f"{' '.join(silent)} does not say", "neither run says"][len(silent)]
        detail = f"{whom} which rows a step saw" if silent else whom
        yield Difference("pairing", "batches", None, None, "note", detail)


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [n for n in dict.fromkeys([*before, *after]) if (n in before, before.get(n)) != (n in after, after.get(n))]
    return {n: before[n] for n in names if n in before}, {n: after[n] for n in names if n in after}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], ids: tuple[str, str] = ("", "")) -> str:
    """What differs between two mappings, as text."""
    old, new = _differing(before, after)
    changes = []
    for name in dict.fromkeys([*old, *new]):
        if name in old and name in new:
            changes.append(f"{name} {old[name]} -> {new[name]}")
        else:
            value, whom = (old[name], ids[0] or "the first") if name in old else (new[name], ids[1] or "the second")
            changes.append(f"{name} {value} only in {whom}")
    return ", ".join(changes)


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
        words = f"not an A/B: nothing that was recorded differs{besides}"
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
        more = f" and {len(files) - _NUM_FILES} more" if len(files) > _NUM_FILES else ""
        names.append("code" if files == ["code"] else f"code: {', '.join(files[:_NUM_FILES])}{more}")
    return ", ".join(names)
