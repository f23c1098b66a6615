"""If this fails, `rung data speech`, `rung train speech` or `rung sample` no longer do what docs/speech.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rung as library
from rung.data.audio import wav_bytes
from rung.data.store import Store
from rung.data.tokenizer import Bytes
from rung.random import Draw
from rung.recipes.speech.metrics import normalise, word_errors
from rung.recipes.speech.stream import Prompts, Utterances
from rung.runs.query import open_run
from tests.contract.cases import speech, speech_frozen
from tests.engine.test_parallel import free_port
from tests.errors import raises_code
from tests.recipes.speech.stores import WORDS, make_store, write_tones

Rung = Callable[..., subprocess.CompletedProcess[str]]
SHORT = ("optimizer.max_iters=6", "lr.warmup_iters=2", "eval_interval=3", "data.batch_size=4", "system.device=cpu",
         "signals.probes=false")  # fmt: skip


def merged(*words: str) -> list[str]:
    """Each key once; the later word counts."""
    return list({word.partition("=")[0]: word for word in words}.values())


def losses(path: Path) -> list[float]:
    rows = [json.loads(line) for line in (path / "metrics/000.ndjson").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_a_cached_encoder_gives_the_losses_of_one_that_runs(speech_data: Path) -> None:
    made = []
    for cached in ("true", "false"):
        setup = speech(speech_data).setup("model.dropout=0", f"data.cached={cached}")
        stream, ids, draw = setup.streams["train"], np.arange(6), Draw(0, 0, np.arange(6))
        batch = {name: torch.from_numpy(array) for name, array in stream.gather(ids, draw).items()}
        assert ("features" in batch) == (cached == "true")
        made.append(setup.stepper.objectives[0].plain_loss(batch, draw))
    assert made[0].sum.item() == pytest.approx(made[1].sum.item(), rel=1e-6)
    assert made[0].count == made[1].count


def test_only_the_bridge_and_lora_are_saved_beside_a_frozen_model(speech_data: Path, tmp_path: Path) -> None:
    case = speech_frozen(speech_data)
    run = library.train("speech", overrides=merged(*case.words, *SHORT), runs=tmp_path, check=False, display=None)
    saved = json.loads((run.path / "checkpoints/00000006/state.json").read_text())["frozen"]
    from safetensors import safe_open

    with safe_open(run.path / "checkpoints/00000006/model.safetensors", "pt") as file:
        written = set(file.keys())
    assert not written & set(saved)
    assert {name for name in written if name.startswith("lm.")} == {name for name in written if "lora_" in name}
    assert any(name.startswith("lm.model.layers.0.mlp") for name in saved)


@pytest.mark.slow
def test_two_ranks_give_the_losses_of_one(speech_data: Path, tmp_path: Path) -> None:
    case = speech(speech_data)
    words = ["train", "speech", *merged(*case.words, *SHORT, "model.dropout=0"),
             "optimizer.gradient_accumulation_steps=2"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launches = {
        "one": ["-m", "rung"],
        "two": ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "rung"],
    }
    for name, launch in launches.items():
        command = [sys.executable, *launch, *words, "--experiment", name]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    one, two = (losses(tmp_path / "runs" / name / "1") for name in launches)
    assert len(one) == 6
    assert two == pytest.approx(one, rel=1e-5)


def test_rows_of_an_epoch_come_once_each_and_like_lengths_together(speech_data: Path) -> None:
    stream = speech(speech_data).setup("data.bucket=8").streams["train"]
    assert isinstance(stream, Utterances)
    for epoch in range(2):
        ids = stream.ids(epoch * stream.num_rows, stream.num_rows, seed=3)
        assert sorted(ids.tolist()) == list(range(stream.num_rows))
        one_by_one = [int(stream.ids(epoch * stream.num_rows + n, 1, seed=3)[0]) for n in range(stream.num_rows)]
        assert one_by_one == ids.tolist()
    assert stream.ids(0, 8, seed=3).tolist() != stream.ids(0, 8, seed=4).tolist()
    apart = speech(speech_data).setup("data.bucket=1").streams["train"]
    assert isinstance(apart, Utterances)
    assert stream.padding(4, 0) <= apart.padding(4, 0)


def test_an_eval_hears_the_same_prompt_and_training_draws_among_several(speech_data: Path) -> None:
    stream = speech(speech_data).setup().streams["train"]
    ids = np.arange(12)
    fixed = [stream.gather(ids, Draw(0, -1, ids))["before"].tobytes() for _ in range(2)]
    assert fixed[0] == fixed[1]
    drawn = {stream.gather(ids, Draw(0, step, ids))["before_length"].tobytes() for step in range(6)}
    assert len(drawn) > 1


def test_other_sounds_are_other_rows_and_silence_is_nothing(speech_data: Path) -> None:
    streams = speech(speech_data).setup().streams
    ids = np.arange(streams["validation"].num_rows)
    own, other, nothing = (streams[n].gather(ids, Draw(0, -1, ids)) for n in ("validation", "shuffled", "silent"))
    assert not nothing["features"].any()
    assert np.array_equal(own["tokens"], other["tokens"])
    for row in ids:
        mine, theirs = (batch["features"][row, : batch["frames"][row]] for batch in (own, other))
        assert mine.shape != theirs.shape or not np.array_equal(mine, theirs)


def test_words_are_compared_as_people_read_them() -> None:
    assert normalise("It's  THREE, seven!") == "it's three seven"
    assert word_errors(["three seven two"], ["Three, seven."]) == (1, 3)
    assert word_errors(["", "one"], ["two words", ""]) == (3, 1)


def test_a_sound_file_is_written_down_and_asked_about(speech_data: Path, rung: Rung, tmp_path: Path) -> None:
    case = speech(speech_data)
    rung("train", "speech", *case.words, *SHORT, "--no-check")
    run = open_run("speech/1", tmp_path / "runs")
    evals = {row["set"]: row for row in run.evals()}
    assert set(evals) == {"validation", "shuffled", "silent"}
    assert {"accuracy", "wer", "task/asr", "accuracy/asr", "wer/asr"} <= set(evals["validation"])
    assert "wer" not in evals["silent"]
    sound = write_tones(tmp_path / "mine", 1).parent / "000.wav"
    made = json.loads(rung("sample", "speech/1", "--prompt", sound, "--json").stdout)
    assert [Path(one["path"]).suffix for one in made] == [".txt", ".wav", ".png"]
    text = (tmp_path / made[0]["path"]).read_text()
    assert text.startswith("sound: 000.wav\nanswer:")
    asked = json.loads(rung("sample", "speech/1", "--prompt", sound, "--question", "how many?", "--json").stdout)
    assert "question: how many?" in (tmp_path / asked[0]["path"]).read_text()
    missing = rung("sample", "speech/1", "--prompt", "nothing.wav", check=False)
    assert missing.returncode == 2
    assert "nothing.wav" in missing.stderr
    evaluated = json.loads(rung("eval", "speech/1", "--split", "test", "evaluation.wer_rows=8", "evaluation.beams=2",
                                "--json").stdout)  # fmt: skip
    assert evaluated


def prepared(folder: Path, *words: str) -> Store:
    return Store.open(make_store(folder, *words), kind="speech")


def test_what_the_encoder_hears_is_scaled_padded_and_cut(tmp_path: Path) -> None:
    store = prepared(tmp_path, "dataset.silence_s=0.1", "data.max_seconds=0.3")
    for record in store.index:
        sound = store.arrays["sound"][record["start"] : record["start"] + record["length"]]
        assert record["length"] in (3200 + 3200, 4800 + 3200)  # one tone, or what is left of several, and the silence
        assert not sound[:1600].any()
        assert not sound[-1600:].any()
        assert abs(int(np.abs(sound).max()) - 16384) <= 1
    assert store.info["cut"] == sum(record["length"] == 8000 for record in store.index)


def test_other_speeds_are_for_training_alone(tmp_path: Path) -> None:
    """A tone at twice the speed is half as long and an octave higher; held-out sounds stay as they are."""
    store = prepared(tmp_path, "dataset.speeds=[2.0]", "dataset.silence_s=0", "dataset.normalise=false")
    plain = {record["source"]: record for record in store.index if " at speed " not in record["source"]}
    copies = [record for record in store.index if " at speed " in record["source"]]
    assert {record["split"] for record in copies} == {"train"}
    assert len(copies) == sum(record["split"] == "train" for record in plain.values())

    def pitch(record: dict[str, Any]) -> float:
        sound = store.arrays["sound"][record["start"] : record["start"] + record["length"]].astype(np.float64)
        return float(np.abs(np.fft.rfft(sound)).argmax() * 16000 / len(sound))

    for record in copies:
        source = plain[record["source"].removesuffix(" at speed 2")]
        assert (record["text"], record["speaker"]) == (source["text"], source["speaker"])
        assert record["length"] == pytest.approx(source["length"] / 2, abs=2)
        if record["text"] in WORDS[:3]:  # one tone, whose octave is below half the rate
            assert pitch(record) == pytest.approx(2 * pitch(source), rel=0.02)


def test_speakers_stay_in_one_split(speech_data: Path) -> None:
    store = Store.open(speech_data)
    where: dict[str, set[str]] = {}
    for record in store.index:
        where.setdefault(record["speaker"], set()).add(record["split"])
    assert len(where) == 6
    assert all(len(splits) == 1 for splits in where.values())


def test_a_split_that_the_annotation_names_is_kept(tmp_path: Path) -> None:
    from rung.recipes.speech.sources.files import from_path
    from rung.recipes.speech.sources.splits import assign_splits

    annotation = write_tones(tmp_path / "tones", 4)
    rows = json.loads(annotation.read_text())["annotation"]
    for row, split in zip(rows, ("test", "train", "validation", "tset")):
        row["split"] = split
    annotation.write_text(json.dumps(rows))
    found = from_path(annotation, lambda what, done, total: None)
    splits, _ = assign_splits(found.utterances, 0.1, seed=0)
    assert splits == {"000.wav": "test", "001.wav": "train", "002.wav": "validation"}
    assert "tset" in found.quarantined[0]["reason"]


def test_bad_files_are_listed_and_never_trained_on(tmp_path: Path) -> None:
    annotation = write_tones(tmp_path / "tones", 12)
    (tmp_path / "tones/003.wav").write_bytes((tmp_path / "tones/003.wav").read_bytes()[:2000])
    (tmp_path / "tones/004.wav").write_bytes(wav_bytes(np.zeros(8000, np.float32), 16000))
    (tmp_path / "tones/005.wav").unlink()
    library_words = ["encoder.name=mel", "model.audio.n_layer=1", "dataset.held_out=0.2"]
    done = subprocess.run(
        [sys.executable, "-m", "rung", "data", "speech", "--from", str(annotation), *library_words],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    store = Store.open(tmp_path / "data/speech")
    assert {Path(one["file"]).name for one in store.info["quarantined"]} == {"003.wav", "004.wav", "annotation.json[5]"}
    assert len(store.index) == 9
    assert "left out: 3" in done.stdout


def test_features_of_another_encoder_are_refused(speech_data: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path, "second_encoder.name=mel")
    case = speech(speech_data)
    with raises_code("data-mismatch"):
        case.setup(f"dataset.extra_datasets=[{other}]")
    assert Store.open(other).arrays["features"].shape[1] == 160


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["template=no place"], "options-conflict"),
        (['prompts={qa: ["<SpeechHere> {}"]}'], "options-conflict"),
        (['prompts={asr: ["nothing to hear"]}'], "options-conflict"),
        (["encoder.name=whisper"], "options-conflict"),
        (["model.lm.name=folder"], "options-conflict"),
        (["model.lm.name=folder", "model.lm.path=nowhere"], "no-folder"),
        (["model.qformer.n_head=3"], "options-conflict"),
        (['prompts={asr: ["<SpeechHere> "]}'], "bad-value"),  # the data has a second task
        (['prompts={asr: ["<SpeechHere>: "], qa: ["<SpeechHere>: "]}'], "bad-config"),  # questions without a place
        (['prompts={asr: ["hi <SpeechHere>"], qa: ["<SpeechHere> {}"]}'], "bad-value"),
    ],
)
def test_a_mistake_is_named_before_anything_is_trained(speech_data: Path, words: Sequence[str], code: str) -> None:
    with raises_code(code):
        speech(speech_data).setup(*words)


# What the diary of this recipe lost days to.


def test_warm_up_counts_steps_of_the_run_not_of_an_epoch(speech_data: Path, tmp_path: Path) -> None:
    case = speech(speech_data)
    given: dict[str, Any] = {"lr.warmup_iters": 9, "optimizer.max_iters": 14, "lr.init_lr": 1e-3,
                             "lr.warmup_start_lr": 1e-6, "lr.min_lr": 1e-5, "data.batch_size": 4}  # fmt: skip
    words = [*case.words, *(f"{name}={value}" for name, value in given.items()), "system.device=cpu"]
    run = library.train("speech", overrides=words, runs=tmp_path, check=False, display=None)
    assert run.document["derived"]["epoch_rows"] < 9 * 4  # the warm-up is longer than an epoch
    rates = [rate for rate in run.metrics(["lr"])["lr"] if rate is not None]
    rising = rates[:10]
    assert rising == sorted(rising)
    assert np.diff(rising) == pytest.approx(np.diff(rising)[0], rel=1e-6)
    assert rates[9] == pytest.approx(1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_an_encoder_that_runs_in_training_is_in_eval_mode_and_stays_the_same(speech_data: Path) -> None:
    from rung.engine.state import set_training

    setup = speech_frozen(speech_data).setup()
    model = setup.state.model
    set_training(model)
    encoders = model.get_submodule("encoders")
    assert not any(module.training for encoder in encoders.children() for module in encoder.modules())
    assert not any(p.requires_grad for p in encoders.parameters())


def test_a_question_does_not_move_the_sound() -> None:
    prompts = Prompts({"qa": ["<SpeechHere> {}"]}, "USER: {}\nASSISTANT:", Bytes())
    before, after = prompts.ids("qa", 0, "who <SpeechHere> speaks?")
    assert Bytes().decode(before) == "USER: "
    assert Bytes().decode(after) == " who  speaks?\nASSISTANT:"
