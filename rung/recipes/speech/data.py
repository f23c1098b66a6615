"""Prepares speech: utterances of a source become a store of sounds, features and texts.

A store holds each sound at 16 kHz as the encoders hear it, and what they made of it: training then needs no encoder,
and each clip was encoded alone, as its neighbours in a batch would change its features. Texts are kept as text, so
that a language model can be exchanged without preparing anything again. What cannot be used is listed with the reason.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rung.data.audio import resample
from rung.data.store import Store, StoreWriter, check_apart, missing, place
from rung.errors import DataError
from rung.recipe import Report
from rung.recipes.speech import config as keys
from rung.recipes.speech.sources import SAMPLE_RATE, Source, Utterance
from rung.text import printable
from rung.units import duration, percent, plural

if TYPE_CHECKING:
    from rung.recipes.speech.encoders import Encoder

PEAK = 0.5  # that every sound is scaled to
SHOWN = 3  # quarantined files that a summary names


def prepare(
    source: Path | None, out: Path, cfg: keys.Config, *, seed: int, name: str, replace: bool, report: Report,
    device: str,
) -> str:  # fmt: skip
    """Writes the store and returns a summary of it."""
    from rung.recipes.speech.encoders import open_encoder
    from rung.recipes.speech.sources.splits import assign_splits

    if source is not None:
        check_apart(source, out)
    with StoreWriter(out, kind="speech", replace=replace) as writer:  # first: a name that is taken is found at once
        found = find_source(source, cfg.dataset, seed, report)
        split_of, note = assign_splits(found.utterances, cfg.dataset.held_out, seed)
        encoders = [
            open_encoder(one.name, one.path, report) for one in (cfg.encoder, cfg.second_encoder) if one.name != "none"
        ]
        settings: dict[str, Any] = {
            "encoder.name": cfg.encoder.name, "encoder.path": cfg.encoder.path,
            "second_encoder.name": cfg.second_encoder.name, "second_encoder.path": cfg.second_encoder.path,
            "dataset.normalise": cfg.dataset.normalise, "dataset.silence_s": cfg.dataset.silence_s,
            "dataset.speeds": list(cfg.dataset.speeds), "data.max_seconds": cfg.data.max_seconds, "seed": seed,
        }  # fmt: skip
        if source is None:
            settings |= {"dataset.sentences": cfg.dataset.sentences, "dataset.utterances": cfg.dataset.utterances}
        else:
            settings["dataset.held_out"] = cfg.dataset.held_out
        about = [
            {one: getattr(encoder, one) for one in ("name", "hash", "width", "frames_per_s")} for encoder in encoders
        ]
        writer.info.update(name=name, settings=settings, source=found.name, encoders=about, note=note)
        writer.info["quarantined"] = list(found.quarantined)
        utterances = list(found.utterances)
        for utterance in found.utterances:
            if split_of[utterance.name] == "train":
                utterances += [at_speed(utterance, speed) for speed in cfg.dataset.speeds if speed != 1]
        split_of |= {one.name: "train" for one in utterances[len(found.utterances) :]}
        return _write(writer, utterances, split_of, encoders, cfg, report, device)


def find_source(source: Path | None, cfg: keys.Dataset, seed: int, report: Report) -> Source:
    if source is None:
        from rung.recipes.speech.sources.espeak import embedded

        return embedded(cfg.sentences, cfg.utterances, seed, report)
    from rung.recipes.speech.sources.files import from_path

    return from_path(source, report)


def at_speed(utterance: Utterance, speed: float) -> Utterance:
    """The same words, played faster or slower: the voice is higher or lower too, like that of another speaker."""

    def read() -> np.ndarray:
        return resample(utterance.read(), round(SAMPLE_RATE * speed), SAMPLE_RATE)

    return replace(utterance, name=f"{utterance.name} at speed {speed:g}", read=read)


def as_heard(sound_N: np.ndarray, cfg: keys.Dataset, max_seconds: float) -> tuple[np.ndarray, bool]:
    """int16 (N,) as the encoders get it: scaled, cut, with silence around it; and whether something was cut off."""
    longest = round(max_seconds * SAMPLE_RATE)
    is_cut, sound_N = len(sound_N) > longest, sound_N[:longest]
    if cfg.normalise:
        sound_N = sound_N * (PEAK / max(float(np.abs(sound_N).max(initial=0.0)), 1e-6))
    quiet = round(cfg.silence_s * SAMPLE_RATE)
    return np.rint(np.pad(sound_N, quiet) * 32767).clip(-32768, 32767).astype(np.int16), is_cut


def _write(
    writer: StoreWriter, utterances: list[Utterance], split_of: dict[str, str], encoders: list[Encoder],
    cfg: keys.Config, report: Report, device: str,
) -> str:  # fmt: skip
    writer.array("sound", np.int16)
    writer.array("features", np.float16, (sum(encoder.width for encoder in encoders),))
    quarantined: list[dict[str, str]] = writer.info["quarantined"]
    counts = {split: Counter[str]() for split in ("train", "validation", "test")}
    seconds = dict.fromkeys(counts, 0.0)
    speakers: dict[str, set[str]] = {}
    num_cut, before = 0, time.perf_counter()
    for number, (utterance, heard) in enumerate(_encoded(utterances, encoders, cfg, device)):
        report("encoding", number, len(utterances))
        if isinstance(heard, str):
            quarantined.append({"file": utterance.name, "reason": heard})
            continue
        sound, features, is_cut = heard
        split = split_of[utterance.name]
        writer.record(
            split=split, start=writer.append("sound", sound), length=len(sound), num_frames=len(features),
            frame=writer.append("features", features), text=utterance.text, task=utterance.task,
            question=utterance.question, speaker=utterance.speaker, source=utterance.name,
        )  # fmt: skip
        num_cut += is_cut
        counts.setdefault(split, Counter())[utterance.task] += 1
        seconds[split] = seconds.get(split, 0.0) + len(sound) / SAMPLE_RATE
        speakers.setdefault(split, set()).add(utterance.speaker)
    report("encoding", len(utterances), len(utterances))
    encode_s = time.perf_counter() - before
    if not counts["train"]:
        why = f"; the first: {quarantined[0]['file']}: {quarantined[0]['reason']}" if quarantined else ""
        raise DataError(
            f"nothing to learn from in {len(utterances)} utterances: {len(quarantined)} could not be used{why}; pass "
            "--from an annotation file, or a folder of sound files with transcripts",
            code="data-empty",
        )
    writer.info["counts"] = {
        split: {
            "utterances": found.total(), "hours": round(seconds[split] / 3600, 4),
            "speakers": len(speakers.get(split, set()) - {""}), "tasks": dict(found),
        }
        for split, found in counts.items()
    }  # fmt: skip
    writer.info.update(cut=num_cut, encode_s=round(encode_s, 2))
    writer.info["summary"] = summary = _summary(writer.info)
    return summary


def _encoded(
    utterances: list[Utterance], encoders: list[Encoder], cfg: keys.Config, device: str
) -> Iterator[tuple[Utterance, tuple[np.ndarray, np.ndarray, bool] | str]]:
    """Each utterance with its sound, its features and whether it was cut, or with the reason why it cannot be used.

    Clips are too short for several cores to share one: each core has a clip of its own, in a thread with one of
    torch's. Features are the same however many there are.
    """
    import torch

    from rung.recipes.speech.encoders import encode

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    for encoder in encoders:
        encoder.to(device)

    def encoded(sound: np.ndarray) -> np.ndarray:
        return encode(encoders, sound.astype(np.float32) / 32767, device)

    cores, waiting = torch.get_num_threads(), deque[tuple[Utterance, Any]]()

    def first() -> tuple[Utterance, tuple[np.ndarray, np.ndarray, bool] | str]:
        utterance, found = waiting.popleft()
        if isinstance(found, str):
            return utterance, found
        sound, is_cut, future = found
        features = future.result()
        if not np.isfinite(features).all():
            return utterance, "the encoder gives features that are not finite"
        return utterance, (sound, features, is_cut)

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(cores) as pool:
            for utterance in utterances:
                try:
                    sound, is_cut = as_heard(utterance.read(), cfg.dataset, cfg.data.max_seconds)
                    waiting.append((utterance, (sound, is_cut, pool.submit(encoded, sound))))
                except DataError as error:
                    waiting.append((utterance, str(error)))
                if len(waiting) > 2 * cores:
                    yield first()
            while waiting:
                yield first()
    finally:
        torch.set_num_threads(cores)


def _summary(info: dict[str, Any]) -> str:
    lines = []
    for split, one in info["counts"].items():
        voices = f" of {plural(one['speakers'], 'speaker')}" if one["speakers"] else ""
        tasks = ", ".join(f"{task} {num}" for task, num in one["tasks"].items())
        tasks = f" ({tasks})" if len(one["tasks"]) > 1 else ""
        length = duration(3600 * one["hours"])
        lines.append(f"{split}: {plural(one['utterances'], 'utterance')}{tasks}{voices}, {length}")
    heard = sum(one["hours"] for one in info["counts"].values()) * 3600
    names = " and ".join(encoder["name"] for encoder in info["encoders"])
    speed = f", {heard / info['encode_s']:.0f} times faster than it was spoken" if info["encode_s"] > 0 else ""
    lines.append(f"encoded by {names} in {duration(info['encode_s'])}{speed}; training reads the result")
    if info["note"]:
        lines.append(info["note"])
    if info["cut"]:
        longest = info["settings"]["data.max_seconds"]
        lines.append(f"{plural(info['cut'], 'utterance')} cut at data.max_seconds={longest:g}; their texts are whole")
    if bad := info["quarantined"]:
        share = percent(len(bad) / (len(bad) + sum(one["utterances"] for one in info["counts"].values())))
        lines.append(f"left out: {len(bad)} ({share}), listed in manifest.json")
        lines += [f"  {printable(one['file'])}: {printable(one['reason'])}" for one in bad[:SHOWN]]
        if len(bad) > SHOWN:
            lines.append(f"  and {len(bad) - SHOWN} more")
    return "\n".join(lines)


def open_store(name: str, key: str = "base_dataset_name") -> Store:
    path = place(name)
    if not path.exists():
        raise missing("speech", name, key)
    return Store.open(path, kind="speech")
