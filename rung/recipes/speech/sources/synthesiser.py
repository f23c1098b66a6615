"""Speaks what it is told, with espeak-ng. A program of its own, started by espeak.py; needs nothing but Python.

    python -P synthesiser.py FOLDER     the folder espeakng_loader of the unpacked wheel

espeak-ng is native code with one engine a process. A request is a line of JSON: voice, rate, pitch, range and text. An
answer is two little-endian int32, what espeak-ng returned (0 is success) and the number of bytes that follow: samples
of 16 bits. The first answer comes unasked: its first number is the sample rate.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

SYNCHRONOUS, NO_EXIT = 2, 0x8000  # espeak-ng ends the process on a mistake unless it is told not to
CHARACTERS, UTF8 = 1, 1
RATE, PITCH, RANGE = 1, 3, 4


def main() -> None:
    folder = sys.argv[1]
    # What the library prints must not come between our answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    library = ctypes.CDLL(f"{folder}/libespeak-ng.so")
    sample_rate = library.espeak_Initialize(SYNCHRONOUS, 0, os.fsencode(f"{folder}/espeak-ng-data"), NO_EXIT)
    if sample_rate <= 0:
        sys.exit(f"espeak-ng cannot use its data (error {sample_rate})")
    speak = speaker(library)
    answers.write(struct.pack("<ii", sample_rate, 0))
    answers.flush()
    for line in sys.stdin.buffer:
        code, sound = speak(json.loads(line))
        answers.write(struct.pack("<ii", code, len(sound)) + sound)
        answers.flush()


def speaker(library: ctypes.CDLL) -> Callable[[dict[str, Any]], tuple[int, bytes]]:
    """A function from a request to the code and the sound of its answer."""
    chunks: list[bytes] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)

    @kind
    def collect(samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            chunks.append(ctypes.string_at(samples, 2 * count))
        return 0

    library.espeak_SetSynthCallback(collect)
    library.espeak_Synth.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint,
                                     ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p]  # fmt: skip

    def speak(request: dict[str, Any]) -> tuple[int, bytes]:
        code: int = library.espeak_SetVoiceByName(request["voice"].encode())
        if code:  # and the voice of before is kept
            return code, b""
        for parameter, name in ((RATE, "rate"), (PITCH, "pitch"), (RANGE, "range")):
            library.espeak_SetParameter(parameter, request[name], 0)
        chunks.clear()
        text = request["text"].encode()
        code = library.espeak_Synth(text, len(text) + 1, 0, CHARACTERS, 0, UTF8, None, None)
        library.espeak_Synchronize()
        return code, b"".join(chunks)

    speak.keep = collect  # type: ignore[attr-defined]  # the library calls it for as long as there are requests
    return speak


if __name__ == "__main__":
    main()
