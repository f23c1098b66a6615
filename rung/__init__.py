"""rung trains generative sequence models and keeps the lab book while it does.

In a loop of one's own, `rung.init`, `rung.log`, `rung.watch`, `rung.config` and `rung.finish` act on the run that is
going on, so that a script written for wandb needs another import and little else.

The surprising thing: while such a run is going on, `rung.config` is its configuration, and otherwise the module of
that name. So the module is only ever imported from: `from rung.config import key`.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rung.engine.rescue import Diverged as Diverged
    from rung.own_loop import OwnRun
    from rung.own_loop import guard as guard
    from rung.own_loop import init as init
    from rung.own_loop import replay as replay
    from rung.own_loop.current import define_metric as define_metric
    from rung.own_loop.current import finish as finish
    from rung.own_loop.current import log as log
    from rung.own_loop.current import watch as watch

    run: OwnRun | None
    summary: dict[str, Any]

_OF_THE_RUN = ("log", "watch", "define_metric", "finish", "summary")


class _Rung(ModuleType):
    @property
    def config(self) -> Any:
        current = sys.modules.get("rung.own_loop.current")
        run = current.current() if current is not None else None
        if run is None and "rung.config" not in sys.modules:
            raise AttributeError  # and __getattr__ says why
        return run.config if run is not None else sys.modules["rung.config"]

    @config.setter
    def config(self, found: Any) -> None:
        """Python sets a submodule as an attribute when it is imported; it is found in sys.modules anyway. A script that
        sets it means the configuration of its run."""
        if not isinstance(found, ModuleType):
            from rung.own_loop.current import needed

            needed().config.update(found)


sys.modules[__name__].__class__ = _Rung


def __getattr__(name: str) -> Any:
    """What a loop of one's own needs of rung; with torch only where it is asked for."""
    if name in ("guard", "replay", "init"):
        from rung import own_loop

        return getattr(own_loop, name)
    if name == "Diverged":
        from rung.engine.rescue import Diverged

        return Diverged
    if name == "run" or name in _OF_THE_RUN:
        from rung.own_loop import current

        return current.current() if name == "run" else getattr(current, name)
    if name == "config":
        raise AttributeError("rung.config is the configuration of a run; start one: rung.init(experiment=...)")
    if not name.startswith("_"):
        from rung.own_loop import current, missing

        if name in missing.OF_THE_MODULE:
            return missing.missing(name, current.current())
    raise AttributeError(f"module 'rung' has no attribute {name!r}")
