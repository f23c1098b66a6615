"""What bench.compare_commits compares: small trainings, scripts, a lab of recorded runs, and the verbs that read it.

Everything here is words for a command line or a script in a user's shape, so that it outlives changes inside rung.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Case(NamedTuple):
    name: str
    recipe: str
    words: str


# Twenty steps on one thread. Warm-up and length follow the twenty steps; all else is the preset's.
COMMON = (
    "system.device=cpu system.threads=1 system.compile=false optimizer.max_iters=20 lr.warmup_iters=5 eval_interval=10 "
    "eval_iters=2 checkpoint.every=0 checkpoint.best=false signals.layers_every=10 signals.activation_stats_every=10"
)
# Of the larger presets fewer rows and looks, so that each takes less than a minute.
BIG = "data.batch_size=1 data.context_size=32 signals.probes=false signals.activation_stats_every=0"
PIANO = "sampling.num_tokens=24"
TEXT = "sampling.num_tokens=12"
WORLD = "sampling.num_frames=3 sampling.num_rows=2 evaluation.num_rollouts=2 evaluation.horizon=4"
SMALL_PIANO = f"{PIANO} data.batch_size=4 data.context_size=64 model.n_layer=2 model.n_embd=64"
SMALL_WORLD = f"{WORLD} preset=tiny data.batch_size=2"
LOOP = "stage=closed_loop closed_loop.start=1 closed_loop.steps=3 closed_loop.rise=10"
TASK = (
    "stage=piano_task init_from=scratch loss_masking=finetuning data.notes_per_record=8 data.prefix_tokens=true "
    "dataset.augmentation.max_pitch_shift=2 dataset.augmentation.speed_change_factors=[1.1]"
)

CASES = [
    # The presets, the slow ones first; only rows, context and accumulation are smaller.
    Case("piano small", "piano", f"preset=small {PIANO} {BIG}"),
    Case("text pythia-70m", "text", f"preset=pythia-70m {TEXT} {BIG}"),
    Case("text small", "text", f"preset=small {TEXT} {BIG}"),
    Case("world small", "world", f"preset=small {WORLD} data.batch_size=1 signals.probes=false"),
    Case("text characters", "text", f"preset=characters dataset.base_dataset_name=characters {TEXT} {BIG}"),
    Case("text pythia-14m", "text", f"preset=pythia-14m {TEXT} data.batch_size=4"),
    Case("piano tiny", "piano", f"preset=tiny {PIANO} data.batch_size=4"),
    Case("text tiny", "text", f"preset=tiny {TEXT}"),
    Case("world tiny", "world", f"preset=tiny {WORLD} data.batch_size=4"),
    # What each recipe and the engine can do besides.
    Case("text accumulation", "text", f"{TEXT} data.batch_size=4 optimizer.gradient_accumulation_steps=4"),
    Case("text bfloat16", "text", f"{TEXT} data.batch_size=4 system.dtype=bfloat16"),
    Case("text float16", "text", f"{TEXT} data.batch_size=4 system.dtype=float16"),
    Case("text muon", "text", f"{TEXT} data.batch_size=4 optimizer.name=muon"),
    Case(
        "text llama", "text",
        f"{TEXT} data.batch_size=4 model.architecture=llama model.qk_norm=true model.dropout=0.1",
    ),
    Case(
        "text components", "text",
        f"{TEXT} data.batch_size=4 dataset.num_components=3 dataset.max_unique_tokens=6000 data.windows=packed",
    ),
    Case(
        "text paper_uniform", "text",
        f"{TEXT} data.batch_size=4 data.sampling=paper_uniform dataset.shuffle_labels=true",
    ),
    Case(
        "text wsd", "text", f"{TEXT} data.batch_size=4 lr.schedule=wsd optimizer.grad_clip=0.1 system.data_workers=0"
    ),
    Case(
        "text plateau", "text", f"{TEXT} data.batch_size=4 lr.schedule=plateau lr.plateau_patience=1 eval_interval=2"
    ),
    # Updates that break the weights are undone and skipped, ten times; then the run ends as diverged.
    Case(
        "text skip", "text", f"{TEXT} data.batch_size=4 guard.policy=skip lr.learning_rate=1e38 lr.schedule=constant"
    ),
    Case("piano accumulation", "piano", f"{SMALL_PIANO} optimizer.gradient_accumulation_steps=4 model.dropout=0.1"),
    Case("piano task", "piano", f"{SMALL_PIANO} {TASK} evaluation.completed=0.02"),
    Case("piano one task", "piano", f"{SMALL_PIANO} {TASK} tasks=[continuation]"),
    Case("piano bfloat16", "piano", f"{SMALL_PIANO} system.dtype=bfloat16"),
    Case("piano muon", "piano", f"{SMALL_PIANO} optimizer.name=muon model.init=depth_scaled"),
    Case("world accumulation", "world", f"{SMALL_WORLD} optimizer.gradient_accumulation_steps=4"),
    Case(
        "world adversarial", "world",
        f"{SMALL_WORLD} adversarial.weight=0.1 adversarial.r1_every=2 adversarial.every=2",
    ),
    Case("world closed_loop", "world", f"{SMALL_WORLD} {LOOP} closed_loop.share=1 context.noise=0.1"),
    Case(
        "world both", "world", f"{SMALL_WORLD} {LOOP} adversarial.weight=0.1 optimizer.gradient_accumulation_steps=2"
    ),
    # One control of the data is NaN: the guard skips the batches that hold it.
    Case(
        "world NaN skipped", "world",
        f"{SMALL_WORLD} dataset.base_dataset_name=world-nan guard.policy=skip guard.most=20",
    ),
]  # fmt: skip
LEFT_OUT = {
    "music tiny": "commits before 2026-11-18 have no such recipe, and a comparison needs it in both",
    "music small": "as tiny, and 42M parameters in 8 codebooks of rows of 758 steps",
    "music dia": "1.6B parameters",
    "speech tiny": "commits before 2026-11-18 have no such recipe, and a comparison needs it in both",
    "speech small": "as tiny, and a language model of 135M parameters",
    "piano gpt2": "124M parameters: 20 steps of one row of 64 tokens take minutes and 4 GB; --large includes it",
    "text gpt2": "124M parameters: 20 steps of one row of 64 tokens take minutes and 4 GB; --large includes it",
    "world ollin": "needs frames of 256x192, which the shared data does not have",
    "compile": "presets that set system.compile=true are trained without: what inductor makes is not this comparison's",
}
LARGE = [
    Case(
        f"{recipe} gpt2", recipe,
        f"preset=gpt2 {size} data.batch_size=1 data.context_size=64 optimizer.gradient_accumulation_steps=1",
    )
    for recipe, size in (("piano", PIANO), ("text", TEXT))
]  # fmt: skip

# name: (words of `rung data`, the folder of the shared data)
DATA = {
    "piano": ("piano", "piano_asap/midi"),
    "text": ("text --max-examples-per-split 200 dataset.vocab_size=1024", "text_arxiv"),
    "characters": ("text preset=characters", "text_tinyshakespeare/input.txt"),
    "world": ("world", "world_vizdoom"),
}

# Runs `python WORDS` for each line [words, cwd, data] of its input, in a fork, and answers [exit code, stdout, stderr].
FORKS = """
import json, os, runpy, sys, tempfile
import numpy, torch

def become(words, cwd, data, out, err):
    os.chdir(cwd)
    os.environ["RUNG_DATA"] = data
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in enumerate((nothing, out.fileno(), err.fileno())):
        os.dup2(target, number)
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0] = cwd
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")

for line in iter(sys.stdin.readline, ""):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            become(*json.loads(line), out, err)
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
        print(json.dumps([code, *texts]), flush=True)
"""

# A plain loop: the book, the watch, evals; its seed, rate and length come from the command line. The watch may leave
# norms out after 20 updates, as time permits, so only a loop of 20 is compared.
PLAIN = """
import sys
import torch
from torch import nn
import rung

seed, lr, steps = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
run = rung.init("plain", config={"lr": lr, "steps": steps, "seed": seed}, why="does the rate pay?", tags=["script"])
torch.manual_seed(seed)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
run.watch(model, optimizer)
numbers = torch.Generator().manual_seed(7)
held_out = torch.randn(64, 8, generator=numbers)
for step in range(steps):
    x = torch.randn(16, 8, generator=numbers)
    loss = (model(x)[:, 0] - x.sum(1)).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    run.log({"loss": loss, "targets": 16})
    if step % 10 == 9:
        with torch.no_grad():
            run.log({"val/loss": (model(held_out)[:, 0] - held_out.sum(1)).abs().mean()})
run.finish()
"""

# A guarded loop whose loss takes the logarithm of a count that is 0 at step 25, if it is told so.
GUARDED = """
import sys
import torch
from torch import nn
import rung

fails = sys.argv[1] == "fails"
run = rung.init("guarded", config={"lr": 3e-3, "seed": 0, "fails": fails})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def loss_of(batch):
    wanted = batch["count"] * torch.log(batch["count"])
    return (model(batch["x"])[:, 0] - wanted).abs().mean()


guard = run.guard(model, optimizer, loss=loss_of, clip=1.0)
numbers = torch.Generator().manual_seed(0)
try:
    for step in range(40):
        x = torch.randn(16, 8, generator=numbers)
        count = torch.exp(x[:, 0]).ceil()
        if fails and step == 25:
            count[3] = 0
        batch = {"x": x, "count": count}
        value = loss_of(batch)
        value.backward()
        guard.step(value, batch)
        optimizer.zero_grad()
        run.log({"loss": value})
    guard.wait()
    run.finish()
except rung.Diverged:
    sys.exit(3)
"""

SCRIPTS = {"plain.py": PLAIN, "guarded.py": GUARDED}
SCRIPT_CASES = {
    "script plain": "plain.py 1 3e-3 20",
    "script guarded": "guarded.py well",
    "script diverged": "guarded.py fails",
}

# The runs of the lab are as small as they can be: 60 steps in about a second.
LAB = (
    f"{COMMON} {TEXT} model.n_layer=1 model.n_head=2 model.n_embd=16 data.context_size=32 data.batch_size=4 "
    "optimizer.max_iters=60 lr.warmup_iters=5 eval_interval=20 checkpoint.every=20 checkpoint.best=true "
    "lr.learning_rate=1e-2 signals.layers_every=5 signals.activation_stats_every=20"
)
LAB_PIANO = (
    f"{COMMON} {PIANO} model.n_layer=1 model.n_head=2 model.n_embd=16 data.context_size=32 data.batch_size=2 "
    "optimizer.max_iters=40 eval_interval=20 checkpoint.every=10 model.dropout=0.1"
)
LAB_WORLD = (
    f"{COMMON} {SMALL_WORLD} model.width=4 optimizer.max_iters=30 checkpoint.every=10 stage=closed_loop "
    "adversarial.weight=0.1 closed_loop.steps=2 closed_loop.start=1"
)
SWEEP = """
name: rates
recipe: text
set: {%s}
grid: {lr.learning_rate: [0.003, 0.03], seed: [0, 1]}
experiment: rates
"""

LONGER = "optimizer.max_iters=300"
STOPPED = ("stopped", "killed", "stopped-piano", "stopped-world")  # experiments of one run each, to be resumed


def sweep_file() -> str:
    words = [word for word in LAB.split() if not word.startswith("lr.learning_rate")]
    pairs = dict(word.split("=", 1) for word in words)
    return SWEEP % ", ".join(f"{key}: {value}" for key, value in pairs.items())


def lab_commands() -> Iterator[Iterator[tuple[str, str]]]:
    """Chains of (what to do, words), each in order: rung, python, or a training that gets a signal after 25 steps.

    Runs are counted from 1 in each experiment.
    """
    yield from (main_chain(), odd_chain())


def main_chain() -> Iterator[tuple[str, str]]:
    yield "rung", f"train text {LAB} --why baseline --tag base"  # text/1
    yield "rung", "train --parent text/1 optimizer.grad_clip=0.1 --why smaller"  # text/2
    yield "rung", f"train text {LAB} seed=7 model.n_embd=32 --tag wide"  # text/3: two changes
    yield "rung", "ab text/1 optimizer.grad_clip=0.01 --seeds 2 --experiment pair --why small"
    yield "rung", "sweep sweep.yaml"
    yield "rung", 'note text/1 "a note about the baseline"'
    yield "rung", 'verdict text/2 supported "smaller is calmer"'
    yield "rung", "tag text/2 kept"
    yield "rung", "pin text/1 40"


def odd_chain() -> Iterator[tuple[str, str]]:
    yield "TERM", f"train text {LAB} {LONGER} --no-check --experiment stopped"
    yield "KILL", f"train text {LAB} {LONGER} --no-check --experiment killed"
    yield "TERM", f"train piano {LAB_PIANO} {LONGER} --no-check --experiment stopped-piano"
    yield "TERM", f"train world {LAB_WORLD} optimizer.max_iters=60 --no-check --experiment stopped-world"
    yield "TERM", f"train text {LAB} {LONGER} --no-check --experiment resumed"
    yield "rung", "resume resumed/1"
    yield "rung", f"train text {LAB} --experiment diverged lr.learning_rate=1e38 lr.schedule=constant --no-check"
    yield "rung", f"train text {LAB} --experiment skipped lr.learning_rate=1e38 guard.policy=skip --no-check"
    yield "rung", f"train text {LAB} --experiment hot lr.learning_rate=3 optimizer.grad_clip=0 --no-check"
    yield "rung", f"train piano {LAB_PIANO} --no-check"
    yield "rung", f"train piano {LAB_PIANO} {TASK} --no-check"
    yield "rung", f"train world {LAB_WORLD} --no-check"
    yield "rung", f"train world {LAB_WORLD} --experiment nan dataset.base_dataset_name=world-nan --no-check"
    for words in ("1 3e-3 60", "2 3e-3 60", "1 1e-2 60", "2 1e-2 60"):
        yield "python", f"plain.py {words}"
    yield "python", "guarded.py well"
    yield "python", "guarded.py fails"


def readings(runs: list[str], captured: list[str]) -> Iterator[str]:
    """Every reading verb over the lab; `captured` are the runs that have a capture."""
    yield "du --json"
    for words in ("", "--group", "--tree", "--changed", "--sort best", '--where "lr.learning_rate>0.001"'):
        yield f"ls {words} --json"
    for run in runs:
        experiment, _, number = run.rpartition("/")
        is_repeat = experiment in ("pair", "plain", "rates") and number != "1"  # of a run that is looked at
        yield f"show {run} --json"
        if not is_repeat:
            yield f"metrics {run} --json"
            yield f"metrics {run} --evals --json"
            yield f"doctor {run} --json"
    yield from (f"report {target} --json" for target in ("text/1", "guarded/2", "nan/1", "text", "plain"))
    for a, b in (
        ("text/1", "text/2"), ("text/1", "text/3"), ("pair/2", "pair/3"), ("plain/1", "plain/2"),
        ("plain/1", "plain/3"), ("plain/1", "guarded/1"), ("text/1", "piano/1"), ("piano/1", "piano/2"),
        ("guarded/1", "guarded/2"), ("text/1", "diverged/1"),
    ):  # fmt: skip
        yield f"diff {a} {b} --json"
    yield "ab --judge text/1 --json -- text/2"
    yield "ab --judge text/1 pair/2 --json -- pair/1 pair/3"
    yield "ab --judge plain/1..2 --json -- plain/3..4"
    yield "ab --judge rates/1..2 --json -- rates/3..4"
    yield "ab text/1 optimizer.grad_clip=0.01 --seeds 2 --experiment pair --dry-run --json"
    for word in ("ls", "show rates", "report rates"):
        yield f"sweep {word} --json"
    for recipe in ("piano", "text", "world"):
        yield f"config {recipe} --json"
        yield f"config {recipe} preset=small optimizer.max_iters=5000 --json"
    yield "recipes --json"
    for name in DATA:
        yield f"data show {name} --json"
    yield 'sql "select * from runs order by id" --json'
    yield 'sql "select run, count(*) n, min(loss) low, max(norm) high from metrics group by run order by run" --json'
    yield 'sql "select run, key, value, source from config order by run, key" --json'
    yield f"check text {LAB} --json"
    yield "check text/1 --json"
    for run in ("text/1", "piano/1", "piano/2", "world/1"):
        yield f"eval {run} --json"
        yield f"sample {run} --json"
        yield f"replay {run}@15 --json"
    yield "eval text/1 --split test --json"
    yield from (f"replay {run} --json" for run in captured)
    # A user's mistakes: exit codes.
    yield from ("show text/99 --json", "ls --where nonsense --json", "train text lr.learning_rat=1", "nosuchverb")
