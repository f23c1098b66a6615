"""What is kept of an error that ended a run: what was raised, and the last line of the user's own code that led there.

The user's code is whatever lies neither in the standard library nor among installed packages nor in rung: the script,
its modules, a recipe of one's own, the cell of a notebook.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
import types
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).resolve().parents[1])
_INSTALLED = ("site-packages", "dist-packages")
_STDLIB = tuple({os.path.realpath(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")})


def failure_of(error: BaseException) -> dict[str, Any]:
    """`error`, and of the last frame of the user's code `file`, `line`, `function`, `code`; `raised_in` names the frame
    that raised it, where that is another one."""
    said = " ".join(str(error).split())[:500]
    found: dict[str, Any] = {"error": f"{type(error).__name__}: {said}" if said else type(error).__name__}
    if isinstance(error, SystemExit):
        found["error"] = f"exit {error.code}"
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in frames if is_users(frame.f_code.co_filename)]
    if own:
        found |= _place(*own[-1])
    if frames and (not own or frames[-1][0] is not own[-1][0]):
        frame, line = frames[-1]
        module = frame.f_globals.get("__name__", "?")
        found["raised_in"] = f"raised in {module}.{frame.f_code.co_name}, line {line}"
    return found


def failure_here(error: str) -> dict[str, Any]:
    """Of somebody who is about to end the script: the last frame of the user's code that led here."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return {"error": error} if frame is None else {"error": error, **_place(frame, frame.f_lineno)}


def _place(frame: types.FrameType, line: int) -> dict[str, Any]:
    name = frame.f_code.co_filename
    code = linecache.getline(name, line, frame.f_globals).strip()[:200]
    return {"file": shown(name), "line": line, "function": frame.f_code.co_name, "code": code}


def is_users(file: str) -> bool:
    if file.startswith("<"):
        return not file.startswith(("<frozen", "<__array", "<string>", "<attrs"))
    path = os.path.realpath(file)
    if path.startswith(_OURS + os.sep) or any(name in Path(path).parts for name in _INSTALLED):
        return False
    return not path.startswith(tuple(folder + os.sep for folder in _STDLIB))


def shown(file: str) -> str:
    """As somebody in the current folder would type it."""
    try:
        relative = os.path.relpath(file)
    except (OSError, ValueError):  # the folder is gone; another drive
        return file
    return file if file.startswith("<") or relative.startswith("..") else relative
