"""Serves a page until Ctrl-C, and keeps other people's web pages away from it.

A browser lets any page connect to 127.0.0.1. Two headers, which a page cannot forge, tell them apart: the origin of a
foreign page is not the host that it asks; and a foreign name that was made to point here is a host that we do not know.
Addresses are always known, since an attack by name cannot use them. A program without an origin is no web page.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Collection
from typing import ClassVar
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rung.errors import UserError

POLICY = "default-src 'self'; img-src 'self' blob:; media-src blob:; frame-ancestors 'none'; base-uri 'none'"


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections already, so that a port in use is reported before anything slow is loaded.

    Port 0 takes a free one.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} is not an address of this machine; 127.0.0.1 is", code="bad-host") from error
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is in use; --port 0 takes a free one", code="in-use") from error
        if error.errno == errno.EACCES:
            raise UserError(
                f"you may not use port {port} of {host}; take one above 1023", code="no-permission"
            ) from error
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror}", code="bad-host") from error
    return found


def address_of(listening: socket.socket) -> str:
    """What to open in a browser."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class ImpatientProtocol(H11Protocol):
    """Closes a connection whose request is not whole in time; uvicorn itself would wait for the rest for ever."""

    request_s: ClassVar[float] = 20.0  # the longest that a request may take to arrive
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        if self._limit is None and self.conn.their_state is h11.IDLE:  # the next request on a connection that is kept
            self._await_request()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._stop_waiting()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._limit = self.loop.call_later(self.request_s, self._close)

    def _stop_waiting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _close(self) -> None:
        self._limit = None
        if not self.transport.is_closing():
            self.transport.close()


def server(app: ASGIApp) -> uvicorn.Server:
    """Pictures do not get smaller by deflate, and requests are short. Ending does not wait for visitors to leave."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=ImpatientProtocol,
            ws="websockets-sansio",
            ws_per_message_deflate=False,
            ws_max_size=64 * 1024,
            log_level="warning",
            timeout_graceful_shutdown=1,
        )
    )


class OwnPagesOnly:
    """ASGI middleware: answers 403 to everybody else, and forbids our own pages to load anything from outside."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self.app, self.hosts = app, {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not self.is_ours(headers.get("host", ""), headers.get("origin")):
            refusal = PlainTextResponse("this page is not served under that name, nor to other pages", 403)
            await refusal(scope, receive, send)
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                to_send = MutableHeaders(scope=message)
                to_send["content-security-policy"] = POLICY
                to_send["cache-control"] = "no-cache"
            await send(message)

        await self.app(scope, receive, send_with_policy)

    def is_ours(self, host: str, origin: str | None) -> bool:
        """Whether a request with these headers comes from one of our own pages, or from no page at all."""
        with contextlib.suppress(ValueError):  # of an address that cannot be parsed
            name = urlsplit(f"//{host}").hostname or ""
            if origin is not None and urlsplit(origin).netloc != host:
                return False
            return name in self.hosts or bool(ipaddress.ip_address(name))
        return False
