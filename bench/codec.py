"""rung's codec against two simpler ones of equal bit rate, all fitted to the same pieces and scored on others.

    python -m bench.codec [--quick] [--rounds 1]

Ten minutes of the embedded music are fitted to, up to 24 s of a piece; two minutes of other pieces are scored, up to
10 s of each. 24 kHz mono, a frame of 320 samples, 8 books of 1024 codes: 6 kbit/s. The figures are means over the
scored pieces: SI-SDR, which is about the waveform, and the distance of log-mel spectra (rung/recipes/music/spectra.py).

    k-means       residual k-means of weighted MDCT frames, every frame used in every round, nearest codes
    autoencoder   convolutions on MDCT frames, 1.7 M parameters, 64 numbers a frame, and a residual quantiser inside
    rung          fit_codec, which varies speed, gain and place of its excerpts; the other two learn from the plain ones

The ratios compare rung with the better of the two in each figure: the energy of the error (that is SI-SDR without the
logarithm), the log-mel distance, and how much faster than sound rung encodes and decodes. A round fits all three with
another seed. One thread, about ten minutes a round.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from rung.bench.report import facts, in_turns, spread, verdict
from rung.recipes.music.rvq import Frames, fit_codec
from rung.recipes.music.spectra import frame_size, log_mel_distance, mel_filters, si_sdr

RATE, HOP = 24000, 320
FIT_S, FIT_EXCERPT_S, SCORE_S, SCORE_EXCERPT_S = 600, 24, 120, 10
BAR_SPEED = 100.0
Sounds = list[np.ndarray]
Coder = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]  # encode and decode


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few codes, seconds of sound: does it run at all?")
    parser.add_argument("--rounds", type=int, default=1, help="fits of each codec, with seeds 0, 1, ...")
    args = parser.parse_args()
    torch.set_num_threads(1)
    books, size, steps = (2, 32, 8) if args.quick else (8, 1024, 400)
    fitted, scored = ([made_up(1), made_up(2)], [made_up(3)]) if args.quick else material()
    lengths = [sum(map(len, sounds)) / RATE for sounds in (fitted, scored)]
    what = f"{lengths[0]:.0f} s of {len(fitted)} pieces fitted to, {lengths[1]:.0f} s of {len(scored)} others scored"
    print(facts("torch", "numpy", threads=1, music=what), flush=True)

    noise, mel, speeds = [], [], []
    levels = sorted({1, 2, 4, books} & set(range(1, books + 1)))
    for seed in range(args.rounds):
        ways: dict[str, Callable[[], Coder]] = {
            "k-means": lambda: kmeans_coder(fitted, books, size, seed),  # noqa: B023
            "autoencoder": lambda: autoencoder(fitted, books, size, steps * 7 // 4, seed),  # noqa: B023
            "rung": lambda: ours(fitted, books, size, steps, seed),  # noqa: B023
        }
        coders, figures = {}, {}
        for name, fit in ways.items():
            begun = time.perf_counter()
            coders[name] = fit()
            fit_took = time.perf_counter() - begun
            table = [scores(coders[name], scored, level) for level in levels]
            figures[name] = table[-1]
            cells = "   ".join(f"{level} {sdr:5.2f} dB {mels:.3f}" for level, (sdr, mels) in zip(levels, table))
            print(f"seed {seed} {name:<12} {cells}   fit {fit_took:.0f} s", flush=True)
        timed = in_turns(1 if args.quick else 3, {name: times_real(coder, scored) for name, coder in coders.items()})
        print(f"seed {seed} x real time: " + ", ".join(f"{name} {spread(v, '.0f')}" for name, v in timed.items()))
        best_sdr = max(figures["k-means"][0], figures["autoencoder"][0])
        noise.append(10 ** ((best_sdr - figures["rung"][0]) / 10))
        mel.append(figures["rung"][1] / min(figures["k-means"][1], figures["autoencoder"][1]))
        speeds += timed["rung"]
    rates = ", ".join(f"{level}: {level * RATE / HOP * math.log2(size) / 1000:.2f} kbit/s" for level in levels)
    print(f"bit rates by books: {rates}")
    print(verdict("codec-noise", noise, 1.0, is_least=False))
    print(verdict("codec-log-mel", mel, 1.0, is_least=False))
    print(verdict("codec-times-real-time", speeds, BAR_SPEED, form=".1f"))


def material() -> tuple[Sounds, Sounds]:
    """Excerpts of the embedded music, no piece in both lists."""
    from rung.progress import reporter
    from rung.recipes.music.sources.embedded import embedded

    report, close = reporter()
    source = embedded(0, 0, report)
    close()
    draw = np.random.default_rng(0)
    by_piece = {track.piece: track for track in source.tracks}
    tracks = [by_piece[piece] for piece in draw.permutation(sorted(by_piece)).tolist()]
    # Freedoom's pieces are fewer than Bach's: take them in turns, as the source does for a small number of minutes.
    bands = [track for track in tracks if "freedoom" in track.name.lower()]
    scores_ = [track for track in tracks if "freedoom" not in track.name.lower()]
    mixed = iter([track for pair in zip(bands, scores_) for track in pair])
    lists: list[Sounds] = []
    for wanted_s, excerpt_s in ((FIT_S, FIT_EXCERPT_S), (SCORE_S, SCORE_EXCERPT_S)):
        taken: Sounds = []
        while sum(map(len, taken)) < wanted_s * RATE:
            sound = next(mixed).read(RATE).sound.mean(axis=1)
            first = len(sound) // 4  # beginnings are often quiet
            taken.append(sound[first : first + excerpt_s * RATE].astype(np.float32))
        lists.append(taken)
    return lists[0], lists[1]


def made_up(seed: int) -> np.ndarray:
    """Ten seconds of decaying tones, four a second: --quick needs no downloads."""
    draw = np.random.default_rng(seed)
    sound = np.zeros(10 * RATE, np.float32)
    for start in range(0, len(sound), RATE // 4):
        t = np.arange(len(sound) - start) / RATE
        pitch = 220 * 2 ** (draw.integers(0, 24) / 12)
        sound[start:] += (draw.uniform(0.1, 0.3) * np.exp(-4 * t) * np.sin(2 * np.pi * pitch * t)).astype(np.float32)
    return sound


def scores(coder: Coder, sounds: Sounds, level: int) -> tuple[float, float]:
    encode, decode = coder
    made = [decode(encode(sound)[:, :level])[: len(sound)] for sound in sounds]
    mels = [log_mel_distance(sound, estimate, RATE) for sound, estimate in zip(sounds, made)]
    return float(np.mean([si_sdr(s, e) for s, e in zip(sounds, made)])), float(np.mean(mels))


def times_real(coder: Coder, sounds: Sounds) -> Callable[[], float]:
    """In the process's own time: what else the machine does is left out."""

    def measure() -> float:
        begun = time.process_time()
        for sound in sounds:
            coder[1](coder[0](sound))
        return sum(map(len, sounds)) / RATE / (time.process_time() - begun)

    return measure


def ours(fitted: Sounds, books: int, size: int, steps: int, seed: int) -> Coder:
    codec = fit_codec(
        fitted, sample_rate=RATE, hop=HOP, num_codebooks=books, codebook_size=size, steps=steps, seed=seed
    )
    return codec.encode, codec.decode


def kmeans_coder(fitted: Sounds, books: int, size: int, seed: int, exponent: float = 0.2, rounds: int = 12) -> Coder:
    """Weights are rms ** -exponent: 0 loses the upper bands, 0.5 gains 0.06 in log-mel and loses 1 dB."""
    generator = torch.Generator().manual_seed(seed)
    spectra = torch.cat([mdct(sound) for sound in fitted])
    rms = spectra.square().mean(0).sqrt()
    weight = (rms + 1e-3 * rms.max()) ** -exponent
    left, centres = spectra * weight, []
    for _ in range(books):
        book = kmeans(left, size, rounds, generator)
        left = left - book[nearest(left, book)]
        centres.append(book)

    def encode(sound: np.ndarray) -> np.ndarray:
        return residual(mdct(sound) * weight, centres)[0].numpy()

    def decode(codes: np.ndarray) -> np.ndarray:
        total = sum(centres[c][torch.from_numpy(codes[:, c])] for c in range(codes.shape[1]))
        return inverse(total / weight)

    return encode, decode


class Autoencoder(nn.Module):
    def __init__(self, width: int = 256, latent: int = 64) -> None:
        super().__init__()

        def block() -> nn.Module:
            return Residual(
                nn.Sequential(nn.GELU(), nn.Conv1d(width, width, 3, padding=1), nn.GELU(), nn.Conv1d(width, width, 1))
            )

        self.encoder = nn.Sequential(nn.Conv1d(HOP, width, 5, padding=2), block(), block(), nn.Conv1d(width, latent, 1))
        self.decoder = nn.Sequential(nn.Conv1d(latent, width, 1), block(), block(), nn.Conv1d(width, HOP, 5, padding=2))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def autoencoder(fitted: Sounds, books: int, size: int, steps: int, seed: int) -> Coder:
    """Half of the steps without quantiser, then k-means for its books, then straight through and moving averages."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    net = Autoencoder()
    spectra = [mdct(sound) for sound in fitted]
    scale = torch.cat(spectra).square().mean(0).sqrt() ** 0.5 + 1e-3
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.98))
    size_, hop = frame_size(RATE)
    filters, window = torch.from_numpy(mel_filters(size_, RATE, 80)), torch.hann_window(size_)
    centres: list[Tensor] = []
    counts, sums = torch.ones(books, size), torch.zeros(books, size, 64)

    def log_mels(x: Tensor) -> Tensor:
        y = x @ FRAMES.transform_NF.T
        sound = (y[:, :-1, HOP:] + y[:, 1:, :HOP]).flatten(1)
        bins = torch.stft(sound, size_, hop, window=window, center=False, return_complex=True)
        return torch.log((bins.abs().transpose(1, 2) @ filters).clamp(min=1e-3))

    def latent(x: Tensor) -> Tensor:
        return net.encoder((x / scale).transpose(1, 2)).transpose(1, 2)

    def rebuilt(z: Tensor) -> Tensor:
        return net.decoder(z.transpose(1, 2)).transpose(1, 2) * scale

    for step in range(steps):
        adam.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        crops = []
        for _ in range(16):
            which = int(torch.randint(len(spectra), (1,), generator=generator))
            start = int(torch.randint(max(len(spectra[which]) - 75, 1), (1,), generator=generator))
            crops.append(spectra[which][start : start + 75])
        x = torch.stack(crops)
        z = latent(x)
        commitment = torch.zeros(())
        if step == steps // 2:
            with torch.no_grad():
                left = torch.cat([latent(s[None])[0] for s in spectra])
            for c in range(books):
                centres.append(kmeans(left, size, 5, generator))
                left = left - centres[c][nearest(left, centres[c])]
                sums[c] = centres[c]
        if centres:
            flat = z.detach().flatten(0, 1)
            codes, totals = residual(flat, centres)
            before = flat
            for c in range(books):  # moving averages; a code that nobody takes starts again at some frame
                counts[c] = 0.98 * counts[c] + 0.02 * torch.bincount(codes[:, c], minlength=size)
                sums[c] = 0.98 * sums[c] + 0.02 * torch.zeros(size, 64).index_add_(0, codes[:, c], before)
                before = flat - totals[c]
                centres[c] = sums[c] / counts[c][:, None].clamp(min=1e-4)
                if len(dead := torch.nonzero(counts[c] < 0.02)[:, 0]):
                    chosen = torch.randint(len(before), (len(dead),), generator=generator)
                    centres[c][dead] = sums[c][dead] = before[chosen]
                    counts[c][dead] = 1.0
            kept = torch.randint(1, books + 1, (16,), generator=generator)
            kept[::2] = books  # half of the crops with all books
            rows = torch.arange(16)
            quantised = torch.stack(totals).view(books, 16, 75, 64)[kept - 1, rows]
            commitment = (z - quantised).square().mean()
            z = z + (quantised - z).detach()
        made = rebuilt(z)
        energy = x.square().sum((1, 2)) + 1e-2
        loss = torch.log((made - x).square().sum((1, 2)) / energy + 1e-3).mean() + 0.25 * commitment
        loss = loss + 0.5 * (log_mels(made) - log_mels(x)).abs().mean()
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()

    @torch.inference_mode()
    def encode(sound: np.ndarray) -> np.ndarray:
        return residual(latent(mdct(sound)[None])[0], centres)[0].numpy()

    @torch.inference_mode()
    def decode(codes: np.ndarray) -> np.ndarray:
        total = sum(centres[c][torch.from_numpy(codes[:, c])] for c in range(codes.shape[1]))
        return inverse(rebuilt(total[None])[0])  # type: ignore[index]

    return encode, decode


FRAMES = Frames(HOP, 1)


def mdct(sound: np.ndarray) -> Tensor:
    padded = np.pad(sound, (0, -len(sound) % HOP))
    return FRAMES.mdct(torch.from_numpy(padded))[1:-1]


def inverse(spectrum: Tensor) -> np.ndarray:
    y = spectrum @ FRAMES.transform_NF.T
    sound = torch.zeros(len(y) + 1, HOP)
    sound[:-1] += y[:, :HOP]
    sound[1:] += y[:, HOP:]
    return sound.flatten()[HOP // 2 : HOP // 2 + len(y) * HOP].numpy()


def kmeans(x: Tensor, size: int, rounds: int, generator: torch.Generator) -> Tensor:
    centres = x[torch.randperm(len(x), generator=generator)[:size]].clone()
    for _ in range(rounds):
        codes = nearest(x, centres)
        counts = torch.bincount(codes, minlength=size)
        means = torch.zeros_like(centres).index_add_(0, codes, x) / counts.clamp(min=1)[:, None]
        fresh = x[torch.randint(len(x), (size,), generator=generator)]
        centres = torch.where((counts == 0)[:, None], fresh, means)
    return centres


def nearest(x: Tensor, centres: Tensor) -> Tensor:
    bias = centres.square().sum(1) / -2
    return torch.cat([torch.addmm(bias, part, centres.T).argmax(1) for part in x.split(2048)])


def residual(x: Tensor, centres: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The nearest code of each book in turn, and the sums of the codes so far."""
    codes, totals, total = [], [], torch.zeros_like(x)
    for book in centres:
        codes.append(nearest(x - total, book))
        total = total + book[codes[-1]]
        totals.append(total)
    return torch.stack(codes, 1), totals


if __name__ == "__main__":
    sys.exit(main())
