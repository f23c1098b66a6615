"""A sample of a script as the bytes of a file: text, bytes, a file, a picture, a figure, sound.

What a thing is is told by what it can do, so that neither PIL nor matplotlib nor torch is imported for it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import wave
from pathlib import Path
from typing import Any

from rung.errors import UserError
from rung.files import sha256


def artifact(name: str | Path, data: Any = None, rate: int | None = None) -> tuple[str, bytes]:
    """The name and the bytes of the file to keep. Without `data`, `name` is the path of a file."""
    if data is None:
        path = Path(name)
        if not path.is_file():
            raise UserError(
                f"sample({str(name)!r}) names no file; pass what it is: sample(name, data).", code="no-file"
            )
        return plain_name(path.name, ""), path.read_bytes()
    if isinstance(data, Path):
        return plain_name(str(name), data.suffix), data.read_bytes()
    if isinstance(data, str):
        return plain_name(str(name), ".txt"), data.encode("utf-8", "surrogatepass")
    if isinstance(data, bytes | bytearray | memoryview):
        return plain_name(str(name), ".bin"), bytes(data)
    if rate is not None:
        return plain_name(str(name), ".wav"), wav(data, rate)
    for method, how in (("savefig", {"format": "png"}), ("save", {"format": "PNG"})):
        if callable(save := getattr(data, method, None)):
            file = io.BytesIO()
            save(file, **how)
            return plain_name(str(name), ".png"), file.getvalue()
    raise UserError(
        f"a sample of type {type(data).__name__} cannot be kept; pass text, bytes, a path, a picture of PIL, a figure "
        "of matplotlib, or sound with rate=.",
        code="bad-sample",
    )


def plain_name(name: str, suffix: str) -> str:
    """A file name that works everywhere, with a suffix."""
    name = re.sub(r"[^\w.,+=@ -]", "_", os.path.basename(name.rstrip("/")) or "sample").lstrip(". ")[:120] or "sample"
    return name if Path(name).suffix else f"{name}{suffix}"


def wav(data: Any, rate: int) -> bytes:
    """Sound between -1 and 1, (samples), (channels, samples) or (samples, channels), as 16 bit PCM."""
    import numpy as np

    if hasattr(data, "detach"):
        data = data.detach().float().cpu().numpy()
    sound = np.asarray(data)
    is_whole = np.issubdtype(sound.dtype, np.integer)
    sound = sound.reshape(1, -1) if sound.ndim == 1 else sound
    if sound.ndim != 2 or min(sound.shape) > 16 or not sound.size:
        raise UserError(
            f"sound of shape {tuple(np.shape(data))} is not (samples), (channels, samples) or (samples, channels)",
            code="bad-sample",
        )
    sound = sound if sound.shape[0] > sound.shape[1] else sound.T
    if not is_whole:
        sound = np.round(np.clip(np.nan_to_num(sound.astype(np.float64)), -1, 1) * 32767)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(sound.shape[1])
        out.setsampwidth(2)
        out.setframerate(int(rate))
        out.writeframes(np.clip(sound, -32768, 32767).astype("<i2").tobytes())
    return file.getvalue()


def fingerprint(what: Any) -> dict[str, Any]:
    """The fingerprint of data, to the byte, and its rows where they can be counted."""
    digest = hashlib.sha256()
    rows: int | None = None
    if isinstance(what, str | Path) and (isinstance(what, Path) or len(what) < 4096) and Path(what).exists():
        top = Path(what)
        for file in sorted(path for path in top.rglob("*") if path.is_file()) if top.is_dir() else [top]:
            digest.update(f"{file.relative_to(top).as_posix()}\0{sha256(file)}\0".encode())
    elif isinstance(what, str):
        digest.update(what.encode("utf-8", "surrogatepass"))
    elif isinstance(what, bytes | bytearray | memoryview):
        digest.update(what)
    else:
        array = what.detach().cpu().contiguous().numpy() if hasattr(what, "detach") else what
        if not hasattr(array, "tobytes"):
            raise UserError(
                f"{type(what).__name__} is neither a path, text, bytes, an array nor a tensor", code="bad-data"
            )
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
        rows = len(array) if array.ndim else None
    return {"fingerprint": digest.hexdigest()[:16]} | ({} if rows is None else {"rows": rows})
