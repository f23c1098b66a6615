"""Hashes prepared data beside the first steps of a training, so that damaged bytes do not stay unseen.

Opening a store looks into its large files at a few places only; reading all of them takes minutes on a slow disk. A
thread does it at a tenth of one core's time. What it finds ends the run at the next step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from rung.recipe import Stream

SHARE = 0.1  # of the time; the hash releases the interpreter's lock


class DataCheck:
    """Start it before the first step; `problem` says what is wrong as soon as it is known."""

    def __init__(self, streams: Iterable[Stream]) -> None:
        stores = {id(store): store for stream in streams for store in stream.stores}
        self._stores = [store for store in stores.values() if store.large_bytes]
        self.num_bytes = sum(store.large_bytes for store in self._stores)
        self.checked_bytes, self.problem = 0, ""
        self._is_over, self._since = threading.Event(), time.monotonic()
        if self._stores:
            threading.Thread(target=self._check, name="rung-data", daemon=True).start()

    def close(self) -> dict[str, Any]:
        """Stops reading; what was looked at."""
        self._is_over.set()
        return {"checked_bytes": self.checked_bytes, "num_bytes": self.num_bytes, "problem": self.problem}

    def _check(self) -> None:
        try:
            for store in self._stores:
                self._since = time.monotonic()
                if found := store.verify(self._rest, only_large=True):
                    self.problem = f"{store.path} is damaged: {'; '.join(found)}"
                    return
        except InterruptedError:
            pass
        except Exception as error:  # a disk that went away: that the data is whole cannot be said
            self.problem = f"the data cannot be read any more: {type(error).__name__}: {error}"

    def _rest(self, num_bytes: int) -> None:
        self.checked_bytes += num_bytes
        took_s = time.monotonic() - self._since
        if self._is_over.wait(took_s * (1 / SHARE - 1)):
            raise InterruptedError
        self._since = time.monotonic()
