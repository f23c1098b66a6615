"""What caching the encoder is worth, and how many words a run gets wrong: `python -m bench.speech [RUN]`.

Two trainings of `tiny` in turns, on features out of the store and with the encoder running at every step: samples a
second of the first over those of the second; `--lm smollm2` with that language model. With a run, instead: its word
error rate on every split but train beside that of Moonshine's own transcriber, out of its wheel, on the same clips.
Where that library is not at hand, `RUN --out clips.npz` keeps what was said, heard and answered, and `--judge
clips.npz` has Moonshine transcribe the same clips elsewhere.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rung import api
from rung.bench.report import facts, in_turns, pairwise, spread, verdict
from rung.config import Layer, load_file
from rung.engine.build import build
from rung.engine.clock import Clock
from rung.random import Draw
from rung.recipes import presets
from rung.recipes.speech.metrics import word_errors
from rung.recipes.speech.moonshine import MOONSHINE
from rung.recipes.speech.recipe import Speech
from rung.resolve import schema_of

BAR = 3.0
# Runs what lies in the wheel, in a process of its own: sounds come in as lines of a file name, texts go out.
TRANSCRIBER = """
import sys, types, numpy as np
folder = sys.argv[1]
sys.path.insert(0, folder)
sys.modules.setdefault("sounddevice", types.ModuleType("sounddevice"))
from moonshine_voice.moonshine_api import ModelArch
from moonshine_voice.transcriber import Transcriber
model = Transcriber(folder + "/moonshine_voice/assets/tiny-en", ModelArch.TINY)
sounds = np.load(sys.argv[2])
for name in sounds.files:
    lines = model.transcribe_without_streaming((sounds[name] / 32767).astype("float32").tolist(), 16000).lines
    print("TEXT " + " ".join(line.text for line in lines).replace("\\n", " "), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", help="a speech run, to count its wrong words")
    parser.add_argument("--clips", type=int, default=100, help="of each split")
    parser.add_argument("--at", type=int, help="the save of the run; default: the best")
    parser.add_argument("--out", type=Path, help="keep clips, texts and answers here, and leave Moonshine out")
    parser.add_argument("--judge", type=Path, help="have Moonshine transcribe the clips of an earlier --out")
    parser.add_argument("--data", default="speech", help="prepared data of the tiny preset")
    parser.add_argument("--lm", choices=("bytes", "smollm2"), default="bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=6, help="steps of each party in a round")
    args = parser.parse_args()
    if args.judge:
        judge(args.judge)
        return
    if args.run:
        wrong_words(args.run, args.clips, args.at, args.out)
        return
    torch.set_num_threads(1)
    print(facts("torch", "transformers", lm=args.lm, chunk=f"{args.chunk} steps of 8 rows"), flush=True)
    parties = {name: Party(args.data, args.lm, args.chunk, name) for name in ("cached", "uncached")}
    seconds = in_turns(args.rounds, {name: party.run for name, party in parties.items()})
    for name, values in seconds.items():
        print(f"{name:9} {spread([8 * args.chunk / value for value in values], '.1f')} samples/s")
    bar = BAR if args.lm == "bytes" else 1.0
    print(verdict("cached/uncached", pairwise(seconds["uncached"], seconds["cached"]), bar))


class Party:
    """A training of its own, a few steps at a time."""

    def __init__(self, data: str, lm: str, chunk: int, name: str) -> None:
        tree: dict[str, Any] = {
            "system": {"device": "cpu", "threads": 1}, "dataset": {"base_dataset_name": data},
            "data": {"batch_size": 8, "cached": name == "cached"}, "model": {"lm": {"name": lm}},
        }  # fmt: skip
        layers = [Layer("preset tiny", load_file(presets(Speech)["tiny"])), Layer("bench", tree)]
        self.setup = build(schema_of("speech", Speech).resolve(layers), Speech, Path("runs"))
        self.prefetcher, self.chunk, self.done = self.setup.prefetcher(workers=0), chunk, 0

    def run(self) -> float:
        begun = time.perf_counter()
        for step in range(self.done, self.done + self.chunk):
            self.setup.stepper.step(step, self.prefetcher.take(step), 1e-4, Clock())
        self.done += self.chunk
        return time.perf_counter() - begun


def wrong_words(name: str, clips: int, at: int | None, out: Path | None) -> None:
    loaded = api.load(name, at=at)
    recipe, model = loaded.setup.recipe, loaded.setup.state.model.eval()
    assert isinstance(recipe, Speech)
    device, store = next(model.parameters()).device, recipe.store
    print(f"{loaded.run.id} at step {loaded.step}; words wrong in % of those said, {clips} clips of a split at most")
    print(f"{'split':12} {'clips':>5} {'run':>6} {'all right':>9} {'other sound':>11} {'moonshine':>9}")
    kept: dict[str, np.ndarray] = {}
    for split in store.splits:
        if split == "train":
            continue
        numbers = store.split(split)[:clips].tolist()
        records = [store.index[number] for number in numbers]
        texts, answers = [record["text"] for record in records], {}
        for heard in ("own", "shuffled"):
            stream = recipe._utterances(split, heard)  # type: ignore[arg-type]
            said: list[str] = []
            for start in range(0, len(numbers), 16):
                ids = np.arange(start, min(start + 16, len(numbers)))
                arrays = stream.gather(ids, Draw(0, -1, ids))
                batch = {key: torch.from_numpy(value).to(device) for key, value in arrays.items()}
                with torch.no_grad(), loaded.setup.precision.autocast():
                    said += recipe._answers(model, batch, 100, 1)
            answers[heard] = said
        sounds = {str(n): store.arrays["sound"][r["start"] : r["start"] + r["length"]] for n, r in enumerate(records)}
        theirs = "-" if out else f"{rate(texts, transcribe(sounds)):.1f}"
        print(row_of(split, texts, answers["own"], answers["shuffled"]) + f" {theirs:>9}", flush=True)
        kept |= {f"{split}/{number}": sound for number, sound in sounds.items()}
        kept |= {f"{split}/text": np.array(texts), f"{split}/own": np.array(answers["own"])}
        kept[f"{split}/shuffled"] = np.array(answers["shuffled"])
    if out:
        np.savez_compressed(out, **kept)  # type: ignore[arg-type]


def judge(file: Path) -> None:
    """The table of an earlier `--out`, with Moonshine's own words."""
    with np.load(file) as kept:
        arrays = dict(kept)
    print(f"{'split':12} {'clips':>5} {'run':>6} {'all right':>9} {'other sound':>11} {'moonshine':>9}")
    for split in dict.fromkeys(name.rpartition("/")[0] for name in arrays):
        texts, own, shuffled = ([str(one) for one in arrays[f"{split}/{kind}"]] for kind in ("text", "own", "shuffled"))
        sounds = {str(n): arrays[f"{split}/{n}"] for n in range(len(texts))}
        print(row_of(split, texts, own, shuffled) + f" {rate(texts, transcribe(sounds)):9.1f}", flush=True)


def row_of(split: str, texts: list[str], own: list[str], shuffled: list[str]) -> str:
    right = sum(not word_errors([text], [answer]).errors for text, answer in zip(texts, own)) / len(texts)
    return f"{split:12} {len(texts):5} {rate(texts, own):6.1f} {100 * right:9.1f} {rate(texts, shuffled):11.1f}"


def rate(texts: list[str], answers: list[str]) -> float:
    errors = word_errors(texts, answers)
    return 100 * errors.errors / max(1, errors.words)


def transcribe(sounds: dict[str, np.ndarray]) -> list[str]:
    """What Moonshine itself makes of them; digits that it writes as figures are read as words."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sounds.npz"
        np.savez(file, **sounds)  # type: ignore[arg-type]
        command = [sys.executable, "-c", TRANSCRIBER, str(MOONSHINE.unpack()), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    words = "zero one two three four five six seven eight nine".split()  # noqa: SIM905
    texts = [line.removeprefix("TEXT ") for line in done.stdout.splitlines() if line.startswith("TEXT")]
    return ["".join(f" {words[int(c)]} " if c.isdigit() and c.isascii() else c for c in text) for text in texts]


if __name__ == "__main__":
    main()
