"""A prompt of completions, an input of embeddings: a text or token ids, one of them or a list of them."""

from __future__ import annotations

from gateway.endpoints.generation_body import TokenId
from gateway.endpoints.openai_validation import empty_array, invalid_type, missing

TextOrIds = str | list[str | TokenId | list[TokenId]]


def read_text_or_ids(name: str, value: TextOrIds | None) -> list[str | list[int]]:
    """One entry each. Raises InvalidRequest, in which entry number 3 is called `name[3]`."""
    if value is None:
        raise missing(name)
    if isinstance(value, str):
        return [value]
    if not value:
        raise empty_array(name)
    tokens = [entry for entry in value if isinstance(entry, int)]
    if len(tokens) == len(value):
        return [tokens]
    entries = [entry for entry in value if not isinstance(entry, int)]
    if tokens or len({type(entry) for entry in entries}) > 1:
        expected = "strings only, token ids only or arrays of token ids only"
        raise invalid_type(name, f"an array of {expected}", value)
    for i, entry in enumerate(entries):
        if entry == []:
            raise empty_array(f"{name}[{i}]")
    return entries
