"""The HTTP layer of the client: connections, TLS, retries. Raises only PenstockErrors."""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from penstock.client.problems import from_problem
from penstock.core.clock import Millis
from penstock.core.errors import (
    ConfigError,
    EnvironmentProblem,
    OutcomeUnknown,
    PenstockError,
    Refused,
    StoreUnavailable,
)
from penstock.core.system_clock import SystemClock
from penstock.fleet.messages import read_message

_TOKEN = re.compile(r"[A-Za-z0-9_.~+/=-]+")
RETRY_MS: Millis = 100  # doubled after each retry
RETRY_AFTER_MS_MAX: Millis = 10_000
# In forwarded responses: the address of the control plane's own listener (`server/api.py`).
CONTROL_HEADER = "Penstock-Control"
CONNECT_S, UNREACHABLE_MS = 1.0, 60_000  # connect timeout of that listener, and cooldown after it
# The server sends a keep-alive at least every 15 s; a stream without one is dead.
SILENCE_S = 40.0
# The task list of a large fleet takes some tens of megabytes and some seconds.
LIST_BYTES_MAX, LIST_S = 512 * 2**20, 60.0
# Responses to writes are small; that to a heartbeat must arrive before the lease expires.
ANSWER_BYTES_MAX, ANSWER_TIMEOUTS = 32 * 2**20, 4

Json = dict[str, Any]
Read = TypeVar("Read")


class Link:
    """Connections to the API at a URL, with one token."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float,
        ca: str | Path | None,
        retries: int,
        pause: Callable[[Millis], None],
        transport: httpx.BaseTransport | None,
    ) -> None:
        self._url, self._retries, self._pause = url.rstrip("/"), retries, pause
        self._control = ""  # URL of the control plane's own listener, once a response has named it
        self._unreachable, self._unreachable_until_ms = "", 0
        if not _TOKEN.fullmatch(token):
            raise Refused(
                "the token is not valid",
                why="a token is one word of letters, digits, dashes and underscores",
                fix="check PENSTOCK_TOKEN, or the token file in the folder of `penstock up`",
            )
        try:
            self._http = httpx.Client(
                base_url=f"{self._url}/api/v1",
                headers={"Authorization": f"Bearer {token}"},
                timeout=timeout_s,
                transport=transport,
                trust_env=False,
                verify=_trust(self._url, ca or os.environ.get("PENSTOCK_CA") or None),
            )
        except httpx.InvalidURL as error:
            raise _not_a_url(self._url, str(error)) from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def json(self, method: str, path: str, *, body: Any = None, **kwargs: Any) -> Json:
        """Send a request whose response is a map. `repeat`: it is idempotent, and retried on failure."""
        if body is not None:
            headers = {"Content-Type": "application/json", **kwargs.pop("headers", {})}
            kwargs |= {"content": body if isinstance(body, bytes) else encoded(body), "headers": headers}
        return self._map(self.request(method, path, **kwargs))

    def json_if_changed(self, path: str, **kwargs: Any) -> Json | None:
        """A conditional GET whose response is a map; None: not modified."""
        response = self.request("GET", path, **kwargs)
        return None if response.status_code == 304 else self._map(response)

    def _map(self, response: httpx.Response) -> Json:
        answer = _read_json(response)
        if not isinstance(answer, dict):
            raise self._wrong_form(response)
        return answer

    def read(self, answer: Any, kind: type[Read]) -> Read:
        """Decode a response; unknown fields are ignored, because the server may be newer."""
        try:
            return read_message(answer, kind)
        except ValueError as error:
            raise self.misfit(str(error)) from error

    def misfit(self, why: str) -> StoreUnavailable:
        """The error for a JSON response of the wrong form."""
        return StoreUnavailable(
            f"the server at {self._url} does not answer like a control plane",
            why=why[:500],
            fix="check the URL, and that client and server run the same version",
        )

    def request(self, method: str, path: str, *, repeat: bool = False, **kwargs: Any) -> httpx.Response:
        """Send a request, with retries if `repeat`; raises the error of the last try."""
        pauses_ms = [RETRY_MS * 2**number for number in range(self._retries)] if repeat else []
        unknown: OutcomeUnknown | None = None
        for pause_ms in pauses_ms:
            try:
                return self._once(method, path, **kwargs)
            except OutcomeUnknown as error:
                unknown = error
                self._pause(pause_ms)
            except StoreUnavailable:
                self._pause(pause_ms)
            except _Busy as busy:
                self._pause(max(pause_ms, busy.retry_after_ms))
        try:
            return self._once(method, path, **kwargs)
        except _Busy as busy:
            raise busy.error from None
        except StoreUnavailable as error:
            # An earlier try may have been carried out, even if this one did not arrive.
            if unknown is not None and not isinstance(error, OutcomeUnknown):
                raise unknown from error
            raise

    def _once(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        response = self._send(method, path, **kwargs)
        if response.is_success or response.status_code == 304:
            return response
        error = self._problem(response)
        if response.status_code in (429, 503) and not isinstance(error, OutcomeUnknown):
            raise _Busy(error, _retry_after_ms(response))
        raise error

    def lines(self, path: str, params: Mapping[str, Any]) -> Iterator[Json]:
        """The data of server-sent events, as they arrive."""
        return self._stream(path, params, prefix="data: ", silence_s=SILENCE_S)

    def rows(self, path: str, params: Mapping[str, Any], *, wait_s: float) -> Iterator[Json]:
        """The lines of a response of any size, each a map; StoreUnavailable if it is incomplete."""
        return self._stream(path, params, prefix="", silence_s=wait_s)

    def _stream(
        self, path: str, params: Mapping[str, Any], *, prefix: str, silence_s: float
    ) -> Iterator[Json]:
        timeout = httpx.Timeout(self._http.timeout.connect, read=silence_s)
        try:
            with self._http.stream("GET", path, params=params, timeout=timeout) as response:
                if not response.is_success:
                    response.read()
                    raise self._problem(response)
                for line in response.iter_lines():
                    if line and line.startswith(prefix):
                        yield json.loads(line.removeprefix(prefix))
        except httpx.HTTPError as error:
            raise self._no_answer(error, StoreUnavailable) from error
        except ValueError as error:
            raise StoreUnavailable(
                f"the stream of {self._url}{path} is damaged", why=str(error), fix="repeat the request"
            ) from error

    def _send(self, method: str, path: str, *, to_control: bool = False, **kwargs: Any) -> httpx.Response:
        """`to_control`: send it to the control plane's own listener if it is known, else through the API."""
        response = self._ask_control(method, path, **kwargs) if to_control and self._control else None
        if response is None:
            response = self._exchange(method, path, **kwargs)
            self._note_control(response.headers.get(CONTROL_HEADER, ""))
        return response

    def _ask_control(self, method: str, path: str, **kwargs: Any) -> httpx.Response | None:
        """The response of the control plane's own listener; None: no connection, so nothing was sent."""
        limits = self._http.timeout
        timeout = httpx.Timeout(read=limits.read, write=limits.write, pool=limits.pool, connect=CONNECT_S)
        try:
            with self._http.stream(method, f"{self._control}{path}", timeout=timeout, **kwargs) as response:
                return self._whole(response, is_list=method == "GET")
        except (httpx.ConnectError, httpx.ConnectTimeout):
            self._unreachable, self._control = self._control, ""
            self._unreachable_until_ms = SystemClock().boot_ms() + UNREACHABLE_MS
            return None
        except httpx.HTTPError as error:
            raise self._no_answer(error, StoreUnavailable if method == "GET" else OutcomeUnknown) from error

    def _note_control(self, named: str) -> None:
        """Remember the control plane's listener: a port of the same host, or a URL that is no less safe."""
        try:
            is_port = named.startswith(":")
            url = httpx.URL(self._url).copy_with(port=int(named[1:])) if is_port else httpx.URL(named)
        except (httpx.InvalidURL, ValueError):
            return
        control = f"{str(url).rstrip('/')}/api/v1"
        is_safe = url.scheme == "https" or (url.scheme == "http" and self._url.startswith("http://"))
        is_known_bad = control == self._unreachable and SystemClock().boot_ms() < self._unreachable_until_ms
        if is_safe and not is_known_bad and (url.port or 1) < 2**16:
            self._control = control

    def _exchange(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            with self._http.stream(method, path, **kwargs) as response:
                return self._whole(response, is_list=method == "GET")
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise _not_a_url(self._url, str(error)) from error
        except httpx.HTTPError as error:
            # A read changed nothing; a write may have been carried out.
            raise self._no_answer(error, StoreUnavailable if method == "GET" else OutcomeUnknown) from error

    def _whole(self, response: httpx.Response, *, is_list: bool) -> httpx.Response:
        """The response with its body; an error if it is too large or takes too long."""
        body, clock = bytearray(), SystemClock()
        began_ms = clock.boot_ms()
        most = LIST_BYTES_MAX if is_list else ANSWER_BYTES_MAX
        longest_s = LIST_S if is_list else ANSWER_TIMEOUTS * (self._http.timeout.read or LIST_S)
        for piece in response.iter_bytes():
            body += piece
            took_s = (clock.boot_ms() - began_ms) / 1000
            if len(body) > most or took_s > longest_s:
                raise self.misfit(
                    f"its response with status {response.status_code} is too large or too slow: {len(body)} "
                    f"bytes in {took_s:.0f} s"
                )
        # The body is decoded already, so these headers no longer apply.
        left_out = ("content-encoding", "content-length", "transfer-encoding")
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in left_out]
        return httpx.Response(
            response.status_code, headers=headers, content=bytes(body), request=response.request
        )

    def _no_answer(self, error: httpx.HTTPError, kind: type[StoreUnavailable]) -> PenstockError:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return EnvironmentProblem(
                f"the certificate of {self._url} is not trusted",
                why=str(error),
                fix="name the file with its certificate authority in PENSTOCK_CA or --ca",
            )
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
            return StoreUnavailable(
                f"no control plane answers at {self._url}",
                why=str(error) or "the connection was refused",
                fix="start one with `penstock up`, or name another with PENSTOCK_URL",
            )
        return kind(
            f"the control plane at {self._url} did not answer in time",
            why=f"{type(error).__name__}: {error}",
            fix="repeat the request with the same idempotency key: it is carried out at most once",
        )

    def _problem(self, response: httpx.Response) -> PenstockError:
        problem = _read_json(response)
        if not isinstance(problem, dict):
            return self._wrong_form(response)
        return from_problem(problem, response.status_code)

    def _wrong_form(self, response: httpx.Response) -> StoreUnavailable:
        return StoreUnavailable(
            f"the server at {self._url} does not answer like a control plane",
            why=f"status {response.status_code}: {response.text[:200]!r}",
            fix="check the URL, and that client and server run the same version",
        )


def _read_json(response: httpx.Response) -> Any:
    """The body as JSON; None if it is not JSON."""
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return None


class _Busy(Exception):
    """The server refused the request for now, without carrying it out."""

    def __init__(self, error: PenstockError, retry_after_ms: Millis) -> None:
        super().__init__(str(error))
        self.error, self.retry_after_ms = error, retry_after_ms


def _trust(url: str, ca: str | Path | None) -> ssl.SSLContext | bool:
    if ca is None and url.startswith("http://"):
        # Without TLS the context is not used; loading the system's authorities would take 20 ms.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise EnvironmentProblem(
            "cannot use this certificate authority",
            why=f"{ca}: {error}",
            fix="name a file with certificates in PEM form in PENSTOCK_CA or --ca",
        ) from error


def _retry_after_ms(response: httpx.Response) -> Millis:
    text = response.headers.get("Retry-After", "")
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return min(int(text) * 1000, RETRY_AFTER_MS_MAX) if is_number else 0


def encoded(body: Any, *, errors: str = "strict") -> bytes:
    """A body as JSON; ConfigError if it cannot be encoded."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode(errors=errors)
    except (TypeError, ValueError) as error:
        raise not_text(error) from error


def not_text(error: Exception) -> ConfigError:
    """The error for a value that cannot be encoded."""
    return ConfigError(
        "the request cannot be encoded", why=str(error), fix="use UTF-8 text, finite numbers, lists and maps"
    )


def path_part(name: str) -> str:
    """A name as a path segment; ConfigError if it cannot be one."""
    if name in ("", ".", ".."):  # they would change the path
        raise ConfigError(f"{name!r} is not a valid name", why="no object has it", fix="give the full name")
    try:
        return quote(name, safe="")
    except UnicodeEncodeError as error:
        raise not_text(error) from error


def given(params: Mapping[str, Any]) -> Json:
    """The parameters that have a value."""
    return {name: value for name, value in params.items() if value is not None and value != []}


def _not_a_url(url: str, why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"not the URL of a control plane: {url!r}",
        why=why,
        fix="set PENSTOCK_URL to one like http://host:7337",
    )
