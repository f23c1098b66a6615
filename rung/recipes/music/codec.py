"""What turns sound into codes and back: one interface, rung's own codec behind it or a pretrained one of others.

Codes are those of a residual quantiser: a frame has one code of each codebook, and every codebook corrects what the
ones before it left. The first few alone therefore give a coarser sound. A codec is known by its hash: codes of one mean
nothing to another.

Shapes: N samples, T frames, C codebooks.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from rung.errors import DataError, UserError
from rung.files import sha256

SETTINGS, WEIGHTS = "codec.json", "codec.safetensors"
KINDS = ("rvq", "dac", "encodec", "mimi")
PIECE_S, OVERLAP_S = 20.0, 2.0  # long sounds go through a pretrained codec in pieces that share this much


class Codec(ABC):
    """Mono sound at one sample rate to codes, a frame of `hop` samples at a time, and back."""

    name: str
    hash: str  # of weights and settings, hex
    sample_rate: int
    hop: int
    num_codebooks: int
    codebook_size: int

    @property
    def frames_per_s(self) -> float:
        return self.sample_rate / self.hop

    @property
    def bits_per_s(self) -> float:
        """With all codebooks."""
        return self.frames_per_s * self.num_codebooks * float(np.log2(self.codebook_size))

    def encode(self, sound_N: np.ndarray) -> np.ndarray:
        """(T, C) uint16, T = ceil(N / hop); what is missing of the last frame is silence."""
        if sound_N.ndim != 1 or not len(sound_N):
            problem = f"the codec takes one channel of at least one sample, not shape {sound_N.shape}"
            raise DataError(f"{problem}; mix the channels first", code="bad-shape")
        sound_N = np.ascontiguousarray(sound_N, np.float32)
        if not np.isfinite(sound_N).all():
            raise DataError("the sound has samples that are not finite; leave that file out", code="not-finite")
        num_frames = -(-len(sound_N) // self.hop)
        return self._encode(np.pad(sound_N, (0, num_frames * self.hop - len(sound_N))))

    def decode(self, codes_TC: np.ndarray) -> np.ndarray:
        """(T * hop,) float32. Codes of fewer codebooks than there are give a coarser sound."""
        if codes_TC.ndim != 2 or not len(codes_TC) or not 1 <= codes_TC.shape[1] <= self.num_codebooks:
            problem = f"codes of shape {codes_TC.shape} cannot be decoded"
            remedy = f"give (frames, 1 to {self.num_codebooks} codebooks), at least one frame"
            raise DataError(f"{problem}; {remedy}", code="bad-shape")
        if not np.issubdtype(codes_TC.dtype, np.integer):
            raise DataError(f"codes are whole numbers, not {codes_TC.dtype}; cast them", code="bad-code")
        low, high = int(codes_TC.min()), int(codes_TC.max())
        if low < 0 or high >= self.codebook_size:
            odd = low if low < 0 else high
            problem = f"codec {self.name} has no code {odd}; it has 0 to {self.codebook_size - 1}"
            raise DataError(f"{problem}; drop special tokens before decoding", code="bad-code")
        return self._decode(codes_TC.astype(np.int64))

    @abstractmethod
    def _encode(self, sound_N: np.ndarray) -> np.ndarray:
        """Codes of whole frames of float32."""

    @abstractmethod
    def _decode(self, codes_TC: np.ndarray) -> np.ndarray:
        """The sound of int64 codes that were checked."""

    def save(self, folder: Path) -> None:
        """Writes what load_codec reads."""
        problem = f"{self.name} is a pretrained codec of others and is not written again"
        raise UserError(f"{problem}; copy its folder", code="not-supported")


def load_codec(folder: Path, device: str = "cpu") -> Codec:
    """The codec that `save` wrote there, its hash checked."""
    from rung.recipes.music.rvq import RvqCodec

    return RvqCodec.load(Path(folder), device)


def open_codec(kind: str, folder: Path, device: str = "cpu") -> Codec:
    """rung's own codec ("rvq") or a pretrained one ("dac", "encodec", "mimi") in a folder as transformers saves it."""
    if kind not in KINDS:
        raise UserError(f"{kind} is not a codec; there are {', '.join(KINDS)}", code="no-codec")
    return load_codec(folder, device) if kind == "rvq" else PretrainedCodec(kind, Path(folder), device)


class PretrainedCodec(Codec):
    """DAC, EnCodec or Mimi by way of transformers.

    Long sounds are cut at multiples of 20 s into pieces that overlap by 2 s, of which the middle is kept. The cuts lie
    where they lie whatever the length, and convolutions reach less far than the overlap; Mimi's transformer and
    EnCodec's LSTM reach further, so near a cut their codes can differ from those of the whole sound.
    """

    def __init__(self, kind: str, folder: Path, device: str = "cpu") -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            problem = f"codec {kind} needs the package transformers"
            raise UserError(f"{problem}: `pip install 'rung[llm]'`", code="not-installed") from error
        weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
        if not weights or not (folder / "config.json").is_file():
            problem = f"no {kind} codec in {folder} (looked for config.json and *.safetensors)"
            raise DataError(f"{problem}; download one and pass its folder", code="no-file")
        family = {"dac": "DacModel", "encodec": "EncodecModel", "mimi": "MimiModel"}[kind]
        try:
            self.model: Any = getattr(transformers, family).from_pretrained(folder, local_files_only=True)
        except Exception as error:  # torn files and configurations of other models fail in many ways
            reason = (str(error) or type(error).__name__).splitlines()[0]
            problem = f"{folder} cannot be opened as {family} ({reason})"
            raise DataError(f"{problem}; download it again or pass another kind", code="file-damaged") from error
        self.model.to(device).eval()
        self.torch, self.kind, self.device = torch, kind, device
        config = self.model.config
        channels = getattr(config, "audio_channels", 1)
        if channels != 1:
            raise DataError(f"{folder} is a codec of {channels} channels; pass one of mono sound", code="not-supported")
        digest = hashlib.sha256(kind.encode())
        for file in (folder / "config.json", *weights):
            digest.update(bytes.fromhex(sha256(file)))
        self.name, self.hash = f"{kind}:{folder.resolve().name}", digest.hexdigest()
        self.sample_rate = int(config.sampling_rate)
        self.codebook_size = int(config.codebook_size)
        if kind == "dac":
            self.hop, self.num_codebooks = int(np.prod(config.downsampling_ratios)), int(config.n_codebooks)
        elif kind == "encodec":
            self.hop = int(np.prod(config.upsampling_ratios))
            self.bandwidth = max(config.target_bandwidths)
            self.num_codebooks = int(self.model.quantizer.get_num_quantizers_for_bandwidth(self.bandwidth))
        else:
            self.hop, self.num_codebooks = round(config.sampling_rate / config.frame_rate), int(config.num_quantizers)
        # In whole frames, and even: Mimi halves its frame rate inside.
        self.piece = 2 * round(PIECE_S * self.sample_rate / self.hop / 2)
        self.overlap = 2 * round(OVERLAP_S * self.sample_rate / self.hop / 2)

    def _encode(self, sound_N: np.ndarray) -> np.ndarray:
        num_frames = len(sound_N) // self.hop
        kept = []
        for first, begin, end, last in _pieces(num_frames, self.piece, self.overlap):
            wave = self.torch.from_numpy(sound_N[begin * self.hop : end * self.hop]).to(self.device)[None, None]
            with self.torch.inference_mode():
                if self.kind == "encodec":
                    output = self.model.encode(wave, bandwidth=self.bandwidth, return_dict=True)
                    codes_CT = output.audio_codes[0, 0]
                else:
                    codes_CT = self.model.encode(wave, return_dict=True).audio_codes[0]
            codes_TC = codes_CT.T.cpu().numpy()
            if len(codes_TC) < end - begin:  # DAC drops what its strides do not fill: the last frame stands for it
                codes_TC = np.concatenate([codes_TC, np.repeat(codes_TC[-1:], end - begin - len(codes_TC), axis=0)])
            kept.append(codes_TC[first - begin : last - begin])
        return np.concatenate(kept).astype(np.uint16)

    def _decode(self, codes_TC: np.ndarray) -> np.ndarray:
        sounds = []
        for first, begin, end, last in _pieces(len(codes_TC), self.piece, self.overlap):
            codes_1CT = self.torch.from_numpy(codes_TC[begin:end].T.copy()).to(self.device)[None]
            with self.torch.inference_mode():
                if self.kind == "encodec":
                    wave = self.model.decode(codes_1CT[None], [None], return_dict=True).audio_values
                elif self.kind == "dac":
                    latent = self.model.quantizer.from_codes(codes_1CT)[0]
                    wave = self.model.decoder(latent)
                else:
                    wave = self.model.decode(codes_1CT, return_dict=True).audio_values
            sound_N = wave.reshape(-1).float().cpu().numpy()
            whole_N = np.zeros((end - begin) * self.hop, np.float32)  # DAC gives a few samples less
            whole_N[: len(sound_N)] = sound_N[: len(whole_N)]
            sounds.append(whole_N[(first - begin) * self.hop : (last - begin) * self.hop])
        return np.concatenate(sounds)


def _pieces(num_frames: int, size: int, overlap: int) -> list[tuple[int, int, int, int]]:
    """(first kept, first computed, end computed, end kept) of each piece."""
    firsts = range(0, num_frames, size)
    return [(f, max(f - overlap, 0), min(f + size + overlap, num_frames), min(f + size, num_frames)) for f in firsts]
