"""Serves a page until Ctrl-C.

The port is taken before anything slow is loaded, so that a port in use is told at once.
"""

from __future__ import annotations

import errno
import socket

import uvicorn
from starlette.types import ASGIApp

from rung.errors import UserError


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections already; port 0 takes a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} is no address of this machine; 127.0.0.1 is") from error
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is in use; --port 0 takes a free one") from error
        if error.errno == errno.EACCES:
            raise UserError(f"port {port} of {host} is not allowed to you; take one above 1023") from error
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return found


def address_of(listening: socket.socket) -> str:
    """What to open in a browser."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def server(app: ASGIApp) -> uvicorn.Server:
    """Pictures do not get smaller by deflate, and wishes are short. An end does not wait for visitors to leave."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            ws="websockets-sansio",
            ws_per_message_deflate=False,
            ws_max_size=64 * 1024,
            log_level="warning",
            timeout_graceful_shutdown=1,
        )
    )
