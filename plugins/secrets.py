"""Secrets as handles: they print as ***, so that no log, trace or error can carry the value by accident."""

from __future__ import annotations


class Secret:
    """A resolved secret. `reveal()` is called only where the value leaves for its owner."""

    __slots__ = ("_value", "source")

    def __init__(self, value: str, source: str = "config") -> None:
        self._value = value
        self.source = source  # where it came from, for messages: "env OPENAI_API_KEY", "file key.txt", "config"

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


def redact(text: str, secrets: list[Secret]) -> str:
    """`text` with every secret's value blanked: for texts that others wrote, such as an upstream's error."""
    for secret in secrets:
        value = secret.reveal()
        if len(value) >= 4:  # shorter ones would blank ordinary words
            text = text.replace(value, "***")
    return text
