"""Serves a page until Ctrl-C, and keeps other people's web pages away from it.

A browser lets any page connect to 127.0.0.1. Two headers, which a page cannot forge, tell them apart: the origin of a
foreign page is not the host that it asks; and a foreign name that was made to point here is a host that we do not know.
Addresses are always known, since an attack by name cannot use them. A program without an origin is no web page.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Collection
from typing import ClassVar
from urllib.parse import parse_qsl, urlsplit

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rung import parse
from rung.errors import UserError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; font-src 'self'; "
    "img-src 'self' blob:; media-src 'self' blob:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
LEAST_TOKEN = 16  # characters


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


def check_token(listening: socket.socket, token: str | None) -> None:
    """UserError where others than this machine could come in without a token, or with one that can be guessed."""
    if token is not None and (
        len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or token != token.strip()
    ):
        raise UserError(
            f"--token needs at least {LEAST_TOKEN} plain characters, with no space at its ends, as "
            "`python -c 'import secrets; print(secrets.token_urlsafe())'` prints",
            code="token-weak",
        )
    host = listening.getsockname()[0]
    if token is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise UserError(
            f"--host {host} lets in everybody who can reach this machine; add --token (or RUNG_TOKEN) with at least "
            f"{LEAST_TOKEN} characters, which visitors then have to give",
            code="token-missing",
        )


class ImpatientProtocol(H11Protocol):
    """Closes a connection whose request is not whole in time, or whose client stops reading the answer; uvicorn itself
    would wait for the rest for ever."""

    request_s: ClassVar[float] = 20.0  # the longest that a request may take to arrive
    write_s: ClassVar[float] = 120.0  # the longest that what is sent may wait for the client to read
    _limit: asyncio.TimerHandle | None = None
    _write_limit: asyncio.TimerHandle | None = None

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

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_limit = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._limit = self.loop.call_later(self.request_s, self._close)

    def _stop_waiting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _stop_waiting_for_reader(self) -> None:
        if self._write_limit is not None:
            self._write_limit.cancel()
            self._write_limit = None

    def _close(self) -> None:
        self._limit = None
        if not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """Tells the app that it ends, so that answers without an end (app.state.is_ending) end too."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if isinstance(self.config.app, Starlette):
            self.config.app.state.is_ending = True
        await super().shutdown(sockets)


def server(app: ASGIApp) -> uvicorn.Server:
    """Pictures do not get smaller by deflate, and requests are short. Ending does not wait for visitors to leave."""
    return Server(
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
        # A foreign page may lead here by a link, and use nothing of what is here.
        is_used_elsewhere = (
            headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate"
        )
        if is_used_elsewhere or not self.is_ours(headers.get("host", ""), headers.get("origin")):
            refusal = PlainTextResponse("this page is not served under that name, nor to other pages", 403)
            await refusal(scope, receive, send)
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                to_send = MutableHeaders(scope=message)
                to_send.setdefault("content-security-policy", POLICY)
                to_send.setdefault("cache-control", "no-cache")
                to_send["x-content-type-options"] = "nosniff"
                to_send["referrer-policy"] = "no-referrer"
                to_send["cross-origin-resource-policy"] = "same-origin"
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


def openai_error(message: str, status: int, code: str | None = None, param: str | None = None) -> JSONResponse:
    """An error as OpenAI's API words it; its clients choose their exception by the status."""
    kind = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}.get(
        status, "invalid_request_error"
    )
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


_FORM = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>rung</title></head><body><main><h1>rung</h1>
<form method="post" action="/login"><p><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button>Enter</button></p></form>
<p role="alert">{problem}</p></main></body></html>
"""
_MOST_LOGIN_BYTES = 4096


class TokenGate:
    """ASGI middleware: lets in who gives the token: a program with every request (Authorization: Bearer TOKEN), a
    visitor once, known from then on by a cookie that no script can read.

    The cookie holds a random name for this server and not the token. It is sent to this address alone and with no
    request that another page makes.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self._token = app, token.encode()
        # Cookies know no ports: two servers on one machine must not overwrite each other's.
        self._name, self._session = f"rung-{secrets.token_hex(4)}", secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/login":
            await (await self._login(Request(scope, receive)))(scope, receive, send)
        elif self._is_known(Headers(scope=scope)):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "give the token first"})
        elif scope["path"].startswith("/v1/"):
            message = "give the token of this server as the API key: Authorization: Bearer TOKEN"
            await openai_error(message, 401, "invalid_api_key")(scope, receive, send)
        elif scope["path"].startswith(("/api/", "/files/")) or scope["method"] not in ("GET", "HEAD"):
            answer = {"error": "this page asks for a token; open / and give it", "code": "token-missing"}
            await JSONResponse(answer, 401)(scope, receive, send)
        else:
            await RedirectResponse("/login", 303)(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._token):
            return True
        given = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return any(
            name == self._name and hmac.compare_digest(value.encode(), self._session.encode())
            for name, _, value in given
        )

    async def _login(self, request: Request) -> Response:
        if request.method in ("GET", "HEAD"):
            return HTMLResponse(_FORM.format(problem=""))
        if request.method != "POST":
            return PlainTextResponse("only GET and POST", 405)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MOST_LOGIN_BYTES:
                return PlainTextResponse("too long", 413)
        is_json = request.headers.get("content-type", "").partition(";")[0].strip() == "application/json"
        try:
            found = parse.mapping(parse.json(body)) if is_json else dict(parse_qsl(body.decode()))
            given = str(found.get("token", "")).encode()
        except ValueError:
            given = b""
        if not hmac.compare_digest(given, self._token):
            if is_json:
                return JSONResponse({"error": "this is not the token", "code": "token-wrong"}, 403)
            return HTMLResponse(_FORM.format(problem="This is not the token."), 403)
        entered: Response = JSONResponse({}) if is_json else RedirectResponse("/", 303)
        is_secure = request.url.scheme == "https"
        entered.set_cookie(self._name, self._session, httponly=True, samesite="strict", secure=is_secure)
        return entered


def guarded(hosts: Collection[str], token: str | None) -> list[Middleware]:
    """What stands before every page."""
    own = Middleware(OwnPagesOnly, hosts=hosts)
    return [own] if token is None else [own, Middleware(TokenGate, token=token)]
