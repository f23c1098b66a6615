"""Proves that a change moved no number: trains, reads and resumes with the code of two commits and compares all of it.

    python -m bench.compare_commits BASE [HEAD]      HEAD: a commit; without it the working tree as it is now
        --only losses|json|resume                    one part; may be repeated
        --match TEXT                                 only cases, verbs or runs whose name contains it
        --cache DIR                                  keeps BASE's side, for this machine: later only HEAD's is computed
        --expected FILE                              what was changed on purpose, see below
        --json FILE                                  every difference, with all digits
        --data DIR                                   the shared test data; default ../shared/data
        --base-only                                  fills the cache and compares nothing
        --large                                      also the presets of 124M parameters

losses  trains 20 steps of every preset that fits and of variants (bench/compare_lab.py) and compares each number of
        the metrics, tables and evals to the last digit, the bytes of the samples and of the model's tensors.
json    records a lab of runs with BASE's code, and runs every reading verb over a copy of it with both codes.
resume  runs that BASE's code stopped or lost are resumed by both codes; all their numbers are compared.

Both sides run in the same place, one after the other, with one thread and data that BASE's code prepared; times,
speeds, memory, paths and process numbers are left out. The exit code is 0 if nothing differs, else 1.

--expected is YAML. Each difference is named "ITEM: PATH", such as "show text/1: config.lr.min_lr"; regular expressions
are searched in that name.

    config: {lr.min_lr: lr.minimum}                           keys, in the words given to HEAD's code
    verbs: {"nosuch verb": "its new name"}                    beginnings of command lines, likewise
    renamed: [{from: "norm_clipped", to: "norm_after"}]       in the names of BASE's values
    values: [{from: "own_loop", to: "script"}]                in BASE's values that are texts
    changed: [{where: "doctor guarded/2: ", why: "it calls a stopped run sick now"}]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from bench import compare_lab as lab

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ("LD_LIBRARY_PATH", "ATEN_CPU_CAPABILITY", "MKL_CBWR")  # what chooses them, so a part of the machine
PARTS = ("losses", "json", "resume")
NO_NUMBER = re.compile(r"(^|[/._])(unix_s|\w+_s|rss_mb|\w+_mb|mfu|\w+_per_s|host|pid|seconds|uid)$")
Values = dict[str, Any]  # "PATH" -> number, text or None
Items = dict[str, Values]  # "ITEM" -> its values
FORKS: dict[tuple[str, int], subprocess.Popen[str]] = {}  # by side and thread


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Side(NamedTuple):
    """One of the two codes, and the folders it works in."""

    label: str
    commit: str | None  # None: the working tree
    tree: Path
    data: Path
    expected: Mapping[str, Any]

    def call(self, words: Sequence[str], cwd: Path) -> Done:
        """`python WORDS`, in a fork of a process that has torch imported already: imports are most of a small run."""
        key = (self.label, threading.get_ident())
        if key not in FORKS:
            FORKS[key] = subprocess.Popen(
                [sys.executable, "-c", lab.FORKS],
                env=self.environment(),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        order, answer = FORKS[key].stdin, FORKS[key].stdout
        assert order is not None
        assert answer is not None
        order.write(json.dumps([list(words), str(cwd), str(self.data)]) + "\n")
        order.flush()
        return Done(*json.loads(answer.readline()))

    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", *KERNELS) if name in os.environ}
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
        fixed = {"PYTHONPATH": str(self.tree), "PYTHONHASHSEED": "0", "TZ": "UTC",
                 "RUNG_DATA": str(self.data), "HF_HUB_OFFLINE": "1", "COLUMNS": "100", "GIT_CONFIG_GLOBAL": os.devnull,
                 "GIT_AUTHOR_NAME": "lab", "GIT_AUTHOR_EMAIL": "lab@example.org", "GIT_COMMITTER_NAME": "lab",
                 "GIT_COMMITTER_EMAIL": "lab@example.org"}  # fmt: skip
        return {**kept, **threads, **fixed}

    def rung(self, line: str, cwd: Path) -> Done:
        return self.call(["-m", "rung", *self.words(line)], cwd)

    def words(self, line: str) -> list[str]:
        """The words of a command line in this side's vocabulary; of a key that is given twice, the later one."""
        for old, new in self.expected.get("verbs", {}).items():
            line = new + line[len(old) :] if line.startswith(old) else line
        keys, found = self.expected.get("config", {}), {}
        for number, word in enumerate(shlex.split(line)):
            key, equals, value = word.partition("=")
            is_key = bool(equals) and re.fullmatch(r"[\w.]+", key) is not None
            found[key if is_key else f"{number} {word}"] = f"{keys.get(key, key)}={value}" if is_key else word
        return list(found.values())


def main() -> None:
    args = arguments()
    expected = yaml.safe_load(args.expected.read_text("utf-8")) if args.expected else {}
    with tempfile.TemporaryDirectory(prefix="compare-") as scratch:
        work = Path(scratch)
        base_commit = git("rev-parse", "--verify", f"{args.base}^{{commit}}").strip()
        head_commit = git("rev-parse", "--verify", f"{args.head}^{{commit}}").strip() if args.head else None
        cache = (args.cache or work / "cache").resolve() / f"{base_commit[:12]}-{machine()}"
        cache.mkdir(parents=True, exist_ok=True)
        base = Side("base", base_commit, snapshot(base_commit, work / "base"), cache / "data", {})
        head = Side("head", head_commit, snapshot(head_commit, work / "head"), cache / "data", expected or {})
        for side in (base, head):
            check_import(side, work)
        prepare_data(base, args.data)
        print(f"base {base_commit[:12]}  head {(head_commit or 'the working tree')[:16]}  {machine()}", flush=True)
        whole: dict[str, Any] = {"base": base_commit, "head": head_commit, "machine": machine(), "parts": {}}
        for part in args.only or PARTS:
            recorded = None if part == "losses" else build_lab(base, cache)
            jobs = losses_jobs(args) if recorded is None else lab_jobs(part, recorded)
            jobs = {name: job for name, job in jobs.items() if args.match in name}
            before = values_of(base, jobs, recorded, work, cache / part)
            if args.base_only:
                continue
            after = values_of(head, jobs, recorded, work, None)
            whole["parts"][part] = show(part, before, after, expected or {})
    for process in FORKS.values():
        process.communicate()
    if args.json:
        args.json.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    total = sum(len(part["differences"]) for part in whole["parts"].values())
    print(f"\n{total} differences" if total else "\nidentical")
    sys.exit(1 if total else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("head", nargs="?")
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--match", default="")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--expected", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--base-only", action="store_true")
    return parser.parse_args()


# The two trees


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def snapshot(commit: str | None, out: Path) -> Path:
    """The files of a commit, or those of the working tree that git does not ignore: a copy, so that edits may go on."""
    out.mkdir()
    if commit is not None:
        packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(out, filter="data")
        return out
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if name and (ROOT / name).is_file():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, out / name)
    return out


def check_import(side: Side, cwd: Path) -> None:
    words = [sys.executable, "-c", "import rung; print(rung.__file__)"]
    done = subprocess.run(words, cwd=cwd, env=side.environment(), capture_output=True, text=True, check=False)
    if not done.stdout.startswith(str(side.tree)):
        sys.exit(f"{side.label}: rung is imported from {done.stdout.strip() or done.stderr}, not from {side.tree}")


def machine() -> str:
    """What the last digit may depend on besides the code."""
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text("utf-8")
        cpu = sorted(set(re.findall(r"^(?:model name|flags)\s*: (.*)$", info, re.M)))
        packages = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy")]
        facts = [*cpu, sys.version, platform.platform(), *packages, *map(str, map(os.environ.get, KERNELS))]
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    return platform.node()


def prepare_data(base: Side, source: Path) -> None:
    """The stores that both sides read, made once by BASE's code; one of them with a NaN planted into its controls."""
    if (base.data / "done").exists():
        return
    shutil.rmtree(base.data, ignore_errors=True)
    base.data.mkdir(parents=True)
    for name, (words, folder) in lab.DATA.items():
        done = base.rung(f"data {words} --from {source / folder} --name {name}", base.data.parent)
        if done.returncode:
            sys.exit(f"data {name}: {done.stderr}")
    sick = base.data / "world-nan"
    shutil.copytree(base.data / "world", sick)
    manifest = json.loads((sick / "manifest.json").read_text("utf-8"))
    rows = bytearray((sick / "controls.bin").read_bytes())
    width = 4 * manifest["arrays"]["controls"]["row_shape"][0]
    for row in range(100, 1200, 40):
        rows[row * width : row * width + 4] = b"\x00\x00\xc0\x7f"  # float32 NaN, little-endian
    (sick / "controls.bin").write_bytes(rows)
    manifest["files"]["controls.bin"]["sha256"] = hashlib.sha256(rows).hexdigest()
    (sick / "manifest.json").write_text(json.dumps(manifest, indent=1), "utf-8")
    (base.data / "done").touch()


# The parts


class Job(NamedTuple):
    """One item: a command line, how its values are got, and what else they depend on."""

    line: str
    run: Callable[[Side, str, Path], Values]
    depends: str = ""


def losses_jobs(args: argparse.Namespace) -> dict[str, Job]:
    jobs = {}
    for case in (*lab.CASES, *(lab.LARGE if args.large else [])):
        jobs[case.name] = Job(f"train {case.recipe} {lab.COMMON} {case.words}", trained)
    for name, line in lab.SCRIPT_CASES.items():
        jobs[name] = Job(line, scripted, "".join(lab.SCRIPTS.values()))
    for name, (words, folder) in lab.DATA.items():
        jobs[f"data {name}"] = Job(f"data {words} --from {args.data / folder}", prepared)
    return jobs


def lab_jobs(part: str, recorded: Path) -> dict[str, Job]:
    if part == "resume":
        return {f"resume {name}/1": Job(f"resume {name}/1", resumed, recorded.name) for name in lab.STOPPED}
    captured = {path.parents[1].relative_to(recorded / "runs") for path in recorded.glob("runs/*/*/captures/*")}
    lines = lab.readings(run_ids(recorded), sorted(path.as_posix() for path in captured))
    return {line: Job(line, read, recorded.name) for line in lines}


def values_of(side: Side, jobs: Mapping[str, Job], recorded: Path | None, work: Path, cache: Path | None) -> Items:
    """All items of one side, two at a time; what the cache has is not computed."""
    # Both sides see the same path: what is recorded or printed of it is then equal.
    place = work / "place"
    if recorded is None:
        place.mkdir()
    else:
        shutil.copytree(recorded, place, symlinks=True)

    def one(name: str) -> Values:
        job = jobs[name]
        kept = None if cache is None else cache / (slug(name) + f"-{short(name + job.line + job.depends)}.json")
        if kept is not None and kept.exists():
            return dict(json.loads(kept.read_text("utf-8")))
        found = without_places(job.run(side, job.line, place), {place: "PLACE", side.tree: "TREE", side.data: "DATA"})
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found), "utf-8")
        return found

    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        items = dict(zip(jobs, pool.map(one, jobs), strict=True))
    shutil.rmtree(place)
    print(f"  {side.label}: {len(items)} items, {time.monotonic() - started:.0f} s", flush=True)
    return items


def trained(side: Side, line: str, place: Path) -> Values:
    """One training in a folder of its own: every number that it recorded."""
    folder = place / short(line)
    folder.mkdir()
    done = side.rung(f"{line} --no-check", folder)
    return {"exit code": done.returncode, **failure(done), **recorded_values(folder / "runs")}


def scripted(side: Side, line: str, place: Path) -> Values:
    folder = place / short(line)
    folder.mkdir()
    write_scripts(folder)
    done = side.call(shlex.split(line), folder)
    return {"exit code": done.returncode, **failure(done), **recorded_values(folder / "runs")}


def prepared(side: Side, line: str, place: Path) -> Values:
    folder = place / short(line)
    folder.mkdir()
    side = side._replace(data=folder / "data")
    done = side.rung(f"{line} --name it", folder)
    shown = side.rung("data show it --json", folder)
    return {"exit code": done.returncode, **failure(done), **flat(parsed(shown.stdout))}


def read(side: Side, line: str, place: Path) -> Values:
    done = side.rung(line, place)
    found = flat(parsed(done.stdout))
    if line.startswith("check "):  # its sentences measure time, memory and disk here and now
        amount = re.compile(r"\d[\d.]* (?=(h|m|s|ms|kB|MB|GB)\b)")
        found = {name: amount.sub("N ", value) if isinstance(value, str) else value for name, value in found.items()}
    return {"exit code": done.returncode, **found}


def resumed(side: Side, line: str, place: Path) -> Values:
    done = side.rung(line, place)
    run = place / "runs" / line.split()[1]
    return {"exit code": done.returncode, **failure(done), **recorded_values(run)}


def failure(done: Done) -> Values:
    """Why it failed, for the reader; compared by its exit code alone where both sides fail."""
    return {"#last words": last_words(done)} if done.returncode else {}


def last_words(done: Done) -> str:
    return (done.stderr.strip() or "-").splitlines()[-1]


def recorded_values(folder: Path) -> Values:
    """Every number of the runs below a folder: metrics, tables, evals; hashes of samples and of the model's tensors."""
    found: Values = {}
    for path in sorted(folder.rglob("*.ndjson")):
        for row in map(json.loads, path.read_text("utf-8").splitlines()):
            if path.parent.name in ("metrics", "tables"):
                found |= flat(row, f"{path.parent.name}@{row.get('step')}")
            elif row.get("kind") in ("eval", "skip", "end", "rollback"):
                found |= flat(row, f"{row['kind']}@{row.get('step')}")
    for path in sorted(folder.rglob("model.safetensors")):
        found |= {f"checkpoint {path.parent.name} {name}": mark for name, mark in tensors(path).items()}
        path.unlink()  # large, and no longer needed
    for path in sorted(each for each in folder.rglob("samples/*/*") if each.is_file()):
        found[f"sample {path.parent.name}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    found["captures"] = ", ".join(sorted(each.name for each in folder.rglob("captures/*") if each.is_dir()))
    return found


def tensors(path: Path) -> dict[str, str]:
    """The sha256 of each tensor, without what else the file says; read by hand: it is a header and bytes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        found = {}
        for name, spec in sorted(header.items()):
            start, end = spec["data_offsets"]
            file.seek(8 + size + start)
            found[name] = hashlib.sha256(
                f"{spec['dtype']}{spec['shape']}".encode() + file.read(end - start)
            ).hexdigest()[:16]
    return found


# The lab


def build_lab(base: Side, cache: Path) -> Path:
    """Recorded runs of every kind, made once with BASE's code in a git repository of its own."""
    sources = json.dumps([list(map(list, lab.lab_commands())), lab.SCRIPTS, lab.sweep_file()])
    out = cache / f"lab-{short(sources)}"
    if out.exists():
        return out
    place = cache / "lab-unfinished"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    started = time.monotonic()
    write_scripts(place)
    (place / "sweep.yaml").write_text(lab.sweep_file(), "utf-8")
    (place / ".gitignore").write_text("runs/\nsamples/\n", "utf-8")
    for words in ("init -q", "add -A", "commit -qm lab"):
        subprocess.run(["git", *words.split()], cwd=place, env=base.environment(), check=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda commands: record(base, commands, place), [list(each) for each in lab.lab_commands()]))
    place.rename(out)
    print(f"  lab: {len(run_ids(out))} runs, {time.monotonic() - started:.0f} s", flush=True)
    return out


def record(base: Side, commands: Sequence[tuple[str, str]], place: Path) -> None:
    for program, words in commands:
        if program in ("TERM", "KILL"):
            stop(base, words, program, place)
            continue
        done = base.rung(words, place) if program == "rung" else base.call(shlex.split(words), place)
        if done.returncode:
            print(f"  lab: exit code {done.returncode} of {words[-60:]}: {last_words(done)[:120]}", flush=True)


def stop(base: Side, line: str, sign: str, place: Path) -> None:
    """Starts a training and sends it a signal when the record has 25 steps."""
    words = [sys.executable, "-m", "rung", *base.words(line)]
    metrics = place / "runs" / line.rpartition(" --experiment ")[2] / "1" / "metrics"
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(words, cwd=place, env=base.environment(), stdout=nowhere, stderr=nowhere) as process:
        while process.poll() is None:
            if sum(path.read_bytes().count(b"\n") for path in metrics.glob("*.ndjson")) >= 25:
                process.send_signal(getattr(signal, f"SIG{sign}"))
                process.wait()
            time.sleep(0.02)


def write_scripts(folder: Path) -> None:
    for name, text in lab.SCRIPTS.items():
        (folder / name).write_text(text.lstrip(), "utf-8")


def run_ids(place: Path) -> list[str]:
    runs = place / "runs"
    return sorted(path.parent.relative_to(runs).as_posix() for path in runs.glob("*/*/run.json"))


# Values


def slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)[:60]


def short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def parsed(text: str) -> Any:
    """The JSON of a verb; NaN and infinities stay texts, so that NaN equals NaN."""
    with contextlib.suppress(ValueError):
        return json.loads(text, parse_constant=str)
    return {}


def flat(tree: Any, path: str = "") -> Values:
    """{"a.b[3].c": value}; an empty list or dict is a value. Times, speeds and memory are left out."""
    if isinstance(tree, dict) and tree:
        parts = [flat(value, f"{path}.{key}" if path else str(key)) for key, value in tree.items()]
    elif isinstance(tree, list) and tree:
        parts = [flat(value, f"{path}[{number}]") for number, value in enumerate(tree)]
    else:
        return {} if NO_NUMBER.search(path) else {path: tree if not isinstance(tree, float) else plain(tree)}
    return {name: value for part in parts for name, value in part.items()}


def without_places(values: Values, places: Mapping[Path, str]) -> Values:
    """Values and names that mention a temporary folder say which of them instead."""

    def said(text: Any) -> Any:
        for path, word in places.items():
            text = text.replace(str(path), word) if isinstance(text, str) else text
        return text

    return {said(name): said(value) for name, value in values.items()}


def plain(number: float) -> Any:
    return str(number) if number != number or abs(number) == float("inf") else number


def show(part: str, before: Items, after: Items, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Prints a table of the items and the differences; returns both."""
    table, differences = [], []
    for item in before:
        was, now = renamed(item, before[item], expected), after[item]
        names = [name for name in {**was, **now} if not name.startswith("#")]
        found = [
            {"item": item, "path": name, "before": was.get(name, "absent"), "after": now.get(name, "absent")}
            for name in names
            if was.get(name, "absent") != now.get(name, "absent") and not is_expected(f"{item}: {name}", expected)
        ]
        code = was.get("exit code")
        table.append({"item": item, "values": len(names), "differ": len(found), "exit code": code})
        differences += found
        words = now.get("#last words") or was.get("#last words") or ""
        note = f"  exit code {code}" * (code != 0) + f"  ({words[:90]})" * bool(words)
        sign = "DIFFER" if found else "ok    "
        print(f"  {sign}  {item[:70]:<70} {len(names):>6} values  {len(found):>5} differ{note}")
    print(f"{part}: {len(table)} items, {sum(row['values'] for row in table)} values, {len(differences)} differ")
    listed: dict[str, int] = {}
    for each in differences:
        listed[each["item"]] = listed.get(each["item"], 0) + 1
        if listed[each["item"]] <= 12:
            print(f"    {each['item']}: {each['path']}: {str(each['before'])[:70]} -> {str(each['after'])[:70]}")
        elif listed[each["item"]] == 13:
            print(f"    {each['item']}: and more; --json FILE has all")
    left_out = lab.LEFT_OUT if part == "losses" else {}
    for name, why in left_out.items():
        print(f"  left out  {name}: {why}")
    return {"table": table, "differences": differences, "left_out": left_out}


def renamed(item: str, values: Values, expected: Mapping[str, Any]) -> Values:
    """BASE's values in HEAD's words."""
    names = [(rule["from"], rule["to"]) for rule in expected.get("renamed", [])]
    names += [(rf"\b{re.escape(old)}\b", new) for old, new in expected.get("config", {}).items()]
    texts = [(rule["from"], rule["to"]) for rule in expected.get("values", [])]

    def said(text: str, rules: Sequence[tuple[str, str]]) -> str:
        for old, new in rules:
            text = re.sub(old, new, text)
        return text

    return {
        said(f"{item}: {name}", names).removeprefix(f"{item}: "): said(value, texts)
        if isinstance(value, str)
        else value
        for name, value in values.items()
    }


def is_expected(name: str, expected: Mapping[str, Any]) -> bool:
    return any(re.search(rule["where"], name) for rule in expected.get("changed", []))


if __name__ == "__main__":
    main()
