"""Files that are whole or absent: written beside their final name, fsynced, renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside, fsyncs, renames, fsyncs the folder. Raises OSError, and then leaves the old file as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # Always a new file: one that lies there, left by a killed process or laid by somebody else, may be a link.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    sync(path.parent)


def exchange(a: Path, b: Path) -> bool:
    """Gives two files or folders each other's name in one moment; False where that cannot be done."""
    import ctypes  # a millisecond that no listing needs

    try:
        call = ctypes.CDLL(None).renameat2
    except AttributeError:  # not Linux
        return False
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(call(here, os.fsencode(a), here, os.fsencode(b), both) == 0)


def sync(path: Path) -> None:
    """Makes a file, or the renames in a folder, survive a power cut, on a disk that knows how."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks sync no folders
            raise
    finally:
        os.close(fd)


def sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
