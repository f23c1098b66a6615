"""A run for TensorBoard: one event file per attempt under <run>/mirror/tensorboard, written without TensorBoard.

Every number of a row becomes a scalar, NaN and Inf included, as float32: about seven digits. Why, verdict and notes
become text, indented because TensorBoard shows text as Markdown; the configuration goes under HPARAMS. Where a run goes
back to an earlier step, a session mark tells TensorBoard to forget what came after it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rung.trackers.history import flattened
from rung.trackers.mirror import shown
from rung.trackers.protobuf import of_bytes, of_double, of_int, of_single, of_text
from rung.trackers.tfrecord import frame

_STRING = 7  # types.proto
_ENDED_WELL, _FAILED, _RUNNING = 1, 2, 3  # hparams' words for a session


class TensorboardSink:
    """Writes event files; see mirror.Sink."""

    name = "TensorBoard"
    num_refused = 0

    def __init__(self, folder: Path, document: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._folder = folder / "tensorboard"
        self._document, self._config = document, config
        self._last_step: int | None = None
        self._has_forerunner = False
        self._file: IO[bytes] | None = None
        self._heads: dict[str, bytes] = {}

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._has_forerunner = any(self._folder.iterdir())
        now = time.time_ns()
        # Sorted by name is sorted by time: TensorBoard reads the files of a folder in that order.
        name = f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.rung"
        self._file = open(self._folder / name, "xb")  # noqa: SIM115
        self._write(time.time(), 0, of_text(3, "brain.Event:2"))
        if not self._has_forerunner:
            self._text("why", self._document.get("why"), 0, time.time())
            self._session(of_bytes(3, _start_info(self._document, self._config)))

    def row(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        if self._has_forerunner or (self._last_step is not None and step < self._last_step):
            self._write(unix_s, step, of_bytes(7, of_int(1, 1)))  # SessionLog.START
            self._has_forerunner = False
        self._last_step = step
        scalars = [self._scalar(tag, value) for tag, value in values.items()]
        if scalars:
            self._write(unix_s, step, of_bytes(5, b"".join(scalars)))

    def note(self, step: int | None, unix_s: float, text: str) -> None:
        self._text("notes", text, self._last_step or 0 if step is None else step, unix_s)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self, status: str) -> None:
        if self._file is None:
            return
        word = {"finished": _ENDED_WELL, "running": _RUNNING}.get(status, _FAILED)
        self._session(of_bytes(4, of_int(1, word) + of_double(2, time.time())), "session_end_info")
        self._file.close()
        self._file = None

    def summary_line(self) -> str:
        return f"mirror: tensorboard --logdir {shlex.quote(shown(self._folder))}"

    def _scalar(self, tag: str, value: float) -> bytes:
        """Of a tag all but the last five bytes are always the same; making them was half of the cost of a row."""
        number = of_single(2, value)
        head = self._heads.get(tag)
        if head is None:
            head = self._heads[tag] = of_bytes(1, of_text(1, tag) + number)[: -len(number)]
        return head + number

    def _write(self, unix_s: float, step: int, what: bytes) -> None:
        assert self._file is not None, "row before open"
        self._file.write(frame(of_double(1, unix_s) + of_int(2, step) + what))

    def _text(self, tag: str, text: Any, step: int, unix_s: float) -> None:
        if not text:
            return
        indented = "\n".join(f"    {line}" for line in str(text).split("\n"))
        shape = of_bytes(2, of_bytes(2, of_int(1, 1)))
        tensor = of_int(1, _STRING) + shape + of_bytes(8, indented.encode("utf-8", "backslashreplace"))
        value = of_text(1, tag) + of_bytes(8, tensor) + of_bytes(9, of_bytes(1, of_text(1, "text")) + of_int(4, 2))
        self._write(unix_s, step, of_bytes(5, of_bytes(1, value)))

    def _session(self, content: bytes, what: str = "session_start_info") -> None:
        plugin = of_bytes(1, of_text(1, "hparams") + of_bytes(2, content))
        nothing = of_int(1, 1) + of_bytes(2, of_bytes(2, of_int(1, 0)))  # a float tensor of no elements
        value = of_text(1, f"_hparams_/{what}") + of_bytes(8, nothing) + of_bytes(9, plugin)
        self._write(time.time(), 0, of_bytes(5, of_bytes(1, value)))


def _start_info(document: Mapping[str, Any], config: Mapping[str, Any]) -> bytes:
    entries = b""
    for key, value in flattened(config):
        if isinstance(value, bool):
            shown = of_int(4, int(value))
        elif isinstance(value, int | float):
            shown = of_double(2, float(value))
        else:
            shown = of_text(3, "" if value is None else str(value))
        entries += of_bytes(1, of_text(1, key) + of_bytes(2, shown))
    return entries + of_text(4, str(document.get("id"))) + of_double(5, time.time())
