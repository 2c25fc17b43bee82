"""What an HTTP/1.1 request is made of: base URL and header lines, checked once (RFC 9110, RFC 9112, RFC 3986)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(r"(?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?")
_TARGET = re.compile(r"[\x21-\x7e]*")
_OURS = frozenset(
    [
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "te",
        "trailer",
        "upgrade",
        "expect",
    ]
)


@dataclass(frozen=True, slots=True)
class BaseURL:
    """Where a provider lives. Nothing of it belongs into a message for clients."""

    tls: bool
    host: str  # as the resolver and TLS want it: no brackets, IDNA
    port: int
    path: str  # without "/" at its end
    query: str

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            host
            if self.port == _DEFAULT_PORTS["https" if self.tls else "http"]
            else f"{host}:{self.port}"
        )

    def target(self, path: str) -> str:
        """Request target of `path` below the base, the base's own query kept."""
        return f"{self.path}{path}?{self.query}" if self.query else self.path + path


def parse_base_url(text: str) -> BaseURL:
    """Raises ValueError with a sentence that holds no part of the URL, which may carry a secret."""
    try:
        parts = urlsplit(text)
        port = parts.port
        host = (
            (parts.hostname or "").encode("idna").decode()
            if ":" not in (parts.hostname or "")
            else parts.hostname
        )
    except ValueError as exc:
        raise ValueError("not a valid URL") from exc
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError("must begin with http:// or https://")
    if not host:
        raise ValueError("has no host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold credentials; use api_key or headers")
    if parts.fragment:
        raise ValueError("must not hold a fragment (#...)")
    if not _TARGET.fullmatch(parts.path + parts.query):
        raise ValueError("has characters that must be percent-encoded")
    return BaseURL(
        tls=parts.scheme == "https",
        host=host,
        port=_DEFAULT_PORTS[parts.scheme] if port is None else port,
        path=parts.path.rstrip("/"),
        query=parts.query,
    )


def header_fault(name: str, value: str) -> str | None:
    """Why this header cannot be sent, or None. Never tells the value."""
    if not _TOKEN.fullmatch(name):
        return "not a header name"
    if name.lower() in _OURS:
        return "is set by the gateway itself"
    if not _VALUE.fullmatch(value):
        return "its value has a character that no header may carry, or blanks around it"
    return None


def header_lines(headers: Mapping[str, str]) -> bytes:
    """`Name: value` lines, each with its CRLF.

    Raises:
        ValueError: a name or value that could break out of its line.
    """
    lines: list[str] = []
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"header {name!r}: {header_fault(name, value) or 'cannot be sent'}")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode("latin-1")
