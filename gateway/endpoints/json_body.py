"""Bytes of a request body -> a typed Struct, and the fields that the Struct does not know.

The common body takes one typed decode that refuses unknown fields. Everything else (unknown fields, 3.0 where an
integer is wanted, any fault) takes a second, untyped decode, from which all of those are told apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from gateway.endpoints.decode_findings import Finding
from gateway.endpoints.openai_validation import invalid_value, malformed
from plugins.errors import InvalidRequest
from plugins.events import Json

MAX_DEPTH = 100
"""Nesting of a body. Decoders recurse, and so do those who write it again for a provider: far below their limit."""

_MAX_INNER_DEPTH = MAX_DEPTH - 2  # below the body and one of its lists
_BOM = b"\xef\xbb\xbf"
_untyped = msgspec.json.Decoder()
_top_level = msgspec.json.Decoder(dict[str, Raw])
_elements = msgspec.json.Decoder(list[Raw])
_T = TypeVar("_T", bound=Struct)


def without_bom(body: bytes) -> bytes:
    return body[3:] if body.startswith(_BOM) else body


class BodyReader(Generic[_T]):
    """Reads bodies of one shape. Where a key stands twice, the last one holds.

    `long_list` names the list of objects from which most brackets of a long body come.
    """

    def __init__(self, shape: type[_T], long_list: str = "") -> None:
        exact = msgspec.defstruct(shape.__name__, [], bases=(shape,), forbid_unknown_fields=True)
        self._shape = shape
        self._long_list = long_list
        self._exact: msgspec.json.Decoder[Any] = msgspec.json.Decoder(exact)
        self._names = frozenset(shape.__struct_fields__)

    def read(self, body: bytes) -> tuple[_T, Json]:
        """The body, and its unknown top-level fields without those that are null.

        Raises:
            InvalidRequest: not UTF-8, not JSON, no object, nested deeper than MAX_DEPTH, or not of this shape.
        """
        try:
            return self._read(body)
        except RecursionError:
            raise _too_deep() from None
        except UnicodeDecodeError as exc:
            raise malformed(f"byte {exc.start} is not UTF-8") from None
        except msgspec.DecodeError as exc:  # ValidationError too: a number too large for any type
            why = str(exc).partition(" - at ")[0]  # the place is lost in an untyped decode
            raise malformed(why if body else "the body is empty") from None

    def _read(self, body: bytes) -> tuple[_T, Json]:
        if not body.isascii():
            body.decode()  # the decoder does not look into strings that it skips
        extra: Json = {}
        try:
            known: _T = self._exact.decode(body)
        except msgspec.ValidationError:
            known, extra = self._read_untyped(body)
        check_depth(body, self._num_siblings(known))
        return known, extra

    def _num_siblings(self, known: _T) -> int:
        siblings = getattr(known, self._long_list) if self._long_list else None
        return len(siblings) - 1 if siblings else 0

    def _read_untyped(self, body: bytes) -> tuple[_T, Json]:
        document = _untyped.decode(body)
        while True:
            try:
                read = msgspec.convert(document, self._shape, str_keys=True)
                break
            except msgspec.ValidationError as exc:
                finding = Finding(exc, document)
                if not _mend(finding):
                    raise finding.error() from None
        names = self._names
        return read, {k: v for k, v in document.items() if k not in names and v is not None}


def _mend(finding: Finding) -> bool:
    """Write an integer where a decimal without a fraction stands for one (`"max_tokens": 3.0`)."""
    value = finding.value
    if not isinstance(value, float) or "`int" not in finding.reason:
        return False
    if not value.is_integer() or abs(value) >= 2**53:
        return False
    finding.replace(int(value))
    return True


# -- Depth -----------------------------------------------------------------------------------------------------------


def check_depth(body: bytes, num_siblings: int = 0) -> None:
    """Raise InvalidRequest where a JSON object is nested deeper than MAX_DEPTH.

    No text is deeper than its opening brackets are many, less those of `num_siblings` objects known to stand side by
    side. So most bodies need not be looked into.
    """
    if not _has_more_openings(body, MAX_DEPTH + num_siblings):
        return
    for name, field in _top_level.decode(body).items():
        if _has_more_openings(bytes(field), _MAX_INNER_DEPTH):
            for element in _split(field):
                if _has_more_openings(bytes(element), _MAX_INNER_DEPTH) and _is_deep(element):
                    raise _too_deep(name)


def _has_more_openings(text: bytes, limit: int) -> bool:
    """Counts opening brackets as far as need be. `find` leaps, `bytes.count` would look at each byte."""
    for bracket in (b"{", b"["):
        at = text.find(bracket)
        while at >= 0:
            if limit == 0:
                return True
            limit -= 1
            at = text.find(bracket, at + 1)
    return False


def _split(field: Raw) -> Iterable[Raw]:
    return _elements.decode(field) if bytes(field).startswith(b"[") else (field,)


def _is_deep(element: Raw) -> bool:
    level = _containers([_untyped.decode(element)])
    for _ in range(_MAX_INNER_DEPTH):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return False
    return True


def _containers(outer: Any) -> list[Any]:
    inner = cast(Json, outer).values() if isinstance(outer, dict) else outer
    return [value for value in inner if isinstance(value, dict | list)]


def _too_deep(name: str | None = None) -> InvalidRequest:
    why = f"nested more than {MAX_DEPTH} levels deep"
    return malformed(f"it is {why}") if name is None else invalid_value(name, f"{why}.")
