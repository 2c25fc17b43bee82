"""Error bodies of OpenAI-shaped servers, in all their forms, as one `UpstreamError` that is fit to be shown."""

from __future__ import annotations

import email.utils
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from plugins.errors import UpstreamError, UpstreamUnavailable
from plugins.events import Json
from plugins.secrets import Secret, redact

MAX_MESSAGE_CHARS = 2000
MAX_WORD_CHARS = 200
_NO_SUCH_PATH = ("Not Found", "File Not Found")  # of FastAPI and vLLM, of llama-server
_KEY_LIKE = re.compile(
    r"\b(?:sk|pk|rk|key|gsk|xai|hf)[-_][\w*.…-]{3,}|[\w-]*\*{3,}[\w*-]*|(?i:bearer)\s+[\w.~+/=*-]+"
)


class ErrorReader:
    """Reads the errors of one provider. `hidden` are texts that no message may show: its keys and its address."""

    def __init__(self, name: str, secrets: list[Secret], wall_clock: Callable[[], float]) -> None:
        self._name = name
        self._secrets = secrets
        self._wall_clock = wall_clock

    def from_answer(
        self, status: int, headers: Mapping[bytes, bytes], body: bytes
    ) -> UpstreamError:
        """An answer with an error status. A body that is not JSON (a proxy's HTML page) is not shown."""
        if 300 <= status < 400:
            return UpstreamUnavailable(
                f"provider {self._name}: answered with a redirect (status {status}); check its base_url"
            )
        try:
            document: Any = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            document = None
        error = self.from_document(document, status)
        error.retry_after_s = self._retry_after_s(headers)
        return error

    def from_document(self, document: Any, status: int | None = None) -> UpstreamError:
        """An error that stands in a body. `status` None: the answer itself said 200, its error tells."""
        fields = _fields(document)
        status = _error_status(status) or _error_status(fields.get("code")) or 502
        if status in (401, 403):  # about our own key; the text may hold a part of it
            return self._refused(status)
        message = fields.get("message")
        text = self._clean(message) if isinstance(message, str) and message.strip() else ""
        return UpstreamError(
            text or f"provider {self._name}: answered with an error and status {status}",
            param=self._word(fields.get("param")),
            code=self._word(fields.get("code")),
            type=self._word(fields.get("type")) or _type_of(status),
            status=status,
        )

    def _refused(self, status: int) -> UpstreamError:
        what = (
            "refused the gateway's credentials"
            if status == 401
            else "does not permit this to the gateway"
        )
        return UpstreamError(
            f"provider {self._name}: {what} (status {status})",
            code="upstream_refused",
            status=status,
        )

    def _clean(self, text: str) -> str:
        return _KEY_LIKE.sub("***", redact(text, self._secrets))[:MAX_MESSAGE_CHARS]

    def _word(self, value: Any) -> str | None:
        """A text, a number as text, or None; as clean as the message, for an echo may stand in any field."""
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        return self._clean(value)[:MAX_WORD_CHARS] if isinstance(value, str) and value else None

    def _retry_after_s(self, headers: Mapping[bytes, bytes]) -> float | None:
        """`retry-after-ms` first, as OpenAI's clients do; then seconds or an HTTP date (RFC 9110, 10.2.3)."""
        milliseconds = _number(headers.get(b"retry-after-ms"))
        if milliseconds is not None:
            return milliseconds / 1000
        value = headers.get(b"retry-after")
        seconds = _number(value)
        if seconds is not None or value is None:
            return seconds
        try:
            when = email.utils.parsedate_to_datetime(value.decode("latin-1"))
            return max(0.0, when.timestamp() - self._wall_clock())
        except (ValueError, OverflowError):
            return None


def no_embeddings(error: UpstreamError) -> UpstreamError:
    """What a server answers that has models for text only: no such path, or not made. Then the request is at fault.

    An error that names a model or a parameter says something else, and stays.
    """
    if error.status in (405, 501) or (error.status == 404 and error.message in _NO_SUCH_PATH):
        return UpstreamError(
            f"this model gives no embeddings: {error.message}",
            param="model",
            code="unsupported_parameter",
            type="invalid_request_error",
            status=400,
        )
    return error


def is_error(document: Json, event: str = "message") -> bool:
    """Whether a JSON object in a body or a stream says that something failed."""
    if document.get("error") or event == "error":
        return True
    return document.get("object") == "error" or document.get("type") == "error"


def _fields(document: Any) -> Json:
    """Where message, type, param and code stand: under `error`, at the top, in a list of one, as a bare text."""
    if isinstance(document, list) and document:
        document = cast(list[Any], document)[0]
    if not isinstance(document, dict):
        return {}
    body = cast(Json, document)
    error = body.get("error")
    if isinstance(error, dict):
        return cast(Json, error)
    if isinstance(error, str):
        return {**body, "message": error}
    if "message" not in body and "detail" in body:
        return {"message": _detail(body["detail"])}
    return body


def _detail(detail: Any) -> str:
    """FastAPI's form: a text, or a list of findings."""
    if isinstance(detail, str):
        return detail
    findings: list[Any] = cast(list[Any], detail) if isinstance(detail, list) else []
    texts = [cast(Json, finding).get("msg") for finding in findings if isinstance(finding, dict)]
    return "; ".join(text for text in texts if isinstance(text, str))


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _error_status(value: Any) -> int | None:
    """An HTTP error status, as number or text; None for anything else."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value[:4])
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 400 <= value <= 599 else None


def _number(value: bytes | None) -> float | None:
    try:
        number = float(value) if value is not None else None
    except ValueError:
        return None
    return number if number is not None and 0 <= number < 1e9 else None
