"""Reads and writes the objects under a URL: s3://, gs://, az://, file:// or the path of a folder.

A request that fails for a passing reason (5xx, a cut connection, a timeout) is retried a bounded number of times; the
first one fewer times, so that a wrong URL fails at once. Keys and endpoints come from the usual environment variables
(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME). A folder has no
conditional write; a lock and a comparison stand in for it.

Several transfers at a time run in daemon threads rather than those of concurrent.futures, which Python waits for at
exit: a training that has ended must not hang on a server that does not answer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from rung.errors import UserError
from rung.runs.files import locked
from rung.text import one_line

T = TypeVar("T")
R = TypeVar("R")
Report = Callable[[str, int, int], None]  # what, done, total
Version = Mapping[str, str]  # which state of an object was read: e_tag, and with some stores a version
SCHEMES = ("s3", "gs", "az", "file")
PART_BYTES = 8 << 20  # more than this is sent in parts
MOST_PARTS = 9_000  # S3 takes 10,000
ATTEMPTS = 6
FIRST_ANSWER, ANSWER = "20s", "120s"  # after so long without a byte a connection is cut
_LOCAL = re.compile(r"(/|\./|\.\./|~|\.\.?$)")
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist")

# Without credentials in the environment the machine itself is asked for some, at these addresses.
_NO_KEYS = re.compile(r"169\.254\.|/latest/(api|meta-data)|computeMetadata|token request|identity/oauth2")


class RemoteError(UserError):
    """A place that cannot be used, or an item there that is not whole."""


class WriteConflict(RemoteError):
    """Somebody else has written the object since it was read."""


def is_place(arg: str) -> bool:
    """Whether an argument names a place: a URL, or a path that cannot be taken for a run's name."""
    return "://" in arg or _LOCAL.match(arg) is not None


class Bucket:
    """The objects under one URL. All methods may be called from several threads."""

    def __init__(self, url: str, *, is_new: bool = False) -> None:
        """Opens the place without a request; `is_new` creates a missing folder."""
        self.url, self.scheme, self.folder = _parsed(url)
        if importlib.util.find_spec("obstore") is None:
            message = "push, pull and --remote need the package obstore: pip install 'rung[s3]'."
            raise UserError(message, code="not-installed")
        self._api = importlib.import_module("obstore")
        self._errors = importlib.import_module("obstore.exceptions")
        self._has_answered = False
        self._first: Any
        self._store: Any
        from obstore.store import LocalStore, from_url

        if self.folder is not None:
            try:
                if is_new:
                    self.folder.mkdir(parents=True, exist_ok=True)
                if not self.folder.is_dir():
                    message = f"there is no folder {self.folder}; name another one, or push something there."
                    raise RemoteError(message, code="no-folder")
                self._first = self._store = LocalStore(self.folder)
            except (OSError, self._errors.BaseError) as error:
                raise self._as_error(error) from error
            return
        # Two clients: one that gives up soon, for the first answer, and one that is patient. There is no limit on a
        # whole transfer: a checkpoint may take an hour. A connection that stands still is cut.
        client: dict[str, Any] = {"connect_timeout": "5s", "read_timeout": ANSWER, "timeout": "12h"}
        endpoint = self._endpoint()
        config: Any = {"endpoint": endpoint} if endpoint else None
        if endpoint.startswith("http://") or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
            client["allow_http"] = True
        quick = {**client, "connect_timeout": "3s", "read_timeout": FIRST_ANSWER}
        soon = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}
        patient = {"max_retries": 8, "retry_timeout": timedelta(minutes=3)}
        try:
            self._first = from_url(self.url, config=config, client_options=quick, retry_config=soon)
            self._store = from_url(self.url, config=config, client_options=client, retry_config=patient)
        except (self._errors.BaseError, ValueError, TypeError) as error:
            raise RemoteError(f"{self.url} cannot be opened: {_first_line(error)}.", code="bad-url") from error

    def at(self, key: str) -> str:
        """The URL of a key, as messages show it."""
        return f"{self.url}/{key}"

    def read(self, key: str) -> tuple[bytes, Version] | None:
        """Reads an object and its version; None where it does not exist."""

        def get(store: Any) -> tuple[bytes, Version]:
            result = self._api.get(store, key)
            meta = result.meta
            version = {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}
            return bytes(result.bytes()), version

        try:
            return self._call(get)
        except FileNotFoundError:
            return None

    def write(self, key: str, data: bytes, before: Version | None) -> None:
        """Writes a small object if it is still as it was: absent (None), or of that version; else WriteConflict."""
        with self._local_lock(key):
            is_lost = False
            if before is not None and self.folder is not None:
                now = self.read(key)
                is_lost = now is None or now[1] != before
            mode: Any = "create" if before is None else "overwrite" if self.folder is not None else dict(before)
            try:
                if not is_lost:
                    self._call(lambda store: self._api.put(store, key, data, mode=mode))
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError, FileNotFoundError):
                # An answer may be lost after it was obeyed, and a second try then finds our own object.
                found = self.read(key)
                is_lost = found is None or found[0] != data
            if is_lost:
                message = f"somebody else wrote {self.at(key)} at the same time; this push changed nothing."
                raise WriteConflict(message, code="write-conflict")

    def send(self, key: str, chunks: Callable[[], Iterator[bytes]], num_bytes: int) -> None:
        """Writes an object; `chunks` starts from the beginning each time it is called."""
        if num_bytes <= PART_BYTES:
            self._call(lambda store: self._api.put(store, key, b"".join(chunks()), use_multipart=False))
            return
        part = max(PART_BYTES, -(-num_bytes // MOST_PARTS))
        self._call(lambda store: self._api.put(store, key, chunks(), chunk_size=part, max_concurrency=3))

    def receive(self, key: str) -> Iterator[bytes]:
        """Yields the bytes of an object, and resumes where a connection was cut; FileNotFoundError where it is gone."""
        done, num_bytes, failures = 0, None, 0
        while num_bytes is None or done < num_bytes:
            options: Any = {"range": {"offset": done}} if done else None
            result = self._call(functools.partial(self._api.get, path=key, options=options))
            num_bytes = int(result.meta["size"]) if num_bytes is None else num_bytes
            before, problem = done, None
            try:
                for piece in result.stream(min_chunk_size=1 << 20):
                    done += len(piece)
                    yield bytes(piece)
            except self._errors.BaseError as error:
                problem = error
            if problem is not None or done == before < num_bytes:
                failures = failures + 1 if done == before else 1
                if failures >= ATTEMPTS:
                    raise self._as_error(problem or OSError(f"{key} breaks off at byte {done}")) from problem
                time.sleep(0.1 * 2**failures)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Key -> bytes of every object below a prefix."""

        def ask(store: Any) -> dict[str, int]:
            found = self._api.list(store, prefix, chunk_size=1000)
            return {meta["path"]: int(meta["size"]) for batch in found for meta in batch}

        return self._call(ask)

    def folders(self, prefix: str) -> list[str]:
        """The names one level below a prefix that have something below them."""
        found = self._call(lambda store: self._api.list_with_delimiter(store, prefix))
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects; one that is already gone is no error."""
        if self.folder is None:
            for first in range(0, len(keys), 1000):
                batch = list(keys[first : first + 1000])
                self._call(functools.partial(self._api.delete, paths=batch))
            return
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._call(functools.partial(self._api.delete, paths=key))
            for parent in (self.folder / key).parents:  # folders in which nothing is left, up to the place itself
                if parent == self.folder or not parent.is_relative_to(self.folder):
                    break
                try:
                    parent.rmdir()
                except OSError:
                    break

    @contextlib.contextmanager
    def _local_lock(self, key: str) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        try:
            place = (self.folder / key).parent
            place.mkdir(parents=True, exist_ok=True)
            with locked(place):
                yield
        except OSError as error:
            raise self._as_error(error) from error

    def _endpoint(self) -> str:
        """The URL of a server other than the provider's own; "" for that one."""
        if self.scheme != "s3":
            return ""
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        return next((value for name in names if (value := os.environ.get(name))), "")

    def _call(self, action: Callable[[Any], T]) -> T:
        """Calls `action` and retries what may pass; turns its errors into ours.

        obstore itself retries requests, but not a body that breaks off, nor an upload in parts that fails as a whole.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                result = interruptibly(action, self._store if self._has_answered else self._first)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                self._has_answered = True
                raise
            except (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError) as error:
                raise self._as_error(error) from error
            except (self._errors.BaseError, OSError) as error:
                is_lost = "NoSuchUpload" in str(error)  # the last answer of an upload in parts; it may be done or not
                is_absent = isinstance(error, FileNotFoundError) and not is_lost
                if is_absent and not _NO_BUCKET.search(str(error)):
                    self._has_answered = True
                    raise
                if not self._has_answered or attempt == ATTEMPTS or _NO_BUCKET.search(str(error)):
                    raise self._as_error(error) from error
                time.sleep(0.2 * 2**attempt)
            else:
                self._has_answered = True
                return result
        raise AssertionError("every attempt ends")

    def _as_error(self, error: Exception) -> RemoteError:
        """One sentence: the place, what happened, what to check."""
        text, where = _first_line(error), self._endpoint() or f"{self.scheme}://"
        keys = _KEYS.get(self.scheme, "your credentials")
        if self.folder is not None:
            message = f"{self.folder} cannot be used: {text}; check its permissions and the space left."
            return RemoteError(message, code="bad-folder")
        if _NO_BUCKET.search(str(error)):
            bucket = urlsplit(self.url).netloc
            message = f"there is no bucket {bucket} at {where}; create it, or fix the URL {self.url}."
            return RemoteError(message, code="no-bucket")
        refusals = (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError)
        if isinstance(error, refusals) or "status code: 403" in text:
            message = f"{self.url} refuses these credentials; check {keys}, and what they may do there."
            return RemoteError(message, code="no-permission")
        if _NO_KEYS.search(text):
            return RemoteError(f"there are no credentials for {self.url}; set {keys}.", code="no-credentials")
        if "error sending request" in text or "connect" in text.lower() or "timed out" in text:
            hint = "AWS_ENDPOINT_URL and the network" if self.scheme == "s3" else "the network"
            return RemoteError(f"{where} does not answer; check {hint} ({text}).", code="network")
        return RemoteError(f"{self.url} failed: {text}.", code="network")


def _parsed(url: str) -> tuple[str, str, Path | None]:
    """Normalizes a URL; returns it with its scheme and, for a folder, the path."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not is_place(url):
            message = f"{url} is not a place; name a URL such as s3://bucket/prefix, or a folder as ./{url}."
            raise RemoteError(message, code="bad-url")
        folder = Path(url).expanduser().absolute()
        return str(folder), "file", folder
    if scheme not in SCHEMES:
        message = f"{url} cannot be used: {scheme}:// is none of {', '.join(f'{s}://' for s in SCHEMES)}."
        raise RemoteError(message, code="bad-url")
    if scheme == "file":
        folder = Path(unquote(rest.removeprefix("localhost")))
        if not folder.is_absolute():
            message = f"{url} does not name a folder; write file:///and/its/path, or the path alone."
            raise RemoteError(message, code="bad-url")
        return str(folder), scheme, folder
    if not rest.strip("/"):
        raise RemoteError(f"{url} names no bucket; write {scheme}://bucket/prefix.", code="bad-url")
    if "@" in rest.split("/")[0] or "?" in rest or "#" in rest:
        # Not shown again: such a URL often holds a key, and what is shown is also written into records.
        message = f"a URL of {scheme}:// holds no @, ? or #; keys are taken from {_KEYS[scheme]}."
        raise RemoteError(message, code="bad-url")
    return url.rstrip("/"), scheme, None


def _first_line(error: Exception) -> str:
    """The message of obstore, without its page of debugging."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = one_line(str(error).split("\n\nDebug source")[0]).rstrip(".")
    text = re.sub(r" in [0-9.]+(µs|ms|s)\b|, max_retries: \d+, retry_timeout: \d+s ", "", text)
    text = re.sub(r"(https?://[^\s?)]*)\?[^\s),]*", r"\1", text)  # with some credentials the query holds a signature
    return text if len(text) <= 300 else f"{text[:297]}..."


def in_parallel(work: Callable[[T], None], items: Iterable[T], num_threads: int = 8) -> None:
    """Calls `work` on every item, several at a time; the first error ends the rest and is raised."""
    waiting, errors = deque(items), list[BaseException]()

    def loop() -> None:
        while not errors:
            try:
                item = waiting.popleft()
            except IndexError:
                return
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(min(num_threads, len(waiting)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C
        errors.append(error)
        raise
    if errors:
        raise errors[0]


def interruptibly(work: Callable[[T], R], item: T) -> R:
    """Calls `work` in another thread if this is the main one, so that Ctrl-C need not wait for a server."""
    if threading.current_thread() is not threading.main_thread():
        return work(item)
    results: list[R] = []
    in_parallel(lambda one: results.append(work(one)), [item])
    return results[0]


class Meter:
    """Counts transferred bytes and reports them; may be called from any thread."""

    def __init__(self, what: str, total: int, report: Report | None) -> None:
        self.done = 0
        self._what, self._total, self._report = what, total, report
        self._lock = threading.Lock()
        self.add(0)

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
            if self._report is not None:
                self._report(self._what, self.done, self._total)
