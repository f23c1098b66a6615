"""rung's own codec: a residual quantiser on MDCT frames, with a small network that finishes what it decodes.

A frame is described by its MDCT and by the logarithm of its level in some twenty bands; the quantiser sees the
strongest directions of both together. In loud frames the waveform decides
which codes are taken, in quiet ones the levels. The decoder's network sees the frames around and gives back what the
average of many sounds has lost, mostly the upper bands. The codes of a stretch of frames mean the same wherever it
stands: a piece cut out of them decodes to that piece of the sound, but for its first and last tenth of a second.

Averages over many frames need many frames: pitch, gain and place of the excerpts that are learned from are varied at
random, which was worth 0.7 dB on pieces that were not among them.

Shapes: N samples, T frames, F bins of the MDCT (as many as the hop has samples), E bands, D directions, C codebooks,
K codes, W beams, B excerpts, H width of the network.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor, nn

from rung import parse
from rung.errors import DataError, UserError
from rung.files import write_whole
from rung.recipes.music.codec import SETTINGS, WEIGHTS, Codec
from rung.recipes.music.spectra import FLOOR, frame_size, mel_filters

Report = Callable[[str, int, int], None]
FORMAT = 1
BLOCK = 256  # frames computed at once; always so many, so that no result depends on the length of the sound
QUIET = 1e-7  # added to the mean square of a band before its logarithm: 70 dB under full scale
# What levels add to the variance that is quantised. SI-SDR and log-mel distance on pieces not fitted to, 8 books:
# 0.15 gives 6.7 dB / 0.58, 0.05 7.2 / 0.58, 0.02 7.4 / 0.62, all with bins weighted by rms ** -0.2, which lost 0.2 dB.
LEVEL_SHARE = 0.05
NUM_DIRECTIONS = 96
# Error of the quantised vectors with 8 books against the nearest code of each in turn: 0.4 dB less; 4 beams gain
# 0.07 dB more at 0.9 of the speed.
BEAM = 3
WIDTH, NUM_BLOCKS, KERNEL = 192, 3, 7
EXCERPT_S, POOL_FRAMES, POOL_TIMES = 8.0, 180_000, 4  # what is learned from, in all and as a multiple of the data
KMEANS_ROUNDS, FRAMES_PER_CODE, FORGET = 10, 64, 0.7
BATCH, CROP_FRAMES, PEAK_LR, MEL_WEIGHT = 16, 75, 2e-3, 0.5


def fit_codec(
    sounds: Sequence[np.ndarray],
    *,
    sample_rate: int,
    hop: int = 320,
    num_codebooks: int = 8,
    codebook_size: int = 1024,
    steps: int = 400,
    seed: int = 0,
    device: str = "cpu",
    report: Report | None = None,
) -> RvqCodec:
    """A codec for sounds like these, mono float32 at `sample_rate`; `steps` are those of the decoder's network.

    The same for the same seed and steps on one platform's CPU with the same number of threads. 10 minutes of sound,
    8 x 1024 codes and 400 steps take about 100 s on one core; memory is 0.7 GB beside the sounds, however many
    there are.
    """
    if hop < 64 or hop % 2 or not 2 <= codebook_size <= 65536 or num_codebooks < 1 or steps < 1:
        problem = f"no codec has hop={hop}, num_codebooks={num_codebooks}, codebook_size={codebook_size}, steps={steps}"
        remedy = "give an even hop from 64, 1 or more codebooks and steps, 2 to 65536 codes"
        raise UserError(f"{problem}; {remedy}", code="config")
    tell = report or (lambda what, done, total: None)
    numbers = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)

    excerpts = _excerpts(sounds, sample_rate, hop, max(codebook_size, CROP_FRAMES), numbers, tell)
    codec = RvqCodec(
        {
            "format": FORMAT, "sample_rate": sample_rate, "hop": hop, "num_codebooks": num_codebooks,
            "codebook_size": codebook_size, "num_directions": min(NUM_DIRECTIONS, hop), "beam": BEAM,
            "width": WIDTH, "num_blocks": NUM_BLOCKS, "kernel": KERNEL, "steps": steps, "seed": seed,
        },
        device,
    )  # fmt: skip
    frames = codec.frames
    spectra = [frames.mdct(torch.from_numpy(e).to(device)) for e in excerpts]  # one frame more at either end
    del excerpts
    frames.measure(spectra)
    latents = [frames.describe(spectrum_TF) for spectrum_TF in spectra]
    _fit_books(codec, torch.cat(latents), generator, tell)
    codes = []
    for number, latent_TD in enumerate(latents):
        tell("encoding for the decoder", number, len(latents))
        codes.append(codec.search(latent_TD))
    del latents
    _fit_decoder(codec, [s[1:-1] for s in spectra], codes, steps, generator, tell)
    codec.to("cpu")
    codec.hash = codec.fingerprint()
    return codec


def _excerpts(
    sounds: Sequence[np.ndarray],
    sample_rate: int,
    hop: int,
    least_frames: int,
    numbers: np.random.Generator,
    tell: Report,
) -> list[np.ndarray]:
    """Random places of the sounds at random speed (3 semitones either way), gain and sign, an excerpt each."""
    lengths = np.array([len(sound) for sound in sounds], np.float64)
    total = float(lengths.sum()) / hop
    for number, sound in enumerate(sounds):
        if sound.ndim != 1:
            problem = f"sound {number} has shape {sound.shape}, not one channel"
            raise DataError(f"{problem}; mix the channels first", code="bad-shape")
        if not np.isfinite(sound).all():
            problem = f"sound {number} has samples that are not finite"
            raise DataError(f"{problem}; leave that file out", code="not-finite")
    if total < least_frames:
        problem = f"{total / sample_rate * hop:.1f} s of mono sound are too little to fit a codec"
        remedy = f"it needs {least_frames * hop / sample_rate:.1f} s, far better ten minutes"
        raise DataError(f"{problem}; {remedy}", code="too-little")
    num_frames = min(round(EXCERPT_S * sample_rate / hop), int(lengths.max() / hop) + 1)
    num_frames = max(num_frames, CROP_FRAMES + 2)
    num_excerpts = math.ceil(min(POOL_FRAMES, POOL_TIMES * total) / num_frames)
    found = []
    for number in range(num_excerpts):
        tell("gathering excerpts", number, num_excerpts)
        sound_N = sounds[int(numbers.choice(len(sounds), p=lengths / lengths.sum()))]
        speed = 2.0 ** numbers.uniform(-0.25, 0.25) if numbers.random() < 0.75 else 1.0
        num_wanted, num_made = round(num_frames * hop * speed), num_frames * hop
        # A sound too short for an excerpt is surrounded by silence, as a listener would hear it.
        start = int(numbers.integers(-hop, max(len(sound_N) - num_wanted, 0) + hop))
        taken_N = np.zeros(num_wanted, np.float32)
        inside = sound_N[max(start, 0) : max(start, 0) + num_wanted - max(-start, 0)]
        taken_N[max(-start, 0) : max(-start, 0) + len(inside)] = inside
        if num_made != num_wanted:
            spectrum = np.fft.rfft(taken_N)[: num_made // 2 + 1]
            spectrum = np.pad(spectrum, (0, num_made // 2 + 1 - len(spectrum)))
            taken_N = (np.fft.irfft(spectrum, num_made) * (num_made / num_wanted)).astype(np.float32)
        gain = numbers.choice([-1.0, 1.0]) * 10.0 ** numbers.uniform(-0.2, 0.1)
        found.append(taken_N * np.float32(gain))
    return found


def _fit_books(codec: RvqCodec, latent_TD: Tensor, generator: torch.Generator, tell: Report) -> None:
    """k-means of what the books before left over, on a new draw of frames each round, with a memory of older rounds."""
    size, num_books = codec.codebook_size, codec.num_codebooks
    num_drawn = min(FRAMES_PER_CODE * size, len(latent_TD))
    left_TD = latent_TD.clone()

    def draw(num: int) -> Tensor:
        return left_TD[torch.randint(len(left_TD), (num,), generator=generator).to(left_TD.device)]

    for number in range(num_books):
        centres_KD = draw(size)
        counts_K, sums_KD = torch.zeros(size, device=left_TD.device), torch.zeros_like(centres_KD)
        for round_ in range(KMEANS_ROUNDS):
            tell("fitting codebooks", number * KMEANS_ROUNDS + round_, num_books * KMEANS_ROUNDS)
            drawn_TD = draw(num_drawn)
            nearest_T = _nearest(drawn_TD, centres_KD)
            memory = FORGET if round_ >= 3 else 0.0  # the first centres are too far off to be remembered
            counts_K = counts_K * memory + torch.bincount(nearest_T, minlength=size)
            sums_KD = (sums_KD * memory).index_add_(0, nearest_T, drawn_TD)
            is_dead = counts_K < 0.5
            centres_KD = torch.where(is_dead[:, None], draw(size), sums_KD / counts_K.clamp(min=0.5)[:, None])
        left_TD -= centres_KD[_nearest(left_TD, centres_KD)]
        codec.books_CKD[number] = centres_KD
    codec.prepare()


def _nearest(x_TD: Tensor, centres_KD: Tensor) -> Tensor:
    bias_K = centres_KD.square().sum(1) / -2
    return torch.cat([torch.addmm(bias_K, part, centres_KD.T).argmax(1) for part in x_TD.split(8192)])


def _fit_decoder(
    codec: RvqCodec, spectra: list[Tensor], codes: list[Tensor], steps: int, generator: torch.Generator, tell: Report
) -> None:
    """Adam on the SDR and the log-mel distance of crops, half of them with all books and half with fewer."""
    frames, decoder, device = codec.frames, codec.decoder, codec.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        decoder.cpu().initialise()
    decoder.to(device).requires_grad_(True).train()
    decoder.scale_D.copy_(codec.books_CKD[0].std(0).clamp(min=1e-6))
    size, step = frame_size(codec.sample_rate)
    filters_FM = torch.from_numpy(mel_filters(size, codec.sample_rate, 80)).to(device)
    window_N = torch.hann_window(size, device=device)

    def log_mels(spectrum_BTF: Tensor) -> Tensor:
        y_BTN = spectrum_BTF @ frames.transform_NF.T
        sound_BN = (y_BTN[:, :-1, frames.hop :] + y_BTN[:, 1:, : frames.hop]).flatten(1)
        if sound_BN.shape[1] < size:
            sound_BN = F.pad(sound_BN, (0, size - sound_BN.shape[1]))
        bins = torch.stft(sound_BN, size, step, window=window_N, center=False, return_complex=True)
        return torch.log((bins.abs().transpose(1, 2) @ filters_FM).clamp(min=FLOOR))

    parameters = list(decoder.parameters())
    adam = torch.optim.AdamW(parameters, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    for number in range(steps):
        tell("fitting the decoder", number, steps)
        rate = min(1.0, (number + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * number / steps))
        adam.param_groups[0]["lr"] = PEAK_LR * rate
        latents, targets, levels = [], [], []
        for _ in range(BATCH):
            which, place, has_all, fewer = torch.rand(4, generator=generator).tolist()
            which = int(which * len(codes))
            start = int(place * (len(codes[which]) - CROP_FRAMES + 1))
            level = codec.num_codebooks if has_all < 0.5 else 1 + int(fewer * codec.num_codebooks)
            latents.append(codec.latent(codes[which][start : start + CROP_FRAMES, :level]))
            targets.append(spectra[which][start : start + CROP_FRAMES])
            levels.append(level)
        target_BTF = torch.stack(targets)
        made_BTF = decoder(frames, torch.stack(latents), torch.tensor(levels, device=device))
        energy_B = target_BTF.square().sum((1, 2)) + 1e-2
        lost_B = (made_BTF - target_BTF).square().sum((1, 2)) + 1e-3 * energy_B  # beyond 30 dB nothing is gained
        loss = torch.log(lost_B / energy_B).mean()
        loss = loss + MEL_WEIGHT * (log_mels(made_BTF) - log_mels(target_BTF)).abs().mean()
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
    decoder.requires_grad_(False).eval()


class Frames(nn.Module):
    """Sound to the vectors that are quantised, and vectors back to MDCT and levels."""

    transform_NF: Tensor  # of 2 F samples, window included; its transpose is the way back
    bands_FE: Tensor  # which bins are in which band
    level_mean_E: Tensor
    level_scale: Tensor
    basis_XD: Tensor  # X = F + E

    def __init__(self, hop: int, num_directions: int) -> None:
        super().__init__()
        self.hop = hop
        n, k = np.arange(2 * hop)[:, None] + 0.5, np.arange(hop) + 0.5
        transform = np.sin(np.pi / (2 * hop) * n) * np.cos(np.pi / hop * (n + hop / 2) * k) * math.sqrt(2 / hop)
        edges = np.unique(np.rint(np.concatenate([np.arange(0, 16, 2), np.geomspace(16, hop, 14)])).astype(int))
        bands = (np.arange(hop)[:, None] >= edges[:-1]) & (np.arange(hop)[:, None] < edges[1:])
        num_bands = bands.shape[1]
        self.register_buffer("transform_NF", torch.from_numpy(transform.astype(np.float32)), persistent=False)
        self.register_buffer("bands_FE", torch.from_numpy(bands.astype(np.float32)), persistent=False)
        self.register_buffer("level_mean_E", torch.zeros(num_bands))
        self.register_buffer("level_scale", torch.ones(()))
        self.register_buffer("basis_XD", torch.zeros(hop + num_bands, num_directions))

    def mdct(self, sound_N: Tensor) -> Tensor:
        """(T + 2, F): the frames of T hops, and one more at either end, in silence but for half a hop."""
        padded_N = F.pad(sound_N, (self.hop + self.hop // 2, self.hop + self.hop // 2))
        return padded_N.unfold(0, 2 * self.hop, self.hop) @ self.transform_NF

    def power(self, spectrum_TF: Tensor) -> Tensor:
        """Mean square of each band."""
        return F.linear(spectrum_TF.square(), (self.bands_FE / self.bands_FE.sum(0)).T)

    def levels(self, spectrum_TF: Tensor) -> Tensor:
        """(T - 2, E) of T frames. Over three frames: a single MDCT rises and falls with the phase of the sound."""
        power_TE = self.power(spectrum_TF)
        smooth_TE = power_TE[1:-1] / 2 + power_TE[:-2] / 4 + power_TE[2:] / 4
        return 0.5 * torch.log(smooth_TE + QUIET)

    def describe(self, spectrum_TF: Tensor) -> Tensor:
        """(T - 2, D)."""
        levels_TE = (self.levels(spectrum_TF) - self.level_mean_E) * self.level_scale
        return torch.cat([spectrum_TF[1:-1], levels_TE], 1) @ self.basis_XD

    def undo(self, latent_TD: Tensor) -> tuple[Tensor, Tensor]:
        """MDCT and levels of vectors; leading dimensions are free."""
        x_TX = F.linear(latent_TD, self.basis_XD)
        return x_TX[..., : self.hop], x_TX[..., self.hop :] / self.level_scale + self.level_mean_E

    def measure(self, spectra: list[Tensor]) -> None:
        """Takes scale and directions from these frames."""
        num = sum(len(s) - 2 for s in spectra)
        of_spectra = max(sum(float(s[1:-1].square().sum()) for s in spectra) / num, 1e-6)
        levels_TE = torch.cat([self.levels(s) for s in spectra])
        self.level_mean_E.copy_(levels_TE.mean(0))
        of_levels = float((levels_TE - self.level_mean_E).square().sum(1).mean().clamp(min=1e-6))
        self.level_scale.fill_(math.sqrt(LEVEL_SHARE * of_spectra / of_levels))
        num_inputs, num_directions = self.basis_XD.shape
        moments_XX = torch.zeros(num_inputs, num_inputs, dtype=torch.float64)
        self.basis_XD.resize_(num_inputs, num_inputs).copy_(torch.eye(num_inputs))
        for spectrum_TF in spectra:
            x_TX = self.describe(spectrum_TF)
            moments_XX += (x_TX.T @ x_TX).cpu().double()
        _, directions_XX = torch.linalg.eigh(moments_XX)  # ascending
        self.basis_XD = directions_XX[:, -num_directions:].flip(1).float().contiguous().to(levels_TE.device)


class Block(nn.Module):
    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.over_time = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x_BTH: Tensor) -> Tensor:
        mixed_BTH = self.over_time(self.norm(x_BTH).transpose(1, 2)).transpose(1, 2)
        return x_BTH + self.down(F.gelu(self.up(mixed_BTH), approximate="tanh"))


class Decoder(nn.Module):
    """Dequantised frames to the MDCT: a gain for each band, and an addition that is measured by the band's level."""

    scale_D: Tensor

    def __init__(self, frames: Frames, num_codebooks: int, width: int, num_blocks: int, kernel: int) -> None:
        super().__init__()
        num_bins, num_bands = frames.bands_FE.shape
        num_directions = frames.basis_XD.shape[1]
        self.register_buffer("scale_D", torch.ones(num_directions))
        self.enter = nn.Linear(num_directions + 2 * num_bands, width)
        self.level = nn.Embedding(num_codebooks + 1, width)  # how many books were decoded
        self.blocks = nn.ModuleList(Block(width, kernel) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, num_bins + num_bands)
        self.reach = num_blocks * (kernel // 2)  # frames seen on either side

    def initialise(self) -> None:
        """It starts by changing nothing."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.LayerNorm):
                module.reset_parameters()
        nn.init.normal_(self.level.weight, std=0.1)
        for last in (self.leave, *(module.down for module in self.modules() if isinstance(module, Block))):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, frames: Frames, latent_BTD: Tensor, level_B: Tensor) -> Tensor:
        spectrum_BTF, levels_BTE = frames.undo(latent_BTD)
        heard_BTE = 0.5 * torch.log(frames.power(spectrum_BTF) + QUIET)
        mean_E = frames.level_mean_E
        seen = torch.cat([latent_BTD / self.scale_D, levels_BTE - mean_E, heard_BTE - mean_E], -1)
        x_BTH = self.enter(seen) + self.level(level_B)[:, None]
        for block in self.blocks:
            x_BTH = block(x_BTH)
        out = self.leave(self.norm(x_BTH))
        num_bins = spectrum_BTF.shape[-1]
        gain_BTF = F.linear(out[..., num_bins:].contiguous(), frames.bands_FE)
        size_BTF = F.linear(levels_BTE.clamp(max=2.0).exp(), frames.bands_FE)
        return spectrum_BTF * (1 + gain_BTF) + out[..., :num_bins] * size_BTF * 0.3


class RvqCodec(Codec):
    """See the top of this file; `fit_codec` makes one, `load_codec` opens one."""

    def __init__(self, settings: dict[str, Any], device: str = "cpu") -> None:
        self.name = "rvq"
        self.settings = settings
        self.sample_rate, self.hop = settings["sample_rate"], settings["hop"]
        self.num_codebooks, self.codebook_size = settings["num_codebooks"], settings["codebook_size"]
        self.frames = Frames(self.hop, settings["num_directions"])
        shape = settings["width"], settings["num_blocks"], settings["kernel"]
        with torch.random.fork_rng(devices=[]):
            self.decoder = Decoder(self.frames, self.num_codebooks, *shape).requires_grad_(False).eval()
        self.books_CKD = torch.zeros(self.num_codebooks, self.codebook_size, settings["num_directions"])
        self.hash = ""
        self.to(device)

    def to(self, device: str) -> None:
        self.device = torch.device(device)
        self.frames.to(self.device)
        self.decoder.to(self.device)
        self.books_CKD = self.books_CKD.to(self.device)
        self.prepare()

    def prepare(self) -> None:
        """Products of all pairs of codes, from which the search takes what a choice changes for the later books."""
        books_CKD = self.books_CKD
        self.flat_DX = books_CKD.flatten(0, 1).T.contiguous()
        self.bias_X = books_CKD.square().sum(-1).flatten() / -2
        self.products = [-books_CKD[:c].flatten(0, 1) @ books_CKD[c].T for c in range(self.num_codebooks)]

    # Encoding

    def _encode(self, sound_N: np.ndarray) -> np.ndarray:
        hop, num_frames = self.hop, len(sound_N) // self.hop
        # Each block hears a frame more on either side; the last one is filled up with silence.
        num_blocks = -(-num_frames // BLOCK)
        codes = []
        with torch.inference_mode():
            for first in range(0, num_blocks * BLOCK, BLOCK):
                begin = first * hop - hop - hop // 2
                block_N = np.zeros((BLOCK + 3) * hop, np.float32)
                inside = sound_N[max(begin, 0) : begin + len(block_N)]
                block_N[max(-begin, 0) : max(-begin, 0) + len(inside)] = inside
                windows_TN = torch.from_numpy(block_N).to(self.device).unfold(0, 2 * hop, hop)
                spectrum_TF = windows_TN @ self.frames.transform_NF
                found_TC = self.search(self.frames.describe(spectrum_TF))
                codes.append(found_TC[: num_frames - first].to(torch.int32).cpu().numpy().astype(np.uint16))
        return np.concatenate(codes)

    def search(self, latent_TD: Tensor) -> Tensor:
        """(T, C) codes. The best few choices are followed from book to book, and the best of all books is taken."""
        num_books, size, width = self.num_codebooks, self.codebook_size, min(self.settings["beam"], self.codebook_size)
        offset_C = torch.arange(num_books, device=latent_TD.device) * size
        found = []
        for part_TD in latent_TD.split(128):  # more fall out of the caches, fewer make slow products
            num = len(part_TD)
            # A score is the drop in half the squared error: by each code alone, less its overlap with earlier choices.
            score_TCK = torch.addmm(self.bias_X, part_TD, self.flat_DX).view(num, num_books, size)
            best_TW, code_TW = _top(score_TCK[:, None, 0], 0.0, 1 if num_books == 1 else width)
            codes_TWC = code_TW[:, :, None]
            for c in range(1, num_books):
                bags = (codes_TWC + offset_C[:c]).flatten(0, 1)
                score_TWK = F.embedding_bag(bags, self.products[c], mode="sum").view(num, -1, size)
                score_TWK += score_TCK[:, None, c]
                best_TW, place_TW = _top(score_TWK, best_TW[:, :, None], 1 if c == num_books - 1 else width)
                before_TWC = codes_TWC.gather(1, (place_TW // size)[:, :, None].expand(-1, -1, c))
                codes_TWC = torch.cat([before_TWC, (place_TW % size)[:, :, None]], 2)
            found.append(codes_TWC[:, 0])
        return torch.cat(found)

    # Decoding

    def latent(self, codes_TC: Tensor) -> Tensor:
        return torch.stack([self.books_CKD[c, codes_TC[:, c]] for c in range(codes_TC.shape[1])]).sum(0)

    def _decode(self, codes_TC: np.ndarray) -> np.ndarray:
        hop, num_frames, reach = self.hop, len(codes_TC), self.decoder.reach
        sounds, tail_N = [], torch.zeros(hop, device=self.device)
        with torch.inference_mode():
            silence_D = self.frames.describe(torch.zeros(3, hop, device=self.device))[0]
            level_1 = torch.tensor([codes_TC.shape[1]], device=self.device)
            for first in range(0, num_frames, BLOCK):
                # Before the first frame and after the last there is silence, here as in training.
                begin, end = max(first - reach, 0), min(first + BLOCK + reach, num_frames)
                latent_TD = silence_D.repeat(BLOCK + 2 * reach, 1)
                known_TC = torch.from_numpy(codes_TC[begin:end]).to(self.device)
                latent_TD[begin - first + reach : end - first + reach] = self.latent(known_TC)
                spectrum_TF = self.decoder(self.frames, latent_TD[None], level_1)[0, reach : reach + BLOCK]
                y_TN = (spectrum_TF @ self.frames.transform_NF.T)[: num_frames - first]
                heads_TN, tails_TN = y_TN[:, :hop].clone(), y_TN[:, hop:]
                heads_TN[0] += tail_N
                heads_TN[1:] += tails_TN[:-1]
                tail_N = tails_TN[-1]
                sounds.append(heads_TN.flatten().cpu().numpy())
        # The frames stand half a hop early, so that T of them are enough. Where no second frame overlaps, at either
        # end, the window has been applied twice and nothing else has happened: it can be taken back.
        half = hop // 2
        sound_N = np.concatenate([*sounds, tail_N.cpu().numpy()])[half : half + num_frames * hop]
        window_N = np.sin(np.pi / (2 * hop) * (np.arange(half, hop) + 0.5)).astype(np.float32) ** 2
        sound_N[:half] /= window_N
        sound_N[len(sound_N) - half :] /= window_N[::-1]
        return sound_N

    # Files

    def tensors(self) -> dict[str, Tensor]:
        named = {"books": self.books_CKD}
        for part, module in (("frames", self.frames), ("decoder", self.decoder)):
            named |= {f"{part}.{name}": tensor for name, tensor in module.state_dict().items()}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors().items()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / WEIGHTS, dump_tensors(self.tensors()))
        about = {"kind": self.name, "hash": self.hash, "settings": self.settings}
        write_whole(folder / SETTINGS, (json.dumps(about, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> RvqCodec:
        try:
            text, data = parse.read_bytes(folder / SETTINGS), parse.read_bytes(folder / WEIGHTS, 16 << 30)
        except OSError as error:
            problem = f"no codec in {folder} ({error.strerror or error}: {error.filename})"
            raise DataError(f"{problem}; fit one or pass the folder of one", code="no-file") from error
        try:
            about = parse.loose_json(text)
            expected, settings = about["hash"], about["settings"]
            if settings["format"] != FORMAT:
                problem = f"the codec in {folder} has format {settings['format']}, this rung reads {FORMAT}"
                raise DataError(f"{problem}; fit it again", code="not-supported")
            codec = cls(settings)
            tensors = parse_tensors(data)
            codec.books_CKD.copy_(tensors.pop("books"))
            for part, module in (("frames", codec.frames), ("decoder", codec.decoder)):
                mine = {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}
                module.load_state_dict(mine)
        except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            problem = f"the codec in {folder} is damaged ({reason})"
            raise DataError(f"{problem}; copy it again or fit it again", code="file-damaged") from error
        codec.hash = codec.fingerprint()
        if codec.hash != expected:
            problem = (
                f"the codec in {folder} is damaged: its hash is {codec.hash[:8]}.., {SETTINGS} says {expected[:8]}.."
            )
            raise DataError(f"{problem}; copy it again or fit it again", code="file-damaged")
        codec.to(device)
        return codec


def _top(score_TWK: Tensor, before: Tensor | float, width: int) -> tuple[Tensor, Tensor]:
    """The highest `width` sums of a row's scores and `before`, and their places in the row, W * K long.

    By way of the highest of every 64, since topk of whole rows took half of the search: the highest few of a row lie in
    the groups whose own highest are highest.
    """
    num, num_beams, size = score_TWK.shape
    group = 64 if size % 64 == 0 and num_beams * size // 64 >= width else 1
    grouped = score_TWK.view(num, num_beams, size // group, group)
    highest_TX = (grouped.amax(3) + before).flatten(1)
    _, groups_TW = highest_TX.topk(width, 1)
    of_beam = groups_TW // (size // group)
    picked = grouped.flatten(1, 2).gather(1, groups_TW[:, :, None].expand(-1, -1, group))
    if isinstance(before, Tensor):
        picked = picked + before[:, :, 0].gather(1, of_beam)[:, :, None]
    best_TW, place_TW = picked.flatten(1).topk(width, 1)
    return best_TW, groups_TW.gather(1, place_TW // group) * group + place_TW % group
