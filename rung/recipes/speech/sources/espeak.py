"""The embedded speech: espeak-ng out of a pip wheel says digits or sentences, in voices of many timbres and accents.

Voices and texts are held out apart, since either alone can be learned by heart. A voice is an accent with a timbre, and
timbres are held out whole: en-us+f3 and en-gb-scotland+f3 sound alike. Listing makes no sound. Sound is made when an
utterance is read, by a process of its own, and it is not the same to the last bit when it is read again.
"""

from __future__ import annotations

import json
import platform
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from rung.data.audio import check_sound, resample
from rung.data.wheel import Wheel
from rung.errors import DataError
from rung.random import key_of
from rung.recipe import Report
from rung.recipes.speech.sources import SAMPLE_RATE, Source, Utterance
from rung.recipes.speech.sources.sentences import digit_texts, sentence_texts

ESPEAK = Wheel(
    name="espeakng_loader",
    version="0.2.4",
    filename="espeakng_loader-0.2.4-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    sha256="08721baf27d13d461f6be6eed9a65277e70d68234ff484fd8b9897b222cdcb6d",
)
# All of its English voices but the one for the Shavian alphabet. en is that of Great Britain: en-gb is no name.
ACCENTS = (
    "en", "en-029", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-gb-x-rp", "en-us", "en-us-nyc",
)  # fmt: skip
# Of its 104 timbres those of people: no robots, whispers or croaks, and of those whose spectra hardly differ only one.
TIMBRES = (
    "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "f1", "f2", "f3", "f4", "f5",
    "Alex", "Alicia", "Andrea", "Andy", "Annie", "Denis", "Diogo", "Gene", "Lee", "Mario", "Michael", "Mike", "Nguyen",
    "Reed", "adam", "anika", "announcer", "aunty", "belinda", "boris", "david", "ed", "edward", "grandma", "john",
    "klatt2", "klatt4", "linda", "marcelo", "michel", "norbert", "pablo", "paul", "quincy", "robert", "sandro",
    "shelby", "steph", "travis", "victor",
)  # fmt: skip
HELD_TIMBRES = 6  # for validation, and as many for test
HELD_SPLITS = ("validation", "test", "sentences", "voices")
MOST_HELD = 100  # utterances of each of these splits
RATES, PITCHES, RANGES = (145, 200), (35, 65), (35, 65)  # words a minute; the others are 0 to 99, and 50 by default


def embedded(sentences: Literal["digits", "sentences"], num_utterances: int, seed: int, report: Report) -> Source:
    """Utterances in five splits: train; validation and test, with voices and texts of their own; `sentences`, new
    texts in voices of train; `voices`, texts of train in the voices of validation. The voices of test are heard
    nowhere else."""
    num_held = min(max(8, min(MOST_HELD, num_utterances // 20)), num_utterances // 8)
    if num_held < 1:
        problem = f"{num_utterances} utterances cannot be shared by train and {len(HELD_SPLITS)} held-out splits"
        raise DataError(f"{problem}; set dataset.utterances=20 or more", code="too-small")
    synthesiser = Synthesiser(find_engine(report))
    report("collecting texts", 0, 1)
    texts_of = {"digits": digit_texts, "sentences": sentence_texts}[sentences]
    held, train = texts_of(3 * num_held, num_utterances - len(HELD_SPLITS) * num_held, seed)
    report("collecting texts", 1, 1)

    timbres = sorted(TIMBRES, key=lambda timbre: key_of(seed, "timbre", timbre))
    first, second, rest = timbres[:HELD_TIMBRES], timbres[HELD_TIMBRES : 2 * HELD_TIMBRES], timbres[2 * HELD_TIMBRES :]
    spoken = {
        "train": (rest, train),
        "validation": (first, held[:num_held]),
        "test": (second, held[num_held : 2 * num_held]),
        "sentences": (rest, held[2 * num_held :]),
        "voices": (first, train[:num_held]),
    }
    utterances: list[Utterance] = []
    for split, (of_split, texts) in spoken.items():
        voices = [f"{accent}+{timbre}" for accent in ACCENTS for timbre in of_split]
        voices.sort(key=lambda voice: key_of(seed, "voice", split, voice))
        for number, text in enumerate(texts):
            voice = voices[number % len(voices)]
            rng = np.random.default_rng(key_of(seed, "manner", split, number))
            rate, pitch, range_ = (int(rng.integers(*limits, endpoint=True)) for limits in (RATES, PITCHES, RANGES))
            request = {"voice": voice, "rate": rate, "pitch": pitch, "range": range_, "text": text}
            name = f"{split}/{number:05d}-{voice}"
            read = partial(_read, synthesiser, name, request)
            utterances.append(Utterance(name, text, read, speaker=voice, split=split))
    num_voices, num_texts = len({one.speaker for one in utterances}), len({one.text for one in utterances})
    what = "rows of digits" if sentences == "digits" else "sentences"
    return Source(f"espeak-ng, {num_texts} {what} in {num_voices} voices", utterances)


def find_engine(report: Report) -> Path:
    """The folder with the library and its data, with every timbre in place."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise DataError(
            f"the embedded voices are a library for Linux on x86-64, not for {sys.platform} on {platform.machine()}; "
            "pass --from a folder of sound files with transcripts",
            code="not-installed",
        )
    wheel = ESPEAK.unpack(report)
    folder = wheel / "espeakng_loader"
    # espeak-ng says nothing where it does not know a timbre, and speaks without it.
    for timbre in TIMBRES:
        if not (folder / "espeak-ng-data" / "voices" / "!v" / timbre).is_file():
            raise DataError(f"{wheel} lacks the voice {timbre}; delete that folder, it is made again", code="no-voice")
    return folder


class Synthesiser:
    """A process that speaks, started at the first request and ended with this object. Threads take turns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sample_rate = 0

    def speak(self, request: dict[str, Any]) -> tuple[np.ndarray, int]:
        """int16 (samples,), and the sample rate."""
        with self._lock:
            if self._process is None:
                self._start()
            code, sound = self._answer(json.dumps(request).encode() + b"\n")
        if code:
            problem = f"espeak-ng has no voice {request['voice']}, or cannot speak (error {code})"
            raise DataError(f"{problem}; please report a bug", code="no-voice")
        return np.frombuffer(sound, "<i2"), self._sample_rate

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        program = Path(__file__).with_name("synthesiser.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program), str(self.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process, self._log)
        self._sample_rate, _ = self._answer(b"")

    def _answer(self, request: bytes) -> tuple[int, bytes]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            code, num_bytes = struct.unpack("<ii", self._process.stdout.read(8))
            sound = self._process.stdout.read(num_bytes)
            if len(sound) < num_bytes:
                raise EOFError
            return code, sound
        except BaseException as error:
            # Also when a key interrupts: the rest of this answer must not be taken for the next. Another request
            # starts another process.
            self._process.kill()
            self._process.wait()
            self._process = None
            self._log.seek(0)
            lines = self._log.read().decode("utf-8", "replace").split("\n")
            self._end()
            if not isinstance(error, OSError | EOFError | struct.error):
                raise
            last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
            raise DataError(
                f"espeak-ng broke off ({last}); try again, or pass --from a folder of sound files with transcripts",
                code="synthesis-failed",
            ) from error


def _end(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for file in (process.stdin, process.stdout, log):
        if file is not None:
            file.close()


def _read(synthesiser: Synthesiser, name: str, request: dict[str, Any]) -> np.ndarray:
    samples, rate = synthesiser.speak(request)
    sound = samples.astype(np.float32) / 32768
    check_sound(sound, rate, name, is_float=False)
    return resample(sound, rate, SAMPLE_RATE)
