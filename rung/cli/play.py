"""rung play"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.cli.options import runs_option, token_option, trust_option
from rung.errors import UserError
from rung.recipe import Plays
from rung.text import echo

if TYPE_CHECKING:
    from rung.recipe import Player


@click.command(short_help="Walk in a learned world.")
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--at", type=int, help="The save to play; default: the best one, else the last.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Another address than loopback needs --token.")
@token_option
@click.option("--no-open", is_flag=True, help="Only print the address; open no browser.")
@trust_option
@runs_option
def command(
    run: str, overrides: tuple[str, ...], at: int | None, port: int, host: str, token: str | None, no_open: bool,
    root: Path,
) -> None:  # fmt: skip
    """Serve a page in which to walk through what RUN has learned, until Ctrl-C.

    \b
    Examples:
      rung play world/3
      rung play world/3 --at 2000 --port 0 --no-open
      rung play world/3 system.device=cpu
    """
    try:
        from rung.web.play import STATIC, play_app
        from rung.web.serve import address_of, check_token, listen, server
    except ModuleNotFoundError as error:
        raise UserError(
            f"rung play needs {error.name}, which is not installed: pip install 'rung[web]'", code="not-installed"
        ) from error
    if not (STATIC / "index.html").exists():
        raise UserError(
            f"the page is not built: no index.html in {STATIC}; `make page` in the checkout builds it", code="not-built"
        )

    with listen(host, port) as listening, ThreadPoolExecutor(1, "model") as model:
        check_token(listening, token)
        from rung import api

        loaded = model.submit(api.load, run, overrides, at=at, runs=root).result()
        setup, title = loaded.setup, f"{loaded.run.id} at step {loaded.step}"

        @contextlib.contextmanager
        def mode() -> Iterator[None]:
            """As the run evaluates: without gradients, in its own precision."""
            import torch

            with torch.no_grad(), setup.precision.autocast():
                yield

        def make_player() -> Player:
            import torch

            if not setup.cfg.system.threads:
                # The browser draws on the same cores. Where one worker is put aside, the others wait for it at every
                # layer: with all cores a step of 5 ms was seen to take 300.
                torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
            if not isinstance(setup.recipe, Plays):
                message = f"{type(setup.recipe).__name__} has no world to walk in; `rung sample` makes samples"
                raise UserError(message, code="not-supported")
            with mode():
                return setup.recipe.player(setup.state.model.eval())

        player = model.submit(make_player).result()
        app = play_app(player, title, {host, socket.gethostname(), socket.getfqdn()}, mode, model=model, token=token)
        echo(f"{title}: {address_of(listening)}   (Ctrl-C ends it)")
        # On a server without a screen a browser would take over the terminal.
        screens = ("DISPLAY", "WAYLAND_DISPLAY")
        if not no_open and (sys.platform != "linux" or any(os.environ.get(name) for name in screens)):
            click.launch(address_of(listening))
        try:
            server(app).run(sockets=[listening])
        except KeyboardInterrupt:  # uvicorn has closed everything, and says again what made it
            echo()
