"""What hears: frozen encoders that turn sound into features, one vector a frame.

Every clip is encoded alone and unpadded. Moonshine normalises over the whole clip, so silence behind it would change
all of its features by 10 %. An encoder is known by its hash: features of one mean nothing to a model that was trained
on those of another.

Shapes: N samples at 16 kHz, T frames, W features, F frequencies, M mel bands.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung import parse
from rung.data.wheel import Report
from rung.errors import DataError, UserError
from rung.files import sha256
from rung.recipes.speech import moonshine

RATE = 16000
NAMES = ("mel", "moonshine", "whisper")


class EncoderInfo(NamedTuple):
    """What is known of an encoder without building it."""

    name: str
    hash: str  # of weights and settings, hex; equal on every machine
    width: int  # of a feature vector
    frames_per_s: float


class Encoder(nn.Module, ABC):
    """Mono sound at 16 kHz to features. Nothing in it is trained, and it is always in eval mode."""

    def __init__(self, info: EncoderInfo) -> None:
        super().__init__()
        self.name, self.hash, self.width, self.frames_per_s = info
        self.training = False

    def forward(self, sound_N: Tensor) -> Tensor:
        """(T, W) float32, of one clip of at least one sample, peaks within 1, on the device of this module."""
        # Features are the same in a training step with autocast as in a store that was prepared without.
        with torch.autocast(sound_N.device.type, enabled=False):
            return self._features(sound_N.float())

    @abstractmethod
    def num_frames(self, num_samples: int) -> int:
        """T for a clip of this length."""

    @abstractmethod
    def _features(self, sound_N: Tensor) -> Tensor: ...

    def train(self, mode: bool = True) -> Self:
        """Stays as it is, whatever the mode of the model around it."""
        return super().train(False)


def open_encoder(name: str, path: str = "", report: Report | None = None) -> Encoder:
    """The encoder of that name; `path` is the folder of a Whisper model."""
    info = describe_encoder(name, path)
    if name == "mel":
        return Mel(info)
    try:
        import transformers
    except ImportError as error:
        problem = f"encoder {name} needs the package transformers"
        raise UserError(f"{problem}: `pip install 'rung[speech]'`", code="not-installed") from error
    return Moonshine(info, transformers, report) if name == "moonshine" else Whisper(info, transformers, Path(path))


def describe_encoder(name: str, path: str = "") -> EncoderInfo:
    """What open_encoder would give, from files and constants alone."""
    if name == "mel":
        return EncoderInfo("mel", _hash(name, MEL_SETTINGS), MEL_SETTINGS["bands"], RATE / MEL_SETTINGS["hop"])
    if name == "moonshine":
        settings = moonshine.SETTINGS | {"weights": moonshine.DIGEST}
        return EncoderInfo("moonshine", _hash(name, settings), moonshine.SETTINGS["hidden_size"], RATE / MOONSHINE_HOP)
    if name == "whisper":
        return _describe_whisper(path)
    raise UserError(f"{name} is not an encoder; there are {', '.join(NAMES)}", code="no-encoder")


def features_of(encoders: Sequence[Encoder], sound_N: Tensor) -> Tensor:
    """(T, sum of widths): features of the first encoder, and those of the others at the moments of its frames."""
    first, *others = encoders
    parts = [first(sound_N)]
    for other in others:
        features_TW = other(sound_N)
        # The middle of a frame is at (t + 0.5) / frames_per_s; the frame whose middle is nearest contains that moment.
        moments = (np.arange(len(parts[0])) + 0.5) * other.frames_per_s / first.frames_per_s
        nearest = torch.from_numpy(np.minimum(moments.astype(np.int64), len(features_TW) - 1))
        parts.append(features_TW[nearest.to(features_TW.device)])
    return torch.cat(parts, dim=1)


def encode(encoders: Sequence[Encoder], sound_N: np.ndarray, device: str | torch.device) -> np.ndarray:
    """features_of as float16, by encoders that are on this device; whether they are finite is not looked at."""
    if sound_N.ndim != 1 or not len(sound_N):
        problem = f"an encoder takes one channel of at least one sample, not shape {sound_N.shape}"
        raise DataError(f"{problem}; mix the channels first", code="bad-shape")
    with torch.inference_mode():
        sound = torch.from_numpy(np.ascontiguousarray(sound_N, np.float32)).to(device)
        features: np.ndarray = features_of(encoders, sound).half().cpu().numpy()
    return features


def _hash(name: str, settings: dict[str, Any]) -> str:
    return hashlib.sha256(f"{name} {json.dumps(settings, sort_keys=True)}".encode()).hexdigest()


# Log-mel spectra

# shift and scale are those of no data set: log powers of speech scaled to a peak of 0.5 have a mean of -5.4 and a
# deviation of 4.0 on LJSpeech (16 sentences), -4.7 and 4.1 on LibriVox (3), -4.9 and 4.3 on the same 16 sentences by
# six voices of espeak-ng. The floor lies 84 dB below a sine of that peak; 5 to 12 % of the values are below it.
MEL_SETTINGS: dict[str, Any] = {
    "version": 1, "bands": 80, "window": 400, "hop": 160, "fft": 512, "floor": 1e-5, "shift": -5.0, "scale": 4.0,
}  # fmt: skip


class Mel(Encoder):
    """Log power in 80 bands, 100 times a second. Frame t is centred on its 10 ms, and hears 7.5 ms to either side."""

    window_N: Tensor
    bands_FM: Tensor

    def __init__(self, info: EncoderInfo) -> None:
        super().__init__(info)
        self.window, self.hop, self.fft = (MEL_SETTINGS[key] for key in ("window", "hop", "fft"))
        self.register_buffer("window_N", torch.hann_window(self.window), persistent=False)
        self.register_buffer("bands_FM", mel_bands(self.fft, self.width), persistent=False)

    def num_frames(self, num_samples: int) -> int:
        return max(-(-num_samples // self.hop), 1)

    def _features(self, sound_N: Tensor) -> Tensor:
        before = (self.window - self.hop) // 2
        length = (self.num_frames(len(sound_N)) - 1) * self.hop + self.window
        sound_N = F.pad(sound_N, (before, length - before - len(sound_N)))
        frames_TN = sound_N.unfold(0, self.window, self.hop) * self.window_N
        power_TF = torch.fft.rfft(frames_TN, n=self.fft).abs().square()
        log_TM = (power_TF @ self.bands_FM).clamp_min(MEL_SETTINGS["floor"]).log()
        return (log_TM - MEL_SETTINGS["shift"]) / MEL_SETTINGS["scale"]


def mel_bands(fft: int, num_bands: int) -> Tensor:
    """(F, M): triangles of height 1 from the middle of the band before to that of the next, up to half the rate.

    Middles are equally far apart on Slaney's scale, which is linear below 1 kHz and logarithmic above.
    """
    top = 15 + 27 * np.log(RATE / 2 / 1000) / np.log(6.4)
    mels = np.linspace(0, top, num_bands + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))
    hz_F1 = np.fft.rfftfreq(fft, 1 / RATE)[:, None]
    rising = (hz_F1 - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hz_F1) / (edges[2:] - edges[1:-1])
    return torch.from_numpy(np.maximum(0, np.minimum(rising, falling))).float()


# Moonshine

MOONSHINE_HOP = 64 * 3 * 2  # samples, the strides of its convolutions
MOONSHINE_SHORTEST = 895  # samples that give one frame: (((895 - 127) / 64 + 1 - 7) / 3 + 1 - 3) / 2 + 1 = 1


class Moonshine(Encoder):
    """The encoder of Moonshine tiny (English), by way of transformers. Clips below 56 ms get silence behind them."""

    def __init__(self, info: EncoderInfo, transformers: Any, report: Report | None = None) -> None:
        super().__init__(info)
        from transformers.models.moonshine.modeling_moonshine import MoonshineEncoder

        weights = moonshine.load_weights(report)
        with torch.random.fork_rng(devices=[]):  # it draws weights, which are replaced
            self.model: nn.Module = MoonshineEncoder(transformers.MoonshineConfig(**moonshine.SETTINGS))
        self.model.load_state_dict(weights, strict=True)
        self.requires_grad_(False).eval()

    def num_frames(self, num_samples: int) -> int:
        num = max(num_samples, MOONSHINE_SHORTEST)
        for size, stride in ((127, 64), (7, 3), (3, 2)):
            num = (num - size) // stride + 1
        return num

    def _features(self, sound_N: Tensor) -> Tensor:
        sound_N = F.pad(sound_N, (0, max(MOONSHINE_SHORTEST - len(sound_N), 0)))
        features_TW: Tensor = self.model(sound_N[None]).last_hidden_state[0]
        return features_TW


# Whisper

PREPROCESSOR = "preprocessor_config.json"
WHISPER_HOP = 160  # samples, of its spectra; a frame of features stands for two of theirs


class Whisper(Encoder):
    """The encoder of a Whisper model in a folder as transformers saves it.

    It hears 30 s whatever the length of the clip: the rest is silence, and the features of that are dropped. What is
    longer is cut.
    """

    window_N: Tensor
    bands_FM: Tensor

    def __init__(self, info: EncoderInfo, transformers: Any, folder: Path) -> None:
        super().__init__(info)
        from rung.recipes.speech.lm import quiet

        folder = folder.expanduser()
        try:
            with quiet(), torch.random.fork_rng(devices=[]):
                model, found = transformers.WhisperModel.from_pretrained(
                    folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
                )
                if (folder / PREPROCESSOR).is_file():
                    spectra = transformers.WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
                else:
                    spectra = transformers.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
        except Exception as error:  # torn files fail in many ways
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise _damaged(folder, f"it cannot be opened ({reason})") from error
        if missing := sorted(name for name in found["missing_keys"] if name.startswith("encoder.")):
            raise _damaged(folder, f"it has no weight {missing[0]}")  # which would be drawn at random
        asked = (spectra.feature_size, spectra.hop_length, spectra.sampling_rate)
        taken = (model.config.num_mel_bins, WHISPER_HOP, RATE)
        if asked != taken:
            told = [f"{bands} bands every {hop} samples at {rate} Hz" for bands, hop, rate in (asked, taken)]
            problem = f"{folder / PREPROCESSOR} asks for {told[0]}; the model takes {told[1]}"
            raise DataError(f"{problem}: copy the file that belongs to it", code="not-supported")
        self.model: nn.Module = model.encoder  # the decoder is not kept
        self.most_frames = int(model.config.max_source_positions)
        self.fft = int(spectra.n_fft)
        self.register_buffer("window_N", torch.hann_window(self.fft), persistent=False)
        self.register_buffer("bands_FM", torch.from_numpy(spectra.mel_filters).float(), persistent=False)
        self.requires_grad_(False).eval()

    def num_frames(self, num_samples: int) -> int:
        return min(max(-(-num_samples // (2 * WHISPER_HOP)), 1), self.most_frames)

    def _features(self, sound_N: Tensor) -> Tensor:
        length = self.most_frames * 2 * WHISPER_HOP
        heard_N = F.pad(sound_N[:length], (0, max(length - len(sound_N), 0)))
        spectrum_FT = torch.stft(heard_N, self.fft, WHISPER_HOP, window=self.window_N, return_complex=True)[:, :-1]
        log_MT = (self.bands_FM.T @ spectrum_FT.abs().square()).clamp_min(1e-10).log10()
        log_MT = (torch.maximum(log_MT, log_MT.max() - 8) + 4) / 4
        features_TW: Tensor = self.model(log_MT[None]).last_hidden_state[0]
        return features_TW[: self.num_frames(len(sound_N))]


def _describe_whisper(path: str) -> EncoderInfo:
    folder = Path(path).expanduser()
    config = folder / "config.json"
    whole = folder / "model.safetensors"
    weights = [whole] if whole.is_file() else sorted(folder.glob("model-*-of-*.safetensors"))
    if not path or not weights or not config.is_file():
        problem = f"no Whisper model in {path or 'an empty path'} (looked for config.json and model.safetensors)"
        raise DataError(f"{problem}; download one and pass its folder", code="no-file")
    try:
        settings = parse.loose_json(parse.read_bytes(config))
        kind, width = settings.get("model_type"), settings.get("d_model")
    except (ValueError, AttributeError) as error:
        raise _damaged(folder, "its config.json cannot be read") from error
    if kind != "whisper" or not isinstance(width, int):
        problem = f"{folder} holds a model of type {kind}, not whisper"
        raise DataError(f"{problem}; pass the folder of a Whisper model", code="not-supported")
    # The settings of the spectra count too: other ones give other features.
    files = [config, *weights, *filter(Path.is_file, [folder / PREPROCESSOR])]
    digest = _hash("whisper", {file.name: sha256(file) for file in files})
    return EncoderInfo(f"whisper:{folder.resolve().name}", digest, width, RATE / (2 * WHISPER_HOP))


def _damaged(folder: Path, problem: str) -> DataError:
    return DataError(f"the Whisper model in {folder} is damaged: {problem}; download it again", code="file-damaged")
