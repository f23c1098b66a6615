"""rung trains generative sequence models and keeps the lab book while it does."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rung.engine.rescue import Diverged as Diverged
    from rung.own_loop import guard as guard
    from rung.own_loop import replay as replay


def __getattr__(name: str) -> Any:
    """What a loop of one's own needs of rung, with torch, when it is asked for."""
    if name in ("guard", "replay"):
        from rung import own_loop

        return getattr(own_loop, name)
    if name == "Diverged":
        from rung.engine.rescue import Diverged

        return Diverged
    raise AttributeError(f"module 'rung' has no attribute {name!r}")
