"""Secrets of the file: a plain string, { env = "NAME" } or { file = "PATH" }; a client key may be its SHA-256."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from gateway.config_faults import nearest
from gateway.config_schema import KeyDigest
from plugins.secrets import Secret

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
MAX_SECRET_BYTES = 64 * 1024


class SecretFault(Exception):
    """Why a secret cannot be had; names the variable or file, never the value. `key` is a wrong key of its table."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


def resolve_secret(written: Any, base_dir: Path, environ: Mapping[str, str]) -> Secret:
    """Raises SecretFault."""
    if isinstance(written, str):
        return _usable(written, "config", "the value")
    source, name = _reference(written, ("env", "file"))
    if source == "env":
        if name not in environ:
            raise SecretFault(f"environment variable {name} is not set")
        return _usable(environ[name], f"env {name}", f"environment variable {name}")
    return _usable(_read(base_dir / name, name), f"file {name}", f"file {name}")


def resolve_key(written: Any, base_dir: Path, environ: Mapping[str, str]) -> KeyDigest:
    """A client key's digest. Raises SecretFault."""
    if isinstance(written, dict) and "sha256" in written:
        _, digest = _reference(written, ("env", "file", "sha256"))
        if not _SHA256.fullmatch(digest):
            raise SecretFault("must be 64 hex digits", key="sha256")
        return KeyDigest(bytes.fromhex(digest))
    if isinstance(written, dict):
        _reference(written, ("env", "file", "sha256"))
    value = resolve_secret(written, base_dir, environ).reveal()
    return KeyDigest(hashlib.sha256(value.encode()).digest())


def _reference(written: Any, known: tuple[str, ...]) -> tuple[str, str]:
    """The one key and value of a secret's table."""
    forms = ", ".join(f'{{ {key} = "..." }}' for key in known)
    if not isinstance(written, dict):
        raise SecretFault(f"must be a string or one of {forms}")
    table = cast("dict[str, Any]", written)
    for key in table:
        if key not in known:
            raise SecretFault(f"unknown key{nearest(key, known)}", key=key)
    if len(table) != 1:
        raise SecretFault(f"must be a string or exactly one of {forms}")
    [(key, value)] = table.items()
    if not isinstance(value, str) or not value or "\0" in value:
        raise SecretFault("must be a string that is not empty", key=key)
    return key, value


def _read(path: Path, name: str) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SECRET_BYTES + 1).decode()
    except OSError as exc:
        raise SecretFault(f"file {name}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SecretFault(f"file {name}: is not UTF-8 text") from exc
    return text.removesuffix("\n").removesuffix("\r")


def _usable(value: str, source: str, who: str) -> Secret:
    if not value:
        raise SecretFault(f"{who} is empty")
    if len(value) > MAX_SECRET_BYTES:
        raise SecretFault(f"{who} is longer than {MAX_SECRET_BYTES} bytes")
    if value != value.strip() or any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise SecretFault(f"{who} has a line break, control character or white space around it")
    return Secret(value, source)
