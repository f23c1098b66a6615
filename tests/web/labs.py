"""Synthetic labs, written in seconds: many runs, a run of very many rows, and a few with all that a page can show.

    python -m tests.web.labs FOLDER --runs 1000 --steps 1000000 --metrics 30

writes FOLDER/many/1..1000, FOLDER/long/1 and the runs of `write_book` below.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import random
import shutil
import struct
import threading
import uuid
import wave
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rung.runs.record import Record, append_event
from rung.web.lab import lab_app
from rung.web.serve import address_of, listen, server

SPIKE, NAN = 321, 654  # steps of the long run with a spike of the loss, and with one that is not finite
START = datetime(2026, 11, 1, 9, tzinfo=UTC)


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of an error."""
        found: str = self.json["code"]
        return found


class ServedLab:
    """A real server in a thread, on a free port."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.app = lab_app(root, **options)
        listening = listen("127.0.0.1", 0)
        self.url, self.port = address_of(listening), listening.getsockname()[1]
        self.server = server(self.app)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()
        self.csrf: str = self.app.state.lab.csrf

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> Answer:
        """Sends the path as it is, dots and all. Underscores in names of headers stand for dashes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.putrequest(method, path, skip_host="Host" in sent)
            for name, value in sent.items():
                connection.putheader(name, value)
            if data is not None:
                connection.putheader("Content-Length", str(len(data)))
            connection.endheaders(data)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """The JSON of an answer that is no error."""
        answer = self.ask(path)
        assert answer.status == 200, (path, answer.status, answer.body[:500])
        return answer.json

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """As the page does."""
        given = {"X-Rung-CSRF": self.csrf, "Content-Type": "application/json", **headers}
        return self.ask(path, "POST", body, **given)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


def start(root: Path, experiment: str = "piano", **fields: Any) -> Record:
    config = fields.pop("config", {})
    given: dict[str, Any] = {
        "recipe": "piano",
        "preset": "tiny",
        "command": ["rung", "train", experiment],
        "seed": 7,
        "config": {
            "lr": {"learning_rate": 1e-3, "schedule": "cosine"},
            "optimizer": {"grad_clip": 1.0},
            "data": {"batch_size": 8},
            **config,
        },
        "sources": {"lr.learning_rate": "command line", "lr.schedule": "default"},
        "derived": {"num_steps": 200, "rows_per_step": 8, "targets_per_row": 512, "epoch_rows": 400, "device": "cpu"},
        "data": {"train": {"fingerprint": "7c1e"}, "full_val": {"fingerprint": "9ab0", "baselines": {"unigram": 4.1}}},
        "definitions": {"eval/full_val": {"better": "lower", "mask": "targets"}},
    }
    return Record.create(root, experiment, **{**given, **fields})


def row(step: int, rng: random.Random, scale: float = 1.0) -> dict[str, float]:
    """What rung's own loop records of a step, roughly."""
    loss = scale * (1.5 + 3 * math.exp(-step / 60)) + 0.05 * rng.gauss(0, 1)
    step_s = 0.02 + 0.002 * rng.random()
    return {
        "loss": loss, "norm": 1 + rng.random(), "norm_clipped": 1.0, "lr": 1e-3 * (1 - step / 400), "targets": 4096,
        "step_s": step_s, "wait_s": 0.2 * step_s, "forward_backward_s": 0.6 * step_s, "update_s": 0.15 * step_s,
        "other_s": 0.05 * step_s, "memory_mb": 512 + step, "rss_mb": 900 + step, "mfu": 0.4, "skipped": 0,
    }  # fmt: skip


def wav(seconds: float = 0.5, hz: float = 440.0, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        tones = (int(12000 * math.sin(2 * math.pi * hz * i / rate)) for i in range(int(seconds * rate)))
        out.writeframes(b"".join(struct.pack("<h", tone) for tone in tones))
    return file.getvalue()


def midi(pitches: Sequence[int] = (60, 64, 67, 72)) -> bytes:
    """Quarter notes one after the other, at 120 a minute: each lasts half a second."""
    track = b"".join(bytes([0, 0x90, pitch, 80, 96, 0x80, pitch, 0]) for pitch in pitches) + b"\0\xff\x2f\0"
    return b"MThd" + struct.pack(">IHHH", 6, 0, 1, 96) + b"MTrk" + struct.pack(">I", len(track)) + track


def picture(shade: int = 128, kind: str = "PNG", num_frames: int = 1) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    frames = [Image.new("RGB", (64, 48), (shade, (40 * i) % 256, 255 - shade)) for i in range(num_frames)]
    more: dict[str, Any] = {"save_all": True, "append_images": frames[1:], "duration": 100} if num_frames > 1 else {}
    frames[0].save(file, kind, **more)
    return file.getvalue()


def train(record: Record, num_steps: int, rng: random.Random, scale: float = 1.0, eval_every: int = 20) -> None:
    """Steps, evals and per-layer tables of a run."""
    best: dict[str, Any] | None = None
    layers = [f"blocks.{i}.{part}" for i in range(4) for part in ("attention", "mlp")]
    for step in range(num_steps):
        if step % eval_every == 0:
            loss = scale * (1.6 + 3 * math.exp(-step / 60))
            record.log(step, {"eval/full_val/loss": loss})
            record.event("eval", step=step, results={"full_val": {"loss": loss, "accuracy": 1 / (1 + loss)}})
            if best is None or loss < best["loss"]:
                best = {"step": step, "set": "full_val", "loss": loss}
            columns = {
                "grad": [rng.random() / (1 + i) for i in range(len(layers))],
                "weight": [1.0 + 0.01 * step] * len(layers),
            }
            record.table("tensors", step, layers, columns)
        record.log(step, row(step, rng, scale))
    record.update(best=best)


def write_book(root: Path, num_steps: int = 200) -> None:
    """Runs that look real: a chain of attempts, seeds, samples of every kind, one that diverged, one of an own loop."""
    rng = random.Random(0)
    first = start(root, "piano", why="a first try")
    train(first, num_steps, rng)
    append_event(first.path, "note", text="the loss is **still** falling at the end")
    for step in (0, num_steps // 2, num_steps - 1):
        first.add_sample(step, "sample.txt", f"what it says at step {step}\n".encode(), "a text")
        first.add_sample(step, "tune.mid", midi([60 + step % 12, 64, 67]), "a tune")
        first.add_sample(step, "tune.wav", wav(hz=220 + step), "the same as sound")
        first.add_sample(step, "sheet.png", picture(step % 256), "a contact sheet")
        first.add_sample(step, "walk.webp", picture(step % 256, "WEBP", 4), "a film")
    first.finish("finished", totals={"elapsed_s": 12.5})

    second = start(root, "piano", parent=first.id, why="clip harder", config={"optimizer": {"grad_clip": 0.5}})
    train(second, num_steps, rng, 0.95)
    second.add_sample(num_steps - 1, "tune.mid", midi([62, 65, 69]), "a tune")
    second.add_sample(num_steps - 1, "tune.wav", wav(hz=330), "the same as sound")
    second.update(tags=["baseline", "keep"], verdict={"word": "supported", "text": "lower", "unix_s": 1.0})
    second.finish("finished", totals={"elapsed_s": 13.0})

    for seed in (1, 2):
        record = start(root, "piano", parent=second.id, seed=seed, config={"seed": seed})
        train(record, num_steps, rng, 0.95 + 0.01 * seed)
        record.finish("finished", totals={"elapsed_s": 12.0})

    wild = start(root, "piano", parent=first.id, why="a higher rate", config={"lr": {"learning_rate": 1.0}})
    for step in range(60):
        values = row(step, rng)
        values["loss"] = math.nan if step > 50 else values["loss"] * 1.1**step
        values["norm"] = math.inf if step > 50 else values["norm"] * 1.2**step
        wild.log(step, values)
    wild.finish("diverged", reason="the loss was not finite for 8 steps")

    own = start(root, "mnist", recipe="own loop", preset=None, config={"lr": 0.1}, derived={}, data={}, definitions={})
    for step in range(100):
        own.log(step, {"train/acc": step / 100, "loss": 2.3 * 0.97**step})
    own.add_sample(50, "confusion.table.json", json.dumps(
        {"columns": ["digit", "right", "note"], "rows": [[0, 0.9, "<b>round</b>"], [1, 0.97, "thin"]]}
    ).encode())  # fmt: skip
    own.add_sample(50, "weights.histogram.json", json.dumps({"edges": [-1, 0, 1, 2], "counts": [3, 9, 4]}).encode())
    own.add_sample(50, "digit.png", picture(10), "a digit")
    own.add_sample(50, "click.wav", wav(0.1), "a click")
    own.finish("finished")


def write_many(root: Path, num_runs: int, num_steps: int = 20, experiment: str = "many") -> None:
    """So many runs in a tree, each a copy of one with its own name, config and curves."""
    rng = random.Random(1)
    first = start(root, experiment)
    train(first, num_steps, rng)
    first.finish("finished", totals={"elapsed_s": 3.0})
    document = json.loads((first.path / "run.json").read_text())
    uids = [document["uid"]]
    for number in range(2, num_runs + 1):
        folder = root / experiment / str(number)
        (folder / "metrics").mkdir(parents=True)
        parent = rng.randrange(1, number)
        for name in ("config.sources.json", "data.json", "definitions.json", "env.json", "events.ndjson"):
            shutil.copyfile(first.path / name, folder / name)
        rate, seed = rng.choice([1e-4, 3e-4, 1e-3]), rng.randrange(4)
        (folder / "config.yaml").write_text(
            f"lr:\n  learning_rate: {rate}\n  schedule: cosine\noptimizer:\n  grad_clip: {rng.choice([0.5, 1.0])}\n"
            f"data:\n  batch_size: 8\nseed: {seed}\n"
        )
        scale = 0.9 + 0.2 * rng.random()
        began = START.timestamp()
        lines = [{"step": step, "unix_s": began + step, **row(step, rng, scale)} for step in range(num_steps)]
        lines.append({"step": num_steps - 1, "unix_s": began + num_steps, "eval/full_val/loss": scale})
        (folder / "metrics" / "000.ndjson").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        uids.append(uuid.UUID(int=rng.getrandbits(128)).hex)
        name = f"{experiment}/{number}"
        (folder / "run.json").write_text(json.dumps({
            **document, "uid": uids[-1], "id": name, "number": number, "parent": f"{experiment}/{parent}",
            "parent_uid": uids[parent - 1], "seed": seed, "why": rng.choice([None, "less noise", "more data", "wider"]),
            "tags": rng.choice([[], ["keep"], ["wide", "keep"]]), "created": _iso(number), "ended": _iso(number + 1),
            "status": rng.choice(["finished"] * 8 + ["crashed", "stopped"]),
            "best": {"step": num_steps - 1, "set": "full_val", "loss": scale}, "segments": [],
        }))  # fmt: skip


def write_long(root: Path, num_steps: int = 1_000_000, num_metrics: int = 30, experiment: str = "long") -> None:
    """One run of so many rows. Its loss has a spike at step SPIKE and a NaN at step NAN."""
    record = start(root, experiment, derived={"num_steps": num_steps, "rows_per_step": 8, "epoch_rows": 4000})
    record.finish("finished", last_step=num_steps - 1, totals={"elapsed_s": 0.05 * num_steps})
    encode, rng = msgspec.json.Encoder().encode, random.Random(2)
    names = ["loss", "norm", "lr", "targets", "step_s"][:num_metrics]
    names += [f"signal/{i}" for i in range(num_metrics - len(names))]
    noise = [rng.gauss(0, 1) for _ in range(4099)]  # a prime: columns do not repeat together
    with (record.path / "metrics" / "000.ndjson").open("wb") as file:
        lines: list[bytes] = []
        for step in range(num_steps):
            loss: Any = 1.5 + 3 * math.exp(-step / (num_steps / 5)) + 0.1 * noise[step % 4099]
            loss = 50.0 if step == SPIKE else "NaN" if step == NAN else loss
            values = [loss, 1 + abs(noise[(7 * step) % 4099]), 1e-3 * (1 - step / num_steps), 4096, 0.05]
            values += [noise[(step * (i + 2)) % 4099] + i for i in range(num_metrics - 5)]
            lines.append(encode({"step": step, "unix_s": 1.8e9 + 0.05 * step, **dict(zip(names, values))}))
            if len(lines) == 10_000:
                file.write(b"\n".join(lines) + b"\n")
                lines = []
        file.write(b"".join(line + b"\n" for line in lines))


def _iso(minutes: int) -> str:
    return (START + timedelta(minutes=minutes)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--metrics", type=int, default=30)
    asked = parser.parse_args()
    write_book(asked.folder)
    if asked.runs:
        write_many(asked.folder, asked.runs)
    if asked.steps:
        write_long(asked.folder, asked.steps, asked.metrics)
