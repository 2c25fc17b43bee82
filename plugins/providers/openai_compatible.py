"""`type = "openai_compatible"`: any server that speaks OpenAI's chat, completions or embeddings API over HTTP.

Between same dialects bytes pass through in both directions; everything else is translated by way of events. What the
upstream really sent decides how it is read, not what was asked for.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress

from plugins.errors import UpstreamError, UpstreamUnavailable
from plugins.events import Dialect, Event, Request, has_content
from plugins.hookspecs import hookimpl
from plugins.interfaces import Call, ProcessSpec, Provider, ProviderSettings, ProviderType, Runtime
from plugins.providers.http_client import HTTPClient
from plugins.providers.http_message import header_fault, header_lines, parse_base_url
from plugins.providers.http_response import Response
from plugins.providers.openai_body import rewrite_body
from plugins.providers.openai_errors import ErrorReader, no_embeddings
from plugins.providers.openai_reader import AnswerFormat, shape_of
from plugins.providers.openai_request import encode_request
from plugins.providers.openai_stream import StreamReader
from plugins.secrets import Secret

PATHS: Mapping[Dialect, str] = {"completions": "/completions", "embeddings": "/embeddings"}
CHAT_PATH = "/chat/completions"
MAX_ANSWER_BYTES = 128 * 1024 * 1024  # 2048 embeddings of 3072 numbers as text are 75 MB
MAX_ERROR_BYTES = 256 * 1024
GRACE_S = (
    5.0  # for what may be left out: the text of an error, the usage after the last choice has ended
)


class OpenAICompatible:
    """One `[[providers]]` table of this type, in one event loop."""

    dialects: frozenset[Dialect] = frozenset({"chat", "completions", "embeddings"})
    embeds = True

    def __init__(
        self, settings: ProviderSettings, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.name = settings.name
        self._settings = settings
        self._base_url = parse_base_url(settings.base_url)
        self._wall_clock = wall_clock
        self._headers = header_lines(_headers(settings))
        hidden = [Secret(self._base_url.authority)]
        hidden += [value for value in settings.headers.values() if len(value.reveal()) >= 8]
        if settings.api_key is not None:
            hidden.append(settings.api_key)
        self._errors = ErrorReader(self.name, hidden, wall_clock)
        self._client: HTTPClient | None = None

    async def start(self) -> None:
        self._client = HTTPClient(self.name, self._base_url, self._settings.timeout)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def ready(self) -> bool:
        return self._client is not None

    def stats(self) -> Mapping[str, float]:
        return {} if self._client is None else self._client.stats()

    async def stream(self, request: Request, call: Call) -> AsyncGenerator[list[Event], None]:
        """See `Provider.stream`. Raises UpstreamError, UpstreamUnavailable or UpstreamTimeout."""
        response = await self._send(request, call)
        try:
            if not 200 <= response.status < 300:
                raise await self._error(request, response)
            answer = AnswerFormat(self.name, request, call, self._errors, self._wall_clock)
            start = await _first_bytes(response)
            shape = shape_of(start, response.headers)
            if shape == "json":
                yield answer.read_body(start + await response.read(MAX_ANSWER_BYTES))
            elif shape == "stream":
                limit = (
                    None if request.stream else MAX_ANSWER_BYTES
                )  # a whole answer is held as one
                batches = StreamBatches(response, answer.stream_reader(), start, limit)
                while batch := await batches.next():
                    yield batch
            else:
                raise answer.unusable()
        finally:
            response.close()

    async def _send(self, request: Request, call: Call) -> Response:
        if self._client is None:
            raise UpstreamUnavailable(f"provider {self.name}: is not started")
        if call.verbatim and request.body:
            body = rewrite_body(request, call.upstream_model)
        else:
            body = encode_request(request, call.upstream_model)
        headers = self._headers
        if request.id.isascii() and request.id.isprintable():
            headers += b"X-Request-ID: %b\r\n" % request.id.encode()
        timeout = self._settings.timeout
        # A whole answer begins when all of it is there: only a stream has a first token to wait for.
        first_byte_s = timeout.first_token_s if request.stream else timeout.total_s
        path = PATHS.get(request.dialect, CHAT_PATH)
        return await self._client.request("POST", path, headers, body, first_byte_s)

    async def _error(self, request: Request, response: Response) -> UpstreamError:
        body = b""
        response.expect_end(GRACE_S)
        with suppress(UpstreamError):  # the status says enough
            body = await response.read(MAX_ERROR_BYTES)
        error = self._errors.from_answer(response.status, response.headers, body)
        return no_embeddings(error) if request.dialect == "embeddings" else error


async def _first_bytes(response: Response) -> bytes:
    """The beginning of the body up to its first visible byte: some servers send blanks while they think."""
    data = b""
    while not data.strip(b" \t\r\n\xef\xbb\xbf"):
        piece = await response.next()
        if not piece:
            break
        data += piece
        if len(data) > MAX_ERROR_BYTES:
            break
    return data


class StreamBatches:
    """Events of a streamed answer, batch by batch: what arrived together stays together."""

    __slots__ = ("_flowing", "_in_grace", "_limit", "_num_bytes", "_reader", "_response", "_start")

    def __init__(
        self, response: Response, reader: StreamReader, start: bytes, limit: int | None
    ) -> None:
        self._response = response
        self._reader = reader
        self._start = start
        self._limit = limit  # of bytes in all
        self._num_bytes = 0
        self._flowing = False  # content has come: from here on gaps are measured
        self._in_grace = False

    async def next(self) -> list[Event]:
        """The next batch; [] after the last. Raises what ended the answer, once all before it was given."""
        reader = self._reader
        if self._flowing:
            self._response.progressed()  # only now: a client that reads slowly is not the upstream's fault
        while reader.failure is None and not reader.done:
            events = await self._read(reader)
            if events:
                self._flowing = self._flowing or has_content(events)
                return events
        if reader.failure is not None:
            raise reader.failure
        self._response.discard()
        return []

    async def _read(self, reader: StreamReader) -> list[Event]:
        data, self._start = self._start, b""
        if data:
            return reader.feed(data)
        if not self._in_grace and reader.only_usage_is_missing:
            self._in_grace = True
            self._response.expect_end(GRACE_S)
        try:
            data = await self._response.next()
        except UpstreamError as broken:
            return reader.end(broken)
        self._num_bytes += len(data)
        if self._limit is not None and self._num_bytes > self._limit:
            raise UpstreamUnavailable(f"the answer is larger than {self._limit} bytes")
        return reader.feed(data) if data else reader.end()


def _headers(settings: ProviderSettings) -> Mapping[str, str]:
    """Ours, and over them those of the configuration, whatever their case."""
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "Accept-Encoding": "identity",
        "User-Agent": "tidegate",
    }
    if settings.api_key is not None:
        headers["Authorization"] = f"Bearer {settings.api_key.reveal()}"
    configured = {name.lower() for name in settings.headers}
    ours = {name: value for name, value in headers.items() if name.lower() not in configured}
    return ours | {name: value.reveal() for name, value in settings.headers.items()}


class OpenAICompatibleType:
    name = "openai_compatible"
    default_base_url = ""

    def check(self, settings: ProviderSettings) -> list[str]:
        faults: list[str] = []
        try:
            parse_base_url(settings.base_url)
        except ValueError as exc:
            faults.append(f"base_url: {exc}" if settings.base_url else "base_url: required")
        for name, value in settings.headers.items():
            if fault := header_fault(name, value.reveal()):
                faults.append(f"headers.{name}: {fault}")
        key = settings.api_key
        if key is not None and header_fault("Authorization", f"Bearer {key.reveal()}"):
            faults.append("api_key: has a character that no header may carry")
        if settings.options:
            faults.append("options: not used by this type")
        return faults

    def prepare(self, settings: ProviderSettings, runtime: Runtime) -> None:
        """Nothing to fetch."""

    def processes(self, settings: ProviderSettings, runtime: Runtime) -> list[ProcessSpec]:
        return []

    def build(self, settings: ProviderSettings, runtime: Runtime) -> Provider:
        return OpenAICompatible(settings)


@hookimpl
def register_provider_types(register: Callable[[ProviderType], None]) -> None:
    register(OpenAICompatibleType())
