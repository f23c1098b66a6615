"""What scripts written for wandb ask for and rung does not have: told once, and nothing happens.

A thing that is missing can be called, indexed, entered and asked for parts, and stays itself; logged, it is left out as
anything that is no number. What decides which runs there are (sweep, agent, Api) is no such thing: a script that went
on without would not do what it says.
"""

from __future__ import annotations

from typing import Any

from rung.script.never_raise import say

OF_THE_MODULE = frozenset({
    "Artifact", "Video", "Html", "Object3D", "Molecule", "Graph", "Plotly",
    "Settings", "AlertLevel", "plot", "util", "login", "setup", "require", "teardown", "save", "restore", "alert",
    "unwatch", "log_artifact", "use_artifact", "log_model", "use_model", "link_model", "mark_preempting",
})  # fmt: skip
OF_A_RUN = frozenset({
    "url", "entity", "project", "group", "job_type", "notes", "offline", "settings", "sweep_id", "get_url",
    "get_project_url", "project_url", "save", "restore", "alert", "unwatch", "log_artifact", "use_artifact",
    "upsert_artifact", "finish_artifact", "log_model", "use_model", "link_model", "log_code", "mark_preempting",
    "display", "to_html",
})  # fmt: skip
_INSTEAD = {
    "Video": "run.sample(name, path) keeps a film",
    "Artifact": "run.data(name, path) notes what was read, run.sample(name, path) keeps a file",
}
_told: set[str] = set()


def missing(name: str, run: Any = None) -> Missing:
    """`run` hears of it too."""
    text = f"rung has no {name}; nothing happens where the script uses it"
    if hint := _INSTEAD.get(name):
        text += f" ({hint})"
    if run is not None:
        run.tell(text)
    elif name not in _told:
        _told.add(name)
        say(text)
    return Missing(name)


class Missing:
    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("_"):  # what Python and others ask an object for: it has none of it
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None: ...

    def __call__(self, *words: Any, **named: Any) -> Missing:
        return self

    def __getitem__(self, key: Any) -> Missing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Missing:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __instancecheck__(self, other: object) -> bool:
        return isinstance(other, Missing) and other._name == self._name

    def __repr__(self) -> str:
        return f"<{self._name}, which rung does not have>"
