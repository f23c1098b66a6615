"""If this fails, features of speech are not those of the encoder that is named, or not where they were heard."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rung.data import wheel as wheels
from rung.data.audio import read_audio
from rung.errors import DataError
from rung.recipes.speech import moonshine
from rung.recipes.speech.encoders import (
    MEL_SETTINGS,
    Encoder,
    EncoderInfo,
    describe_encoder,
    encode,
    features_of,
    mel_bands,
    open_encoder,
)
from tests.conftest import shared_data
from tests.errors import raises_code

RATE = 16000


def speech(number: int = 2) -> np.ndarray:
    """A sentence of LJSpeech; 1.9 s for the second."""
    return read_audio(shared_data("speech_ljspeech") / "wavs" / f"LJ001-{number:04d}.wav", RATE)[:, 0]


def noise(num_samples: int, seed: int = 0) -> Tensor:
    return 0.1 * torch.randn(num_samples, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def package() -> bytes:
    """The model of onnxruntime inside the wheel."""
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    try:
        return moonshine.MOONSHINE.open(moonshine.MODEL)
    except DataError as error:
        pytest.skip(f"the wheel cannot be had here: {error}")


@pytest.fixture(scope="module")
def moon(package: bytes) -> Encoder:
    return open_encoder("moonshine")


WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 64,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 16, "max_target_positions": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip


def save_whisper(folder: Path, **settings: Any) -> Any:
    """A small model with random weights, saved as transformers saves those of the hub."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**(WHISPER | settings)))
    model.eval().save_pretrained(folder)
    return model


class Steps(Encoder):
    """Stands in for an encoder: a frame says how loud the samples are that it stands for."""

    def __init__(self, hop: int) -> None:
        super().__init__(EncoderInfo(f"steps{hop}", "0", 1, RATE / hop))
        self.hop = hop

    def num_frames(self, num_samples: int) -> int:
        return num_samples // self.hop

    def _features(self, sound_N: Tensor) -> Tensor:
        return sound_N.unfold(0, self.hop, self.hop).abs().amax(1, keepdim=True)


# All of them


def opened(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> Encoder:
    if name == "moonshine":
        encoder: Encoder = request.getfixturevalue("moon")
        return encoder
    if name == "whisper":
        save_whisper(tmp_path, max_source_positions=100)
    return open_encoder(name, str(tmp_path))


@pytest.fixture(params=["mel", "moonshine", "whisper"])
def each(request: pytest.FixtureRequest, tmp_path: Path) -> Encoder:
    return opened(request.param, tmp_path, request)


def test_a_clip_of_any_length_has_the_frames_that_were_announced(each: Encoder) -> None:
    lengths = [1, 2, 159, 160, 161, 319, 320, 321, 894, 895, 896, 1278, 1279, 1280, 2000, 4321, 16000, 31999, 33000]
    lengths += [80000, *np.random.default_rng(0).integers(1, 40000, 12).tolist()]
    with torch.inference_mode():
        for num in lengths:
            features = each(noise(num))
            assert features.shape == (each.num_frames(num), each.width), num
            assert features.dtype == torch.float32
            assert bool(features.isfinite().all()), num
    assert each.num_frames(10 * 60 * RATE) >= each.num_frames(60 * RATE) >= 100


def test_nothing_is_trained_and_the_mode_is_eval(each: Encoder) -> None:
    around = nn.Sequential(each).train()
    assert around.training
    assert not any(module.training for module in each.modules())
    assert not any(parameter.requires_grad for parameter in each.parameters())
    sound = noise(8000)
    assert torch.equal(each(sound), each(sound))
    assert not each(sound).requires_grad


def test_autocast_around_it_changes_nothing(each: Encoder) -> None:
    sound = noise(8000)
    expected = each(sound)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(each(sound), expected)


def test_all_of_it_moves_to_a_device(each: Encoder) -> None:
    tensors = [*each.parameters(), *each.buffers()]
    held = {id(value) for module in each.modules() for value in vars(module).values() if isinstance(value, Tensor)}
    assert tensors
    assert not held - {id(tensor) for tensor in tensors}


@pytest.mark.parametrize("name", ["mel", "moonshine", "whisper"])
def test_described_as_it_is_and_the_random_numbers_of_others_are_left_alone(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    opened(name, tmp_path, request)
    state = torch.get_rng_state()
    info = describe_encoder(name, str(tmp_path))
    encoder = open_encoder(name, str(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    assert info == (encoder.name, encoder.hash, encoder.width, encoder.frames_per_s)
    assert len(info.hash) == 64
    shown = {"mel": ("mel", 80, 100), "moonshine": ("moonshine", 288, 16000 / 384)}
    assert (info.name, info.width, info.frames_per_s) == shown.get(name, (f"whisper:{tmp_path.name}", 32, 50))


def test_an_encoder_that_is_none() -> None:
    for ask in (open_encoder, describe_encoder):
        with raises_code("no-encoder"):
            ask("hubert")


@pytest.mark.parametrize("name", ["moonshine", "whisper"])
def test_without_transformers_the_message_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: bytes
) -> None:
    save_whisper(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert describe_encoder(name, str(tmp_path)).width
    with raises_code("not-installed"):
        open_encoder(name, str(tmp_path))


def test_importing_needs_neither_transformers_nor_onnxruntime() -> None:
    code = """
import sys
sys.modules.update(transformers=None, onnxruntime=None, flatbuffers=None, safetensors=None)
from rung.recipes.speech.encoders import open_encoder
print(open_encoder("mel").name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "mel", done.stderr


# Several side by side


def test_encode_gives_features_as_a_store_keeps_them() -> None:
    mel = open_encoder("mel")
    sound = noise(5000)
    features = encode([mel], sound.numpy(), "cpu")
    assert features.dtype == np.float16
    np.testing.assert_array_equal(features, mel(sound).half().numpy())
    np.testing.assert_array_equal(features, encode([mel], sound.numpy().astype(np.float64), "cpu"))


@pytest.mark.parametrize(("first", "second"), [(160, 320), (320, 160), (384, 160), (160, 384), (384, 320), (320, 384)])
def test_an_impulse_is_heard_by_both_in_one_frame(first: int, second: int) -> None:
    """Where the second is slower, in all frames of the first whose middle it covers."""
    for at in (0, 1000, 4321, 9000, 15359):
        sound = np.zeros(15360, np.float32)
        sound[at] = 1
        own, other = encode([Steps(first), Steps(second)], sound, "cpu").T
        middles = (np.arange(len(own)) + 0.5) * first
        assert own.argmax() == at // first
        np.testing.assert_array_equal(other > 0, middles // second == at // second)
        assert other.any() or second < first  # a fast second is heard only at the moments of the first


def test_a_second_that_ends_sooner_is_held() -> None:
    class Short(Steps):
        def _features(self, sound_N: Tensor) -> Tensor:
            return torch.arange(3.0)[:, None]

    features = features_of([Steps(160), Short(160)], noise(1600))
    assert features[:, 1].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 2, 2]


def test_a_burst_of_noise_is_heard_at_its_moment(moon: Encoder) -> None:
    """Mel beside Moonshine, whose frames are 24 ms apart: the loudest is the one of the burst, of 30 ms."""
    mel = open_encoder("mel")
    for middle in (4000, 20000, 41234):
        sound = 1e-3 * noise(48000).numpy()
        sound[middle - 240 : middle + 240] *= 1000
        features = encode([moon, mel], sound, "cpu").astype(np.float32)
        assert features.shape == (moon.num_frames(48000), 288 + 80)
        heard = features[:, 288:].mean(1).argmax()
        assert abs((heard + 0.5) / moon.frames_per_s - middle / RATE) <= 0.5 / moon.frames_per_s
        assert abs(encode([mel], sound, "cpu").mean(1).argmax() - middle // 160) <= 1


def test_sounds_that_are_none_are_refused() -> None:
    for sound in (np.zeros((900, 2), np.float32), np.zeros(0, np.float32)):
        with raises_code("bad-shape"):
            encode([open_encoder("mel")], sound, "cpu")


# Log-mel spectra


def test_mel_is_that_of_another_implementation() -> None:
    audio = pytest.importorskip("transformers.audio_utils")
    filters = audio.mel_filter_bank(257, 80, 0.0, RATE / 2, RATE, norm=None, mel_scale="slaney")
    np.testing.assert_allclose(mel_bands(512, 80).numpy(), filters, atol=1e-6)
    assert (filters.max(0) > 0).all()

    sound = speech()
    padded = np.pad(sound.astype(np.float64), (120, 400))
    spectrum = audio.spectrogram(
        padded, audio.window_function(400, "hann"), frame_length=400, hop_length=160, fft_length=512, power=2.0,
        center=False, mel_filters=filters, mel_floor=MEL_SETTINGS["floor"], log_mel="log",
    )  # fmt: skip
    expected = (spectrum.T - MEL_SETTINGS["shift"]) / MEL_SETTINGS["scale"]
    got = open_encoder("mel")(torch.from_numpy(sound)).numpy()
    assert len(got) == -(-len(sound) // 160)
    np.testing.assert_allclose(got, expected[: len(got)], atol=2e-3)


def test_mel_of_speech_has_about_zero_mean_and_unit_deviation() -> None:
    mel = open_encoder("mel")
    sounds = [speech(number) for number in (1, 2, 3)]
    features = np.concatenate([encode([mel], 0.5 * sound / np.abs(sound).max(), "cpu") for sound in sounds])
    assert abs(features.astype(np.float64).mean()) < 0.2
    assert abs(features.astype(np.float64).std() - 1) < 0.2
    silence = encode([mel], np.zeros(RATE, np.float32), "cpu")
    assert np.ptp(silence) == 0
    assert -2 < silence[0, 0] < -1


# Moonshine


def onnx_values(package: bytes, name: str, sound: np.ndarray) -> np.ndarray:
    """Any value inside onnxruntime's own computation: its name is written where the model names its output."""
    import onnxruntime
    from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs.InferenceSession import InferenceSession

    data = bytearray(package)
    graph = InferenceSession.GetRootAs(data, 0).Model().Graph()
    assert graph.OutputsLength() == 1
    slot = next(at for at in range(4, 64, 2) if points_to(graph, at, b"last_hidden_state"))
    vector = graph._tab.Vector(graph._tab.Offset(slot))
    data += b"\0" * (-len(data) % 4)
    struct.pack_into("<I", data, vector, len(data) - vector)
    data += struct.pack("<I", len(name)) + name.encode() + b"\0" * 4
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(bytes(data), options)
    mask = np.ones((1, len(sound)), np.int64)
    value: np.ndarray = session.run(None, {"input_values": sound[None], "attention_mask": mask})[0][0]
    return value


def points_to(graph: Any, slot: int, text: bytes) -> bool:
    """Whether this field of a flatbuffer is a list of this one string."""
    offset = graph._tab.Offset(slot)
    if not offset or graph._tab.VectorLen(offset) != 1:
        return False
    try:
        return bool(graph._tab.String(graph._tab.Vector(offset)) == text)
    except (struct.error, TypeError, IndexError):
        return False


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("number", [1, 2, 8])
def test_features_are_those_of_onnxruntime(moon: Encoder, package: bytes, number: int) -> None:
    """Up to its rounding of activations to 8 bits: 2.7 to 3.1 % and a mean cosine of 0.9996 on 16 sentences."""
    sound = speech(number)
    expected = onnx_values(package, "last_hidden_state", sound)
    with torch.inference_mode():
        got = moon(torch.from_numpy(sound)).numpy()
    assert got.shape == expected.shape
    assert difference(got, expected) < 0.04
    cosine = (got * expected).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.mean() > 0.999
    assert cosine.min() > 0.98


@pytest.mark.parametrize(
    ("module", "before", "after"),
    [
        ("layers.0.self_attn.q_proj", "input_layernorm/LayerNormalization", "self_attn/q_proj/MatMul"),
        ("layers.2.self_attn.v_proj", "input_layernorm/LayerNormalization", "self_attn/v_proj/MatMul"),
        ("layers.3.mlp.fc1", "post_attention_layernorm/LayerNormalization", "mlp/fc1/Add"),
        ("layers.5.mlp.fc2", "mlp/activation_fn/Mul_1", "mlp/fc2/Add"),
    ],
)
def test_weights_are_exactly_those_of_the_package(
    moon: Encoder, package: bytes, module: str, before: str, after: str
) -> None:
    """A layer of ours, given what onnxruntime's gets and rounded as it rounds it, gives what that gives."""
    sound = speech()[:RATE]
    x, expected = (onnx_values(package, f"/{module[:8]}/{name}_output_0", sound) for name in (before, after))
    scale = np.float32((max(x.max(), 0) - min(x.min(), 0)) / np.float32(255))
    zero = np.rint(-min(x.min(), 0) / scale)
    rounded = (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale
    linear = moon.get_submodule(f"model.{module}")
    assert difference(linear(torch.from_numpy(rounded)).numpy(), expected) < 1e-5
    assert difference(linear(torch.from_numpy(x)).numpy(), expected) > 1e-3


def test_convolutions_and_norms_are_those_of_the_package(moon: Encoder, package: bytes) -> None:
    sound = speech()[:RATE]
    heard: dict[str, np.ndarray] = {}
    names = ("groupnorm", "conv2", "conv3", "layers.0.input_layernorm")
    hooks = [
        moon.get_submodule(f"model.{name}").register_forward_hook(
            lambda _, __, output, name=name: heard.__setitem__(name, output[0].numpy())
        )
        for name in names
    ]
    moon(torch.from_numpy(sound))
    for hook in hooks:
        hook.remove()
    outputs = ("/groupnorm/Add", "/conv2/Conv", "/conv3/Conv", "/layers.0/input_layernorm/LayerNormalization")
    for name, output in zip(names, outputs):
        assert difference(heard[name], onnx_values(package, f"{output}_output_0", sound)) < 1e-4, name


def test_a_clip_is_not_changed_by_what_is_encoded_beside_it(moon: Encoder) -> None:
    """What others do with a batch, padding, would change the features by several percent."""
    sound = torch.from_numpy(speech())
    alone = moon(sound)
    moon(noise(50000))
    assert torch.equal(moon(sound), alone)
    padded = moon(torch.nn.functional.pad(sound, (0, 2 * RATE)))[: len(alone)]
    assert difference(padded.numpy(), alone.numpy()) > 0.02


def test_a_clip_too_short_for_the_convolutions_ends_in_silence(moon: Encoder) -> None:
    short = noise(300)
    assert torch.equal(moon(short), moon(torch.cat([short, torch.zeros(595)])))
    assert moon.num_frames(895) == 1
    assert moon.num_frames(895 + 384) == 2


def test_reading_twice_gives_the_same_bytes(package: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = moonshine.MOONSHINE.path
    written = []
    for number in (1, 2):
        monkeypatch.setenv("RUNG_CACHE", str(tmp_path / str(number)))
        moonshine.MOONSHINE.path.parent.mkdir(parents=True)
        moonshine.MOONSHINE.path.symlink_to(wheel)
        moonshine.load_weights()
        written.append(moonshine.weights_file().read_bytes())
        assert [file.name for file in moonshine.weights_file().parent.iterdir()] == [moonshine.weights_file().name]
    assert written[0] == written[1]


def test_a_second_use_needs_neither_onnxruntime_nor_the_wheel(
    moon: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = moonshine.weights_file()
    monkeypatch.setenv("RUNG_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for name in [name for name in sys.modules if name.startswith("onnxruntime.")]:
        monkeypatch.delitem(sys.modules, name)
    with raises_code("not-installed") as caught:
        open_encoder("moonshine")
    assert "pip install 'rung[speech]'" in str(caught.value)
    moonshine.weights_file().parent.mkdir()
    shutil.copy(kept, moonshine.weights_file())
    again = open_encoder("moonshine")
    sound = noise(9000)
    assert torch.equal(again(sound), moon(sound))
    assert not moonshine.MOONSHINE.path.exists()


@pytest.mark.parametrize("damage", ["torn", "changed", "empty"])
def test_damaged_weights_in_the_cache_are_read_anew(
    moon: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    wheel, kept = moonshine.MOONSHINE.path, moonshine.weights_file().read_bytes()
    monkeypatch.setenv("RUNG_CACHE", str(tmp_path))
    for file in (moonshine.MOONSHINE.path, moonshine.weights_file()):
        file.parent.mkdir()
    moonshine.MOONSHINE.path.symlink_to(wheel)
    changed = bytearray(kept)
    changed[-100] ^= 1
    broken = {"torn": kept[: len(kept) // 2], "changed": bytes(changed), "empty": b""}
    moonshine.weights_file().write_bytes(broken[damage])
    assert moonshine.digest({name: one.numpy() for name, one in moonshine.load_weights().items()}) == moonshine.DIGEST
    assert moonshine.weights_file().read_bytes() == kept


def test_pip_is_asked_for_the_platform_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a newer glibc to run than many machines have that can read it."""
    commands: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network\n")

    monkeypatch.setenv("RUNG_CACHE", str(tmp_path))
    monkeypatch.setattr(wheels.subprocess, "run", pip)
    for wheel in (moonshine.MOONSHINE, wheels.MUSIC21):
        with raises_code("network"):
            wheel.fetch()
    assert commands[0][commands[0].index("--platform") + 1] == "manylinux_2_34_x86_64"
    assert "--platform" not in commands[1]


# Whisper


@pytest.mark.parametrize("num_samples", [200, 16000, 23457, 30 * RATE, 31 * RATE])
def test_whisper_is_that_of_transformers(tmp_path: Path, num_samples: int) -> None:
    transformers = pytest.importorskip("transformers")
    model = save_whisper(tmp_path)
    encoder = open_encoder("whisper", str(tmp_path))
    sound = noise(num_samples)
    inputs = transformers.WhisperFeatureExtractor()(sound.numpy(), sampling_rate=RATE, return_tensors="pt")
    with torch.inference_mode():
        expected = model.model.encoder(inputs.input_features).last_hidden_state[0]
        got = encoder(sound)
    assert len(got) == min(-(-num_samples // 320), 1500) == encoder.num_frames(num_samples)
    torch.testing.assert_close(got, expected[: len(got)], atol=1e-4, rtol=1e-4)


def test_whisper_with_spectra_of_its_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = save_whisper(tmp_path, num_mel_bins=128)
    sound = noise(20000)
    results = []
    for extractor in (None, transformers.WhisperFeatureExtractor(feature_size=128, n_fft=512)):
        if extractor is not None:
            extractor.save_pretrained(tmp_path)
        expected_by = extractor or transformers.WhisperFeatureExtractor(feature_size=128)
        inputs = expected_by(sound.numpy(), sampling_rate=RATE, return_tensors="pt")
        encoder = open_encoder("whisper", str(tmp_path))
        with torch.inference_mode():
            expected = model.model.encoder(inputs.input_features).last_hidden_state[0]
            torch.testing.assert_close(encoder(sound), expected[:63], atol=1e-4, rtol=1e-4)
        results.append(encoder.hash)
    assert results[0] != results[1]
    transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(tmp_path)
    with raises_code("not-supported"):
        open_encoder("whisper", str(tmp_path))


def test_weights_of_half_precision_are_computed_in_float32(tmp_path: Path) -> None:
    save_whisper(tmp_path).half().save_pretrained(tmp_path)
    encoder = open_encoder("whisper", str(tmp_path))
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}


def test_the_hash_is_of_the_weights_and_not_of_the_place(tmp_path: Path) -> None:
    model = save_whisper(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    first, moved = (describe_encoder("whisper", str(tmp_path / name)) for name in ("a", "elsewhere"))
    assert first.hash == moved.hash
    assert (first.name, moved.name) == ("whisper:a", "whisper:elsewhere")
    with torch.no_grad():
        model.model.encoder.layers[1].fc1.bias[3] += 1e-3
    model.save_pretrained(tmp_path / "b")
    assert describe_encoder("whisper", str(tmp_path / "b")).hash != first.hash


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        ("torn", "file-damaged"), ("incomplete", "file-damaged"), ("json", "file-damaged"), ("list", "file-damaged"),
        ("sizes", "file-damaged"), ("config", "no-file"), ("weights", "no-file"), ("folder", "no-file"),
        ("path", "no-file"), ("bert", "not-supported"),
    ],
)  # fmt: skip
def test_folders_that_hold_no_whisper(tmp_path: Path, damage: str, code: str) -> None:
    from safetensors.torch import load_file, save_file

    save_whisper(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if damage == "torn":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "incomplete":
        tensors = load_file(weights)
        del tensors["model.encoder.layers.0.fc1.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif damage in ("json", "list"):
        config.write_text({"json": "{", "list": "[]"}[damage])
    elif damage == "sizes":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"encoder_ffn_dim": 40}))
    elif damage == "bert":
        transformers = pytest.importorskip("transformers")
        shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        transformers.BertModel(transformers.BertConfig(vocab_size=16, **shape)).save_pretrained(tmp_path)
    elif damage in ("config", "weights"):
        {"config": config, "weights": weights}[damage].unlink()
    path = {"folder": str(tmp_path / "none"), "path": ""}.get(damage, str(tmp_path))
    with raises_code(code, DataError) as caught:
        open_encoder("whisper", path)
    assert "\n" not in str(caught.value)
