"""Keeps other people's web pages away from what is served on loopback.

A browser lets any page connect to 127.0.0.1. Two headers, which a page cannot forge, tell them apart: the origin of a
foreign page is not the host that it asks; and a foreign name that was made to point here is a host that we do not know.
Addresses are always known, since an attack by name cannot use them. A program without an origin is no web page.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "default-src 'self'; img-src 'self' blob:; media-src blob:; frame-ancestors 'none'; base-uri 'none'"


def is_ours(host: str, origin: str | None, hosts: Collection[str]) -> bool:
    """Whether a request with these headers comes from one of our own pages, or from no page at all."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        asking = None if origin is None else urlsplit(origin).netloc
    except ValueError:
        return False
    return (name == "localhost" or name in hosts or _is_address(name)) and asking in (None, host)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class OwnPagesOnly:
    """ASGI middleware: answers 403 to everybody else, and forbids our own pages to load anything from outside."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self.app, self.hosts = app, {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not is_ours(headers.get("host", ""), headers.get("origin"), self.hosts):
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
