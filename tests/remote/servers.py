"""Object storage on this machine: a real S3 server over HTTP, and a proxy before it that fails on demand."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def started(command: list[str], url: str) -> Iterator[None]:
    """A server of its own, from the moment it answers until the body ends."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not answers(url):
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{command[0]} does not answer"
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """The address of a server that keeps objects in memory and knows conditions."""
    port = free_port()
    code = f"import sys; sys.argv = ['moto', '-H', '127.0.0.1', '-p', '{port}']; from moto.server import main; main()"
    with started([sys.executable, "-c", code], f"http://127.0.0.1:{port}/moto-api/"):
        yield f"http://127.0.0.1:{port}"


def make_bucket(address: str, name: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{address}/{name}", method="PUT"), timeout=10).close()


@dataclass
class Asked:
    """A request as the proxy sees it: its number, and what it is about."""

    number: int
    method: str
    path: str
    num_bytes: int


@dataclass
class Proxy:
    """Stands before a server. `fault` says what happens to a request: None, "500", "503", "403", "cut" (nothing gets
    through), "lost" (it is obeyed, and the answer never comes), "hang" (nothing comes for two seconds), "half" (the
    answer breaks off) or "rot" (a byte of the answer is another one). `before` sees each."""

    address: str
    upstream: str
    fault: Callable[[Asked], str | None] = lambda asked: None
    before: Callable[[Asked], None] = lambda asked: None
    asked: list[Asked] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sent_bytes(self) -> int:
        return sum(one.num_bytes for one in self.asked if one.method in ("PUT", "POST"))

    def puts(self) -> list[str]:
        return [one.path for one in self.asked if one.method == "PUT"]


@contextlib.contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    port = free_port()
    state = Proxy(f"http://127.0.0.1:{port}", upstream)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _handler(state))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


def _handler(state: Proxy) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with state.lock:
                asked = Asked(len(state.asked) + 1, self.command, self.path, len(body))
                state.asked.append(asked)
            state.before(asked)
            fault = state.fault(asked)
            if fault is not None:
                state.faults.append(fault)
            if fault in ("cut", "hang"):
                time.sleep(2 if fault == "hang" else 0)
                self.drop()
            elif fault in ("500", "503", "403"):
                code = "SlowDown" if fault == "503" else "Injected"
                self.reply(int(fault), f"<Error><Code>{code}</Code></Error>".encode(), {})
            else:
                status, headers, data = self.forward(body)
                if fault == "lost":
                    self.drop()
                elif fault == "half" and len(data) > 1:
                    self.reply(status, data[: len(data) // 2], headers, len(data))
                    self.drop()
                elif fault == "rot" and data:
                    at = len(data) // 2
                    self.reply(status, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], headers)
                else:
                    self.reply(status, data, headers)

        def forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            there = http.client.HTTPConnection(state.upstream.removeprefix("http://"), timeout=60)
            try:
                there.request(self.command, self.path, body, dict(self.headers.items()))
                answer = there.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read()
            finally:
                there.close()

        def reply(self, status: int, data: bytes, headers: dict[str, str], length: int | None = None) -> None:
            length = len(data) if length is None else length
            if self.command == "HEAD":
                length = int(headers.get("Content-Length", "0"))
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(data)

        def drop(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
