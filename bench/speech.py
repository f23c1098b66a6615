"""What caching the encoder is worth, and how many words a run gets wrong: `python -m bench.speech [RUN]`.

Two trainings of `tiny` in turns, on features out of the store and with the encoder running at every step: samples a
second of the first over those of the second; `--lm smollm2` with that language model. With a run, instead: its word
error rate on every split but train beside that of Moonshine's own transcriber, out of its wheel, on the same clips.
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

from bench.report import facts, in_turns, pairwise, spread, verdict
from rung import api
from rung.config import Layer, load_file
from rung.data.store import Store
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
    parser.add_argument("--data", default="speech", help="prepared data of the tiny preset")
    parser.add_argument("--lm", choices=("bytes", "smollm2"), default="bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=6, help="steps of each party in a round")
    args = parser.parse_args()
    if args.run:
        wrong_words(args.run, args.clips)
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


def wrong_words(name: str, clips: int) -> None:
    loaded = api.load(name)
    recipe, model = loaded.setup.recipe, loaded.setup.state.model.eval()
    assert isinstance(recipe, Speech)
    store: Store = recipe.store
    print(f"{loaded.run.id} at step {loaded.step}; words wrong in % of those said, {clips} clips of a split at most")
    print(f"{'split':12} {'clips':>5} {'run':>6} {'moonshine':>9} {'other sound':>11}")
    for split in store.splits:
        if split == "train":
            continue
        numbers = store.split(split)[:clips].tolist()
        records = [store.index[number] for number in numbers]
        texts = [record["text"] for record in records]
        rates = []
        for heard in ("own", "shuffled"):
            stream = recipe._utterances(split, heard)  # type: ignore[arg-type]
            answers: list[str] = []
            for start in range(0, len(numbers), 16):
                ids = np.arange(start, min(start + 16, len(numbers)))
                arrays = stream.gather(ids, Draw(0, -1, ids))
                device = next(model.parameters()).device
                batch = {key: torch.from_numpy(value).to(device) for key, value in arrays.items()}
                with torch.no_grad(), loaded.setup.precision.autocast():
                    answers += recipe._answers(model, batch, 100, 1)
            rates.append(rate(texts, answers))
        sounds = {str(n): store.arrays["sound"][r["start"] : r["start"] + r["length"]] for n, r in enumerate(records)}
        theirs = rate(texts, transcribe(sounds))
        print(f"{split:12} {len(numbers):5} {rates[0]:6.1f} {theirs:9.1f} {rates[1]:11.1f}", flush=True)


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
