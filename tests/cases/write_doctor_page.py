"""Writes the generated parts of docs/doctor.md: the catalogue, and how well it does on the cases.

    python -m tests.cases.write_doctor_page --catalogue    the table of rules, at once
    python -m tests.cases.write_doctor_page                that, and the figures: every case, its twin with five seeds
    python -m tests.cases.write_doctor_page --keep FILE    the same, and what FILE knows is not run again
    python -m tests.cases.write_doctor_page --seeds 2      the same with two seeds
    python -m tests.cases.write_doctor_page --scripts      the table of rules, and the figures of training scripts

The figures are measured as test_cases.py judges them: a sick case counts as caught when its rule speaks with at least
the severity that the case asks for; every other rule that says sick there, and whatever says warn of a twin, is a false
alarm. Every case that a training script can have is run as one too, its twin with one seed.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import multiprocessing
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

from rung.doctor.finding import SEVERITIES
from rung.doctor.rules import catalogue
from tests.cases.case import Ask, Trained
from tests.cases.catalog import cases
from tests.cases.script import script_case
from tests.cases.test_cases import SEEDS, at_least

PAGE = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
CATALOGUE, FIGURES, IN_SCRIPTS = "catalogue", "figures", "figures of scripts"
ROWS = (
    "loss", "loss_se", "norm", "norm_clipped", "norm_first", "rows_first", "lr", "targets", "targets_min", "skipped",
    "scale", "step_s", "wait_s", "copy_s", "mfu", "follows", "fresh", "batch_hash", "memory_mb", "reserved_mb",
    "rss_mb", "logits/lse", "logits/logit_mean", "logits/entropy", "logits/vocab", "logits/top1", "logits/loss",
    "logits/target_share", "logits/target_loss", "logits/other_loss", "logits/target_entropy", "probe/k", "grad_ratio",
)  # fmt: skip
TABLES = ("tensors", "modules", "attention", "units")
EVENTS = ("unread_keys", "diverged", "skip", "rollback", "weights_broken", "ranks_differ", "check", "code", "resume")
RECORDED = {
    **{name: f"`{name}`" for name in (*ROWS, *TABLES)},
    **{name: f"event `{name}`" for name in EVENTS},
    "probe/without_": "`probe/without_<input>`", "/accuracy": "`<objective>/accuracy`", "/gap": "`<objective>/gap`",
    "/hinge": "`<objective>/hinge`", "observed": "`observed`", "overlap": "`overlap`",
}  # fmt: skip
OF_A_HISTORY = {"evals": "evals", "parent": "the parent", "superseded": "rows that a resume took again"}


@dataclass
class Score:
    """Of the cases of one rule."""

    num_cases: int = 0
    caught: int = 0
    not_looked_at: int = 0  # not caught, and the doctor says that this rule did not look
    called_healthy: list[str] = field(default_factory=list)  # the verdict on a sick run, whatever the rules said
    others: list[str] = field(default_factory=list)  # another root cause in a sick run
    num_twins: int = 0
    alarms: list[str] = field(default_factory=list)  # anything in a healthy one
    not_known: list[str] = field(default_factory=list)  # healthy ones that are quiet, and not called healthy either

    def add(self, other: Score) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


def catalogue_table() -> str:
    rows = ["| entry | title | looks at | kind |", "|---|---|---|---|"]
    rows += [f"| {r.id} | {r.title} | {', '.join(looks_at(r.look))} | {r.kind} |" for r in catalogue()]
    return "\n".join(rows)


def looks_at(look: Callable[..., object]) -> list[str]:
    """The recorded names that occur in a rule and in what it calls."""
    found: dict[str, None] = {}
    for function in _calls(look, {}):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= dict.fromkeys(RECORDED[part] for part in RECORDED if part == node.value)
            elif isinstance(node, ast.Attribute) and node.attr in OF_A_HISTORY:
                found[OF_A_HISTORY[node.attr]] = None
    return sorted(found)


def _calls(
    function: Callable[..., object], seen: dict[Callable[..., object], None]
) -> dict[Callable[..., object], None]:
    """A function and those of the doctor's that it names, and so on."""
    seen[function] = None
    for name in inspect.unwrap(function).__code__.co_names:
        other = function.__globals__.get(name)
        if inspect.isfunction(other) and other.__module__.startswith("rung.doctor.rules") and other not in seen:
            _calls(other, seen)
    return seen


def judge(is_script: bool, keep: Path, num_seeds: int, num_processes: int = 2) -> dict[str, Score]:
    """Runs whatever `keep` does not hold: each case, and its twin with each seed. A quarter of an hour and more."""
    known = cases()
    names = [f"{'script ' if is_script else ''}{case.rule} {case.name}" for case in known]
    assert len(set(names)) == len(names), "cases are kept by their names"
    jobs = {f"{name} @{seed}": (n, seed) for seed in range(num_seeds + 1) for n, name in enumerate(names)}
    kept = dict(json.loads(line) for line in keep.read_text("utf-8").splitlines()) if keep.exists() else {}
    failed = []
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        asked = {pool.submit(judge_one, n, seed, is_script): job for job, (n, seed) in jobs.items() if job not in kept}
        for done in as_completed(asked):
            if (error := done.exception()) is not None:
                failed.append(f"{asked[done]}: {error!r}")
                continue
            kept[asked[done]] = asdict(done.result())
            with keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps([asked[done], kept[asked[done]]]) + "\n")
    if failed:
        raise SystemExit("\n".join(["these could not be run; the others are kept:", *failed]))
    scores: dict[str, Score] = {}
    for job, (n, _) in jobs.items():
        if kept[job]["num_cases"] or kept[job]["num_twins"]:
            scores.setdefault(known[n].rule, Score()).add(Score(**kept[job]))
    return scores


def judge_one(number: int, seed: int, is_script: bool) -> Score:
    """The case of this number, by which processes can name it: the sick run, or its twin with a seed from 1 on.

    As a script only what a script can do wrong: a model, data, loss and settings that are a recipe's in the catalogue.
    """
    torch.set_num_threads(1)
    case, score = cases()[number], Score()
    run, name = (case.healthy if seed else case.sick), f"{'script ' if is_script else ''}{case.rule} {case.name}"
    if is_script:
        if not (isinstance(case.sick, Trained) and isinstance(case.healthy, Trained)):
            return score
        assert isinstance(run, Trained)
        run = as_script(run)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet):
        seen = run(Path(folder), seed or 1)
    if seed:
        score.num_twins = 1
        score.alarms = [f"twin of {case.name}, seed {seed}: {rule}" for rule in at_least(seen.found, "warn")]
        score.not_known = [case.name] if seen.verdict == "not known" else []
        outcome = f"quiet, {seen.verdict}" if not score.alarms else f"found {dict(seen.found)}"
    else:
        score.num_cases = 1
        least = min(case.severity, "warn", key=SEVERITIES.index) if is_script else case.severity
        score.caught = int(case.rule in at_least(seen.found, least))
        score.not_looked_at = int(not score.caught and case.rule in seen.not_looked_at)
        score.called_healthy = [case.name] if seen.verdict == "healthy" and case.severity != "info" else []
        score.others = [f"{case.name}: {rule}" for rule in at_least(seen.found, "sick") if rule != case.rule]
        outcome = "caught" if score.caught else f"missed, found {dict(seen.found)}, {seen.verdict}"
    print(f"{name} @{seed}: {outcome} {score.others or ''}", file=sys.__stderr__, flush=True)
    return score


def as_script(of: Trained) -> Ask:
    return lambda root, seed: script_case(of.recipe, root, *of.overrides, seed=seed)


def figures_table(scores: dict[str, Score]) -> str:
    rows = ["| entry | cases caught | not looked at | twins without alarm | other alarms |", "|---|---|---|---|---|"]
    for rule, score in sorted(scores.items(), key=lambda pair: (pair[0][0], int(pair[0][1:]))):
        quiet = score.num_twins - len({alarm.rpartition(":")[0] for alarm in score.alarms})
        wrong = "; ".join([*score.others, *score.alarms]) or "none"
        rows.append(
            f"| {rule} | {score.caught} of {score.num_cases} | {score.not_looked_at} | {quiet} of {score.num_twins} "
            f"| {wrong} |"
        )
    return "\n".join([*rows, "", summary(scores)])


def summary(scores: dict[str, Score]) -> str:
    total = Score()
    for score in scores.values():
        total.add(score)
    false = len(total.others) + len(total.alarms)
    precision = total.caught / (total.caught + false) if total.caught else 0.0
    missed = total.num_cases - total.caught - total.not_looked_at
    return (
        f"Over {total.num_cases} sick runs and {total.num_twins} healthy ones: recall "
        f"{total.caught / max(total.num_cases, 1):.3f} ({total.caught} of {total.num_cases} diseases named, "
        f"{total.not_looked_at} not looked at, {missed} missed), precision {precision:.3f} ({false} false alarms). "
        f"Sick runs that were called healthy: {len(total.called_healthy)}"
        + (f" ({'; '.join(total.called_healthy)})." if total.called_healthy else ".")
        + f" Healthy runs of which the doctor says that it does not know: {len(total.not_known)}"
        + (f" ({'; '.join(sorted(set(total.not_known)))})." if total.not_known else ".")
    )


def between(text: str, name: str) -> str:
    found = re.search(_pattern(name), text, re.S)
    assert found, f"{PAGE} has no markers for {name}"
    return found[1].strip()


def put(text: str, name: str, inside: str) -> str:
    new = f"<!-- {name}: begin -->\n{inside}\n<!-- {name}: end -->"
    return re.sub(_pattern(name), lambda match: new, text, flags=re.S)


def _pattern(name: str) -> str:
    return rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->"


def main(args: Sequence[str]) -> None:
    text = put(PAGE.read_text("utf-8"), CATALOGUE, catalogue_table())
    if "--catalogue" not in args:
        with tempfile.TemporaryDirectory() as folder:
            keep = Path(args[args.index("--keep") + 1] if "--keep" in args else Path(folder) / "judged.ndjson")
            num_seeds = int(args[args.index("--seeds") + 1]) if "--seeds" in args else len(SEEDS)
            if "--scripts" not in args:
                text = put(text, FIGURES, figures_table(judge(False, keep, num_seeds)))
            text = put(text, IN_SCRIPTS, figures_table(judge(True, keep, 1)))
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
