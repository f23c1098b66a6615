"""Frames a second that a visitor of `rung play` gets, over a real socket, one wish after the other.

    python -m bench.play [--size small|ollin] [--device cpu|cuda] [--threads N] [--quick]

A world with untrained weights on made-up pictures: what it shows does not matter here, what it computes is the same.
The server is the one of the verb; the client asks for a frame as soon as it has the last one. Then the model alone.
There is no peer: the bars are what walking needs.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from websockets.sync.client import connect

from rung.bench.report import facts, in_turns, spread, verdict
from rung.engine.build import Setup, build
from rung.recipe import Walkable
from rung.resolve import resolve
from rung.web.answers import Played
from rung.web.play import play_app
from rung.web.serve import address_of, listen, server

SIZES = {"small": (128, 96), "ollin": (256, 192)}
BARS = {"cpu": 20.0, "cuda": 60.0}
NUM_PICTURES = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", choices=BARS, default="cpu")
    parser.add_argument("--threads", type=int, default=1)  # what the verb takes on two cores
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rounds, num_frames = (1, 5) if given.quick else (7, 100)
    print(facts("torch", "uvicorn", "websockets", device=given.device, threads=given.threads, size=given.size))
    # One thread makes the model and runs it, as in the verb.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1, "model") as model:
        setup = model.submit(make_setup, Path(folder), given.size, given.device).result()
        player = model.submit(setup.recipe.player, setup.state.model.eval()).result()
        figures = measure(setup, player, model, rounds, num_frames)
    for name, values in figures.items():
        print(f"{name:8} {spread(values, '.1f')} frames/s")
    print(verdict("play-frames", figures["visitor"], BARS[given.device], form=".1f"))


def make_setup(folder: Path, size: str, device: str) -> Setup:
    width, height = SIZES[size]
    rng = np.random.default_rng(0)
    (folder / "film").mkdir()
    with (folder / "film" / "frames.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "t", "x", "y", "z", "yaw", "pitch", "roll"])
        for number in range(NUM_PICTURES):
            picture = rng.integers(0, 256, (height, width, 3), np.uint8)
            Image.fromarray(picture).save(folder / "film" / f"{number:03d}.png")
            pose = rng.normal(size=6).cumsum()
            table.writerow([f"{number:03d}.png", f"{1e9 + number / 20:.3f}", *(f"{value:.4f}" for value in pose)])
    words = [f"preset={size}", f"dataset.base_dataset_name={folder / 'world'}", f"system.device={device}"]
    words += ["dataset.validation=0.45", "dataset.split_gap=0", f"dataset.width={width}", f"dataset.height={height}"]
    resolved = resolve("world", words)
    cfg = resolved.config.view("recipe")
    resolved.recipe_class.prepare(cfg, 0, folder / "film", str(folder / "world"), False, lambda what, done, total: None)
    return build(resolved.config, resolved.recipe_class, folder / "runs", is_training=False)


def measure(
    setup: Setup, player: Walkable, model: ThreadPoolExecutor, rounds: int, num_frames: int
) -> dict[str, list[float]]:
    walk = model.submit(player.walk, 0).result()

    def alone() -> float:
        return model.submit(steps).result()

    def steps() -> float:
        begun = time.perf_counter()
        for _ in range(num_frames):
            walk.step({"forward": 1.0})
        return num_frames / (time.perf_counter() - begun)

    listening = listen("127.0.0.1", 0)
    serving = server(play_app([Played(player, "bench", "bench")], mode=setup.precision.autocast, model=model))
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    with connect(address_of(listening).replace("http", "ws") + "walk", max_size=None) as socket:
        socket.recv()

        def visitor() -> float:
            begun = time.perf_counter()
            for _ in range(num_frames):
                socket.send(json.dumps({"walk": 1, "place": 0, "intent": {"forward": 1.0}}))
                assert len(socket.recv()) > 1000, "a picture was to come"
            return num_frames / (time.perf_counter() - begun)

        figures = in_turns(rounds, {"visitor": visitor, "model": alone})
    serving.should_exit = True
    thread.join()
    return figures


if __name__ == "__main__":
    main()
