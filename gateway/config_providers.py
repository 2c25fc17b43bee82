"""One `[[providers]]` table against its type: keys that the type takes, paths, URLs, and the type's own check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.config_faults import At, Faults, nearest
from plugins.interfaces import ProviderSettings, ProviderType

_EVERY_TYPE = frozenset({"name", "type", "timeout", "max_parallel"})
_ENGINE_KEYS = _EVERY_TYPE | {"path", "template", "engine"}
_HTTP_KEYS = _EVERY_TYPE | {"base_url", "api_key", "headers", "max_retries", "breaker"}

KEYS_OF_TYPE: Mapping[str, frozenset[str]] = {
    "engine": _ENGINE_KEYS,
    **dict.fromkeys(("openai", "anthropic", "gemini", "openai_compatible"), _HTTP_KEYS),
}
"""What the built-in types take, so that a key without effect is refused. A plugin's type may read any key."""


class ProviderChecks:
    def __init__(self, types: Mapping[str, ProviderType], base_dir: Path, faults: Faults) -> None:
        self._types = types
        self._base_dir = base_dir
        self._faults = faults

    def complete(
        self, settings: ProviderSettings, given: Mapping[str, Any], at: At
    ) -> ProviderSettings:
        """The settings as they will be used; faults are noted. `given` is the table as it was written."""
        if "/" in settings.name:
            self._faults.add((*at, "name"), 'must not have a "/": targets are split there')
        provider_type = self._types.get(settings.type)
        if provider_type is None:
            known = ", ".join(sorted(self._types))
            message = f'unknown type "{settings.type}"; known: {known}'
            self._faults.add((*at, "type"), message + nearest(settings.type, self._types))
            return settings
        for key in given.keys() - KEYS_OF_TYPE.get(settings.type, given.keys()):
            message = f'a provider of type "{settings.type}" does not take this key'
            self._faults.add((*at, key), message)
        settings = self._with_defaults(settings, provider_type.default_base_url)
        self._check_places(settings, given, at)
        self._ask_type(provider_type, settings, at)
        return settings

    def _with_defaults(self, settings: ProviderSettings, base_url: str) -> ProviderSettings:
        """The type's own base_url where none is given; relative paths start at the config file."""
        path, template = settings.path, settings.template
        return replace(
            settings,
            base_url=(settings.base_url or base_url).rstrip("/"),
            path=str(self._base_dir / path) if _is_local(path) else path,
            template=str(self._base_dir / template) if template else "",
        )

    def _check_places(self, settings: ProviderSettings, given: Mapping[str, Any], at: At) -> None:
        if settings.type == "engine" and not settings.path:
            self._faults.add((*at, "path"), "required")
        if _is_local(settings.path) and not Path(settings.path).exists():
            self._faults.add((*at, "path"), f'no such file or folder: "{given["path"]}"')
        if settings.template and not Path(settings.template).is_file():
            self._faults.add((*at, "template"), f'no such file: "{given["template"]}"')
        if settings.base_url and not _is_http_url(settings.base_url):
            message = "must be http://HOST... or https://HOST..., without user, query or fragment"
            self._faults.add((*at, "base_url"), message)

    def _ask_type(self, provider_type: ProviderType, settings: ProviderSettings, at: At) -> None:
        try:
            found = provider_type.check(settings)
        except Exception as exc:  # a plugin's own code: what it raises becomes one line
            found = [f"type: the check of {settings.type} failed: {type(exc).__name__}: {exc}"]
        for fault in found:
            key, _, message = fault.partition(": ")
            place = (*at, *key.split("."))
            if not self._faults.touch(place):
                self._faults.add(place, message)


def _is_local(path: str) -> bool:
    return bool(path) and path != "demo" and not path.startswith("hub:")


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError where it is no port
    except ValueError:
        return False
    clean = parts.username is None and not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and clean
