"""Does it make music? Figures of one music run, on its own held-out pieces: `python -m bench.music music/1`.

Losses by codebook beside those of a unigram and a bigram model, and what they rise to when texts are swapped between
clips. Then clips made from held-out texts against held-out pieces, heard through the same codec: distances of timbre,
rhythm and harmony (rung/recipes/music/metrics.py), beside those of other held-out pieces, the best one can ask for, and
of codes drawn by their frequency alone, the worst. Files under --audio are reported beside.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from rung import api
from rung.data.audio import read_audio, spectrogram_png, wav_bytes
from rung.random import Draw
from rung.recipes.music.data import codec_of
from rung.recipes.music.generate import SamplingParams, generate
from rung.recipes.music.metrics import Features, distance, features
from rung.recipes.music.recipe import Music
from rung.recipes.music.samples import Sound
from rung.recipes.music.stream import Clips


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--clips", type=int, default=32)
    parser.add_argument("--at", type=int, help="the save; default: the best")
    parser.add_argument("--audio", type=Path, nargs="*", default=[], help="real recordings to report beside")
    parser.add_argument("--out", type=Path, help="where to put clips, pictures and figures.json")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=250)
    parser.add_argument("--guidance", type=float, default=3.0)
    asked = parser.parse_args()

    loaded = api.load(asked.run, at=asked.at)
    recipe, model = loaded.setup.recipe, loaded.setup.state.model.eval()
    assert isinstance(recipe, Music)
    device = model.offsets_C.device
    figures: dict[str, object] = {"run": loaded.run.id, "step": loaded.step}
    print(f"{loaded.run.id} at step {loaded.step}, on {device}")
    with torch.no_grad(), loaded.setup.precision.autocast():
        figures["losses"] = losses(recipe, model, loaded.setup.state.objectives[0].loss, device)
    figures["likeness"] = likeness(recipe, model, asked, loaded.setup.precision)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "figures.json").write_text(json.dumps(figures, indent=1))


def losses(recipe: Music, model: torch.nn.Module, loss: object, device: torch.device) -> dict[str, object]:
    """Nats by codebook over the whole validation split: with the right texts, with none, and with another piece's."""
    streams = recipe.streams()
    rows = np.arange(streams["validation"].num_rows)
    found: dict[str, np.ndarray] = {}
    for name in ("validation", "unconditional", "swapped"):
        stream = streams["unconditional" if name == "unconditional" else "validation"]
        pieces = stream.cluster_of(rows)
        sums = np.zeros((len(recipe.channels), 2))
        for start in range(0, len(rows), 32):
            ids = rows[start : start + 32]
            arrays = stream.gather(ids, Draw(0, -1, ids))
            if name == "swapped":  # by as many rows as lead to another piece with another text
                for i, row in enumerate(ids):
                    others = np.roll(rows, -row)[1:]
                    other = next(o for o in others if pieces[o] != pieces[row])
                    given = stream.gather(np.array([other]), Draw(0, -1, np.array([other])))
                    arrays["text"][i], arrays["text_length"][i] = given["text"][0], given["text_length"][0]
            batch = {key: torch.from_numpy(value).to(device) for key, value in arrays.items()}
            parts = loss(batch, Draw(0, -1, ids)).parts  # type: ignore[operator]
            sums += [[float(v) for v in parts[f"codebook/{channel}"]] for channel in recipe.names]
        found[name] = sums[:, 0] / sums[:, 1]
    baselines = recipe.store.info["baselines"]["validation"]
    known = {name: [float(by[c]) for c in recipe.channels] for name, by in baselines.items()}
    table = known | {name: values.tolist() for name, values in found.items()}
    for name, values in table.items():
        print(f"  {name:<14} mean {np.mean(values):.4f}   " + " ".join(f"{value:.3f}" for value in values))
    print(f"SWAPPED texts cost {np.mean(table['swapped']) - np.mean(table['validation']):+.4f} nats a code")
    return dict(table)


def likeness(recipe: Music, model: torch.nn.Module, asked: argparse.Namespace, precision: object) -> dict[str, object]:
    codec = codec_of(recipe.store)
    sound, rate, num_frames = (
        Sound(codec, recipe.num_codebooks, recipe.num_sides),
        codec.sample_rate,
        recipe.pattern.num_frames,
    )
    chance = np.random.default_rng(0)

    def heard(codes: np.ndarray) -> np.ndarray:
        return sound.decode(codes).mean(axis=1)

    # Whole stretches of held-out pieces; the two halves share no piece, so that one can be judged by the other.
    stretches: dict[str, list[np.ndarray]] = {}
    texts: list[str] = []
    for split in ("validation", "test"):
        for number in recipe.store.split(split).tolist():
            record = recipe.store.index[number]
            codes = recipe.store.arrays["codes"][record["start"] : record["start"] + record["length"]][
                :, recipe.channels
            ]
            for start in range(0, len(codes) - num_frames + 1, num_frames):
                stretches.setdefault(record["piece"], []).append(np.asarray(codes[start : start + num_frames]))
            texts.append(str(record["text"]))
    pieces = sorted(stretches)
    chance.shuffle(pieces)
    halves = []
    for some in (pieces[::2], pieces[1::2]):
        clips = [clip for piece in some for clip in stretches[piece]]
        halves.append([heard(clips[n]) for n in chance.permutation(len(clips))[: asked.clips]])
    reference = features(halves[0], rate)
    sets: dict[str, Features] = {"other held-out pieces": features(halves[1], rate)}

    began = time.monotonic()
    chosen = [texts[n % len(texts)] for n in chance.permutation(max(len(texts), asked.clips))[: asked.clips]]
    stream = recipe.streams()["validation"]
    assert isinstance(stream, Clips)
    length = recipe.cfg.data.text_length
    from rung.recipes.music.stream import encode_text

    text_BL = torch.zeros(len(chosen), length, dtype=torch.long)
    lengths = torch.zeros(len(chosen), dtype=torch.long)
    for n, text in enumerate(chosen):
        row = encode_text(text, length)
        text_BL[n, : len(row)], lengths[n] = torch.from_numpy(row.astype(np.int64)), len(row)
    device = model.offsets_C.device  # type: ignore[union-attr]
    params = SamplingParams(num_frames, asked.temperature, asked.top_k, guidance_scale=asked.guidance)
    with precision.autocast():  # type: ignore[attr-defined]
        made = generate(
            model, text_BL.to(device), lengths.to(device), params, recipe.delays, recipe.specials,  # type: ignore[arg-type]
            torch.Generator(device).manual_seed(0),
        )  # fmt: skip
    clips = [heard(codes) for codes in made]
    seconds = sum(len(clip) for clip in clips) / rate
    print(f"  {len(clips)} clips, {seconds:.0f} s of music in {time.monotonic() - began:.1f} s")
    sets["the model's clips"] = features(clips, rate)

    counts = np.stack([
        np.bincount(recipe.store.arrays["codes"][:, c], minlength=recipe.specials.eos) for c in recipe.channels
    ]).astype(float)  # fmt: skip
    shares = counts / counts.sum(axis=1, keepdims=True)
    drawn = [
        np.stack([chance.choice(len(p), num_frames, p=p) for p in shares], axis=1).astype(np.uint16)
        for _ in range(asked.clips)
    ]
    noise = [heard(codes) for codes in drawn]
    sets["codes by frequency alone"] = features(noise, rate)
    for path in asked.audio:
        whole = read_audio(path, rate)
        codes = sound.encode(whole)
        parts = [heard(codes[s : s + num_frames]) for s in range(0, max(1, len(codes) - num_frames + 1), num_frames)]
        sets[path.name] = features(parts, rate)
    found = {}
    print(f"  {'distance to held-out pieces of':<44} {'mel':>8} {'onset':>8} {'chroma':>8}")
    for name, some in sets.items():
        one = distance(some, reference)
        found[name] = one._asdict()
        print(f"  {name[:44]:<44} {one.mel:8.2f} {one.onset:8.3f} {one.chroma:8.3f}")
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        for n in range(min(3, len(clips))):
            (asked.out / f"clip-{n}.wav").write_bytes(wav_bytes(clips[n], rate))
        (asked.out / "clip-0.png").write_bytes(spectrogram_png(clips[0], rate, chosen[0]))
        (asked.out / "held-out.png").write_bytes(spectrogram_png(halves[0][0], rate, "a held-out piece"))
    return {"clips": len(clips), "seconds": seconds, "distances": found, "texts": chosen[:3]}


if __name__ == "__main__":
    main()
