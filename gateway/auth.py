"""Client key -> Principal. Keys are known as SHA-256 digests only, and are compared in constant time."""

from __future__ import annotations

import hashlib
import hmac

from gateway.config import AuthConfig, KeyConfig
from plugins.errors import AuthenticationFailed
from plugins.interfaces import Principal

Headers = list[tuple[bytes, bytes]]
"""As ASGI gives them: lower-case names."""

MAX_KEY_BYTES = 4096  # a longer one is refused before it is hashed
OPEN = Principal("open")
NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header"
    " using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
)


class Authenticator:
    """Checks the key of each request. With mode "open" every caller is the principal `open`, whatever it sends."""

    def __init__(self, auth: AuthConfig) -> None:
        self._is_open = auth.mode == "open"
        self._principals = {key.key.sha256: (key.key.sha256, _principal(key)) for key in auth.keys}

    def check(self, headers: Headers) -> Principal:
        """The caller behind `Authorization: Bearer KEY` or `x-api-key: KEY`; Bearer wins where both are sent.

        Raises:
            AuthenticationFailed: no key, or one that is not known; its message shows a key masked.
        """
        if self._is_open:
            return OPEN
        key = _bearer_key(headers)
        if not key:
            error = AuthenticationFailed(NO_KEY)
            error.code = None
            raise error
        if len(key) <= MAX_KEY_BYTES:
            digest = hashlib.sha256(key).digest()
            known, principal = self._principals.get(digest, (b"", OPEN))
            if hmac.compare_digest(known, digest):
                return principal
        raise AuthenticationFailed(f"Incorrect API key provided: {masked(key)}.")


def masked(key: bytes) -> str:
    """The first five and last two characters of a key that is long enough to stay secret so."""
    text = key[:5] + b"***" + key[-2:]
    shown = len(key) >= 16 and text.isascii() and text.decode("latin-1").isprintable()
    return text.decode("ascii") if shown else "***"


def _bearer_key(headers: Headers) -> bytes:
    api_key = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, credential = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return credential.strip()
        elif name == b"x-api-key":
            api_key = api_key or value.strip()
    return api_key


def _principal(key: KeyConfig) -> Principal:
    return Principal(key.name, None if "*" in key.models else frozenset(key.models), key.limits)
