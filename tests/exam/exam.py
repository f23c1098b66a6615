"""The first-try exam of the doctor: faults its rules were not written for, each in four shapes, and healthy twins.

    python -m tests.exam.exam [--class NAME] [--shape TEXT] [--json FILE] [--source CLASS/SHAPE]

Every program runs in a folder of its own, as a user would start it. A recipe is asked of `rung check` and of
`rung doctor` after training, a loop of `rung doctor`, a pair of runs of `rung diff`. For a sick shape the answer is

    named          a finding from `warn` on whose headline or remedy speaks of the fault
    seen           only findings about something else
    silent         no finding, and the answer counts what it did not look at
    false healthy  called healthy, or silent without anything left to look at

and any finding about a healthy twin is a false alarm. It takes a quarter of an hour; pytest runs two programs of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.exam.programs import KEYS, RECIPES, Class, Pair, Shape, classes

ROOT = Path(__file__).parents[2]
ANSWERS = ("named", "seen", "silent", "false healthy", "broken")
QUIET = {"pass", "skip", "info", "ok"}


@dataclass
class Result:
    name: str
    is_sick: bool
    answer: str = ""
    findings: list[str] = field(default_factory=list)
    matched: str = ""
    unlooked: int = 0
    headline: str = ""
    output: str = ""


class Broken(Exception):
    """A program, or the verb that was asked about it, did not do what the exam needs."""


def call(folder: Path, *command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs python with this checkout's rung in `folder`."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("RUNG_")}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    try:
        return subprocess.run(
            [sys.executable, *command], cwd=folder, env=variables, capture_output=True, text=True, timeout=240
        )
    except subprocess.TimeoutExpired as error:
        raise Broken(f"{' '.join(command)} took more than {error.timeout} s") from error


def answered(done: subprocess.CompletedProcess[str]) -> Any:
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise Broken(f"{done.args[1:]} exited with {done.returncode}: {done.stderr[-600:]}") from error


def run_of(folder: Path) -> str:
    found = [path.parent for path in (folder / "runs").glob("*/*/run.json")]
    if len(found) != 1:
        raise Broken(f"{len(found)} runs in place of one")
    return f"{found[0].parent.name}/{found[0].name}"


def ask_doctor(folder: Path, result: Result) -> None:
    run = run_of(folder)
    told = answered(call(folder, "-m", "rung", "doctor", run, "--json"))
    for one in told["findings"]:
        if one["severity"] not in QUIET:
            parts = (one.get(key) or "" for key in ("title", "what", "remedy"))
            result.findings.append(f"doctor {one['rule']} {one['severity']}: " + " | ".join(map(str, parts)))
    for one in told.get("preflight", []):
        if one.get("level", one.get("severity", "")) not in QUIET:
            result.findings.append(f"preflight: {one}")
    text = call(folder, "-m", "rung", "doctor", run).stdout
    result.headline = " ".join(text.split())[:400]
    unlooked = re.search(r"not looked at|nothing to look at|could not look|did not look|unlooked", text)
    result.unlooked += max(1, len(told.get("unasked", ()))) if unlooked else 0
    # "No finding" is what a reader takes for healthy where nothing says what was left out.
    if re.search(r"(?<!not )\bhealthy\b", text) and not unlooked:
        result.unlooked = -1


def ask_check(folder: Path, result: Result, target: str, keys: list[str]) -> None:
    done = call(folder, "-m", "rung", "check", target, *keys, "--json")
    if done.returncode == 2:
        result.findings.append(f"check refused: {done.stderr.strip()[-600:]}")
        return
    for one in answered(done)["results"]:
        if one["level"] not in QUIET:
            result.findings.append(f"check {one['level']}: {one['name']} | {one['seen']} | {one['remedy']}")
        result.unlooked += one["level"] == "skip"


def run_shape(folder: Path, shape: Shape, result: Result) -> None:
    (folder / f"{shape.base}.py").write_text(shape.source(result.is_sick))
    if not shape.is_recipe:
        done = call(folder, f"{shape.base}.py")
    else:
        target = f"{shape.base}:{RECIPES[shape.base]}"
        own = shape.keys if result.is_sick else shape.twin_keys
        keys = list(dict(pair.split("=") for pair in f"{KEYS} seed={shape.seed} {own}".split()).items())
        words = [f"{name}={value}" for name, value in keys]
        ask_check(folder, result, target, words)
        done = call(folder, "-m", "rung", "train", target, *words)
        if done.returncode == 2:
            result.findings.append(f"train refused: {done.stderr.strip()[-600:]}")
    result.output = (done.stdout + done.stderr)[-1500:]
    if done.returncode and not result.is_sick:
        raise Broken(f"the twin exited with {done.returncode}: {result.output[-600:]}")
    if list((folder / "runs").glob("*/*/run.json")):
        ask_doctor(folder, result)
    elif not result.findings:
        raise Broken(f"no run: {result.output[-600:]}")


def run_pair(folder: Path, pair: Pair, result: Result) -> None:
    folder = folder / "work"
    for name, text in pair.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if pair.git:
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a script"]):
            who = ["-c", "user.name=exam", "-c", "user.email=exam@localhost"]
            subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)
    for is_second in (False, True):
        if is_second and result.is_sick:
            for name, text in pair.changes.items():
                (folder / name).write_text(text)
        done = call(folder, *pair.command, env=pair.env if is_second and result.is_sick else pair.first_env)
        if done.returncode:
            raise Broken(done.stderr[-600:])
    first, second = sorted(f"{p.parent.parent.name}/{p.parent.name}" for p in (folder / "runs").glob("*/*/run.json"))
    told = answered(call(folder, "-m", "rung", "diff", first, second, "--json"))
    for one in told["confounders"]:
        result.findings.append(f"diff: {one['part']} {one['name']} {one['before']} -> {one['after']} {one['detail']}")
    result.headline = told["words"]
    # A diff counts what neither run recorded as notes; without one, "nothing differs" is a claim about everything.
    notes = [one for one in told["differences"] if one["weight"] == "note"]
    claims = re.search(r"nothing (that matters )?differs|the same|identical", told["words"])
    result.unlooked = -1 if told["is_strict"] or claims else len(notes)


def label(shape: Shape | Pair, is_sick: bool) -> str:
    return shape.name if is_sick else f"{shape.name} (twin)"


def examine(one_class: Class, shape: Shape | Pair, is_sick: bool) -> Result:
    """Runs one program and scores what is said about it."""
    result = Result(label(shape, is_sick), is_sick)
    with tempfile.TemporaryDirectory(prefix="exam-") as folder:
        try:
            if isinstance(shape, Pair):
                run_pair(Path(folder), shape, result)
            else:
                run_shape(Path(folder), shape, result)
        except Broken as error:
            result.answer, result.output = "broken", str(error)
            return result
    if not is_sick:
        result.answer = "false alarm" if result.findings else "quiet"
        return result
    says = re.compile(shape.says or one_class.says, re.IGNORECASE)
    for text in result.findings:
        if found := says.search(text):
            result.matched = found[0]
            result.answer = "named"
            return result
    result.answer = "seen" if result.findings else "silent" if result.unlooked > 0 else "false healthy"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--class", dest="name", action="append", help="only this class; may be given again")
    parser.add_argument("--shape", default="", help="only shapes whose name contains this")
    parser.add_argument("--json", type=Path, help="where to write every answer")
    parser.add_argument("--resume", action="store_true", help="keep the answers in the file of --json, ask the rest")
    parser.add_argument("--source", help="CLASS/SHAPE: print the sick program and end")
    args = parser.parse_args()
    known = classes()
    if args.source:
        name, _, wanted = args.source.partition("/")
        shape = next(shape for shape in known[name].shapes if shape.name == wanted)
        sys.stdout.write(shape.source(True) if isinstance(shape, Shape) else json.dumps(asdict(shape), indent=1))
        return
    chosen = {name: one for name, one in known.items() if not args.name or name in args.name}
    jobs = [
        (name, shape, is_sick)
        for name, one in chosen.items()
        for shape in one.shapes
        if args.shape in shape.name
        for is_sick in ((True, False) if shape.twin else (True,))
    ]

    def work(job: tuple[str, Shape | Pair, bool]) -> Result:
        result = examine(chosen[job[0]], job[1], job[2])
        print(f"{job[0]:18} {result.name:58} {result.answer}", file=sys.stderr, flush=True)  # noqa: T201
        return result

    results: dict[str, list[Result]] = {name: [] for name in chosen}
    if args.resume and args.json and args.json.exists():
        for name, kept in json.loads(args.json.read_text()).items():
            results.setdefault(name, []).extend(Result(**one) for one in kept)
    asked = {(name, one.name) for name, kept in results.items() for one in kept}
    jobs = [job for job in jobs if (job[0], label(job[1], job[2])) not in asked]
    jobs.sort(key=lambda job: not job[2])  # what is sick first: an exam that is stopped has asked about every class
    with ThreadPoolExecutor(2) as pool:
        for (name, _, _), result in zip(jobs, pool.map(work, jobs)):
            results[name].append(result)
            if args.json:  # after each, so that an exam that is stopped leaves what it knows
                args.json.write_text(json.dumps({n: [asdict(r) for r in rs] for n, rs in results.items()}, indent=1))
    report(results)


def report(results: dict[str, list[Result]]) -> None:
    lines = [f"{'class':18}" + "".join(f"{word:>15}" for word in (*ANSWERS, "twins quiet", "false alarm"))]
    total: Counter[str] = Counter()
    for name, found in results.items():
        counts = Counter(one.answer for one in found if one.is_sick or one.answer != "broken")
        counts["broken"] += sum(one.answer == "broken" for one in found if not one.is_sick)
        total += counts
        lines.append(f"{name:18}" + "".join(f"{counts[word]:15}" for word in (*ANSWERS, "quiet", "false alarm")))
    lines.append(f"{'total':18}" + "".join(f"{total[word]:15}" for word in (*ANSWERS, "quiet", "false alarm")))
    for name, found in results.items():
        for one in found:
            if one.answer in ("false alarm", "broken", "false healthy", "seen"):
                lines.append(f"\n{one.answer}: {name}: {one.name}")
                lines += [f"    {text[:300]}" for text in (one.findings or [one.output[-500:]])]
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main()
