"""rung serve"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import click

from rung.cli.options import runs_option, token_option
from rung.errors import UserError
from rung.text import echo
from rung.units import plural


@click.command("serve", short_help="Show the whole lab book as a live page.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Another address than loopback needs --token.")
@token_option
@click.option("--read-only", "is_read_only", is_flag=True, help="Let nobody write notes, tags and verdicts.")
@click.option("--no-open", is_flag=True, help="Only print the address; open no browser.")
@click.option("--export", "out", type=click.Path(path_type=Path), metavar="DIR",
              help="Write a static copy of the page and all that it shows into DIR instead.")  # fmt: skip
@runs_option
def command(
    port: int, host: str, token: str | None, is_read_only: bool, no_open: bool, out: Path | None, root: Path
) -> None:
    """Serve a page of all runs, until Ctrl-C: tables, live curves, comparisons, findings, samples.

    \b
    Examples:
      rung serve
      rung serve --port 0 --no-open
      rung serve --read-only
      rung serve --export lab-book
    """
    try:
        from rung.web.lab import STATIC, lab_app
        from rung.web.serve import address_of, check_token, listen, server
    except ModuleNotFoundError as error:
        raise UserError(
            f"rung serve needs {error.name}, which is not installed: pip install 'rung[web]'", code="not-installed"
        ) from error
    if not (STATIC / "lab.html").exists():
        raise UserError(
            f"the page is not built: no lab.html in {STATIC}; `make page` in the checkout builds it", code="not-built"
        )
    if out is not None:
        from rung.web.export import export

        count = export(root, out, STATIC, _progress)
        echo(f"{plural(count, 'run')} in {out}; any web server can show it: python -m http.server -d {out}")
        return
    with listen(host, port) as listening:
        check_token(listening, token)
        app = lab_app(root, {host, socket.gethostname(), socket.getfqdn()}, is_read_only, token)
        echo(f"{root}: {address_of(listening)}   (Ctrl-C ends it)")
        # On a server without a screen a browser would take over the terminal.
        screens = ("DISPLAY", "WAYLAND_DISPLAY")
        if not no_open and (sys.platform != "linux" or any(os.environ.get(name) for name in screens)):
            click.launch(address_of(listening))
        try:
            server(app).run(sockets=[listening])
        except KeyboardInterrupt:  # uvicorn has closed everything, and says again what made it
            echo()


def _progress(done: int, total: int, name: str) -> None:
    if sys.stderr.isatty():
        echo(f"\r{done} of {total} runs  {name}\033[K", nl=done >= total, err=True)
    elif done and done % 100 == 0:
        echo(f"{done} of {total} runs", err=True)
