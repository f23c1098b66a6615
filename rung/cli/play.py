"""rung play"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.cli.options import runs_option, token_option, trust_option
from rung.errors import UserError
from rung.recipe import Plays
from rung.text import echo

if TYPE_CHECKING:
    from rung.api import Loaded
    from rung.web.answers import Played

MOST_RUNS = 4  # side by side


@click.command(short_help="Try a model in the browser, or call it from a program.")
@click.argument("words", nargs=-1, required=True, metavar="RUN [RUN]... [KEY=VALUE]...")
@click.option("--at", type=int, multiple=True,
              help="The save to play; default: the best one, else the last. Twice: two saves.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Another address than loopback needs --token.")
@token_option
@click.option("--no-open", is_flag=True, help="Only print the address; open no browser.")
@trust_option
@runs_option
def command(
    words: tuple[str, ...], at: tuple[int, ...], port: int, host: str, token: str | None, no_open: bool, root: Path
) -> None:
    """Serve a page on which to try what RUN has learned, until Ctrl-C.

    Text is continued as you type, a piano model plays on after you, music is made of a prompt, speech is heard and
    answered, a world is walked in. With several runs, or several --at, all of them answer, with the same seed.

    A text model also answers programs: the address with v1 after it is an endpoint for OpenAI's client.

    \b
    Examples:
      rung play text/3
      rung play text/3 text/2
      rung play piano/1 --at 1000 --at 4000
      rung play world/3 --port 0 --no-open
      rung play music/2 system.device=cpu
    """
    try:
        from rung.web.play import STATIC, check_kinds, play_app
        from rung.web.serve import address_of, check_token, listen, server
    except ModuleNotFoundError as error:
        raise UserError(
            f"rung play needs {error.name}, which is not installed: pip install 'rung[web]'", code="not-installed"
        ) from error
    if not (STATIC / "world.html").exists():
        raise UserError(
            f"the page is not built: no world.html in {STATIC}; `make page` in the checkout builds it", code="not-built"
        )
    overrides = [word for word in words if "=" in word]
    asked = saves([word for word in words if "=" not in word], at)

    with listen(host, port) as listening, ThreadPoolExecutor(1, "model") as model:
        check_token(listening, token)
        from rung import api

        loaded = [model.submit(api.load, run, overrides, at=step, runs=root).result() for run, step in asked]
        setup = loaded[0].setup

        @contextlib.contextmanager
        def mode() -> Iterator[None]:
            """As the run evaluates: without gradients, in its own precision."""
            import torch

            with torch.no_grad(), setup.precision.autocast():
                yield

        played = model.submit(make_players, loaded, mode).result()
        check_kinds(played)
        hosts = {host, socket.gethostname(), socket.getfqdn()}
        app = play_app(played, hosts, mode, model=model, token=token)
        title = " and ".join(one.title for one in played)
        echo(f"{title}: {address_of(listening)}   (Ctrl-C ends it)")
        if played[0].player.kind == "text":
            echo(f"for programs: base_url {address_of(listening)}v1, model {played[0].name}")
        # On a server without a screen a browser would take over the terminal.
        screens = ("DISPLAY", "WAYLAND_DISPLAY")
        if not no_open and (sys.platform != "linux" or any(os.environ.get(name) for name in screens)):
            click.launch(address_of(listening))
        try:
            server(app).run(sockets=[listening])
        except KeyboardInterrupt:  # uvicorn has closed everything, and says again what made it
            echo()


def saves(runs: Sequence[str], at: Sequence[int]) -> list[tuple[str, int | None]]:
    """Each run with the save of it that is to be played."""
    if not runs:
        raise UserError("name a run to play, such as text/3 (rung ls lists them)", code="usage")
    if len(runs) == 1 and at:
        found: list[tuple[str, int | None]] = [(runs[0], step) for step in at]
    elif len(at) in (0, len(runs)):
        found = list(zip(runs, at or [None] * len(runs)))  # type: ignore[list-item]
    else:
        raise UserError(
            f"{len(runs)} runs but {len(at)} times --at; give it once for each run, in their order, or not at all",
            code="options-conflict",
        )
    if len(found) > MOST_RUNS:
        raise UserError(
            f"{len(found)} models were named; at most {MOST_RUNS} can be played side by side", code="too-many"
        )
    return found


def make_players(loaded: Sequence[Loaded], mode: Callable[[], contextlib.AbstractContextManager[None]]) -> list[Played]:
    """In the thread in which the models will work."""
    import torch

    from rung.web.answers import Played

    if not loaded[0].setup.cfg.system.threads:
        # The browser draws on the same cores. Where one worker is put aside, the others wait for it at every layer:
        # with all cores a step of 5 ms was seen to take 300.
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    ids = [one.run.id for one in loaded]
    played = []
    for one in loaded:
        recipe = one.setup.recipe
        if not isinstance(recipe, Plays):
            raise UserError(
                f"{type(recipe).__name__} has no player; `rung sample {one.run.id}` makes samples", code="not-supported"
            )
        with mode():
            player = recipe.player(one.setup.state.model.eval())
        name = one.run.id if ids.count(one.run.id) == 1 else f"{one.run.id}@{one.step}"
        played.append(Played(player, name, f"{one.run.id} at step {one.step}"))
    return played
