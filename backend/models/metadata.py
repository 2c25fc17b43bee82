"""Typed look-ups in a model's settings; a missing or mistyped key names itself and its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.models.errors import ModelLoadError


class Metadata:
    """The settings of a config.json or a GGUF header. None counts as absent; every error is a ModelLoadError."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._typed(key, default, int))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, default, (int, float)))

    def optional_number(self, key: str) -> float | None:
        """None: absent, or 0, which writers of softcaps and windows use for none."""
        return self.number(key, 0.0) or None

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.unexpected(key)
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        return self._typed(key, default, str)

    def part(self, key: str) -> Metadata:
        """The object under that key; an absent one is empty."""
        return Metadata(self._typed(key, {}, Mapping), self.source)

    def listed(self, key: str, kind: type, length: int | None = None) -> list[Any] | None:
        """A list of that kind (and length); None when absent."""
        values = self._typed(key, (), (list, tuple)) if self.values.get(key) is not None else None
        if values is None:
            return None
        if length not in (None, len(values)) or not all(isinstance(v, kind) for v in values):
            raise self.unexpected(key)
        return list(values)

    def refuse(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {what} is not supported")

    def unexpected(self, key: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.source}: {key} has the unexpected value {self.values[key]!r:.60}"
        )

    def _typed(self, key: str, default: Any, kind: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelLoadError(f"{self.source}: {key} is missing from the model's metadata")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise self.unexpected(key)
        return value
