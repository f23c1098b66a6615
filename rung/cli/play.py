"""rung play"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.cli.resolve import runs_option
from rung.errors import UserError

if TYPE_CHECKING:
    from rung.engine.build import Setup
    from rung.recipe import Player


@click.command(short_help="Walk in a learned world.")
@click.argument("run")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--at", type=int, help="The save to play; default: the best one, else the last.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 lets in everybody who reaches you.")
@click.option("--no-open", is_flag=True, help="Only print the address; open no browser.")
@runs_option
def command(
    run: str, words: tuple[str, ...], at: int | None, port: int, host: str, no_open: bool, runs_root: Path
) -> None:
    """Serve a page in which to walk through what RUN has learned, until Ctrl-C.

    \b
    Examples:
      rung play world/3
      rung play world/3 --at 2000 --port 0 --no-open
      rung play world/3 system.device=cpu
    """
    try:
        from rung.web.play import STATIC, play_app
        from rung.web.serve import address_of, listen, server
    except ModuleNotFoundError as error:
        raise UserError(f"rung play needs {error.name}, which is not installed: pip install 'rung[web]'") from error
    if not (STATIC / "index.html").exists():
        raise UserError(f"the page is not built: no index.html in {STATIC}; `make page` in the checkout builds it")

    with listen(host, port) as listening, ThreadPoolExecutor(1, "model") as model:
        from rung.cli.eval import open_weights
        from rung.runs.query import open_run

        setup, step = model.submit(open_weights, run, words, at, runs_root).result()
        mode = functools.partial(_without_gradients, setup)
        player = model.submit(_player, setup, mode).result()
        title = f"{open_run(run, runs_root).id} at step {step}"
        app = play_app(player, title, _names(host), mode, model=model)
        click.echo(f"{title}: {address_of(listening)}   (Ctrl-C ends it)")
        if not no_open and _has_screen():
            click.launch(address_of(listening))
        try:
            server(app).run(sockets=[listening])
        except KeyboardInterrupt:  # uvicorn has closed everything, and says again what made it
            click.echo()


def _player(setup: Setup, mode: Callable[[], contextlib.AbstractContextManager[None]]) -> Player:
    import torch

    if not setup.cfg.system.threads:
        # The browser draws on the same cores. Where one worker is put aside, the others wait for it at every layer:
        # with all cores a step of 5 ms was seen to take 300.
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    with mode():
        return setup.recipe.player(setup.state.model.eval())


@contextlib.contextmanager
def _without_gradients(setup: Setup) -> Iterator[None]:
    """As the run evaluates: in its own precision."""
    import torch

    with torch.no_grad(), setup.precision.autocast():
        yield


def _names(host: str) -> set[str]:
    import socket

    return {host, socket.gethostname(), socket.getfqdn()}


def _has_screen() -> bool:
    """Whether opening a browser means a window: not on a server, where it would take over the terminal."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
