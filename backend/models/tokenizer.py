"""Text to token ids and back, exact to the byte, over the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from tokenizers import Tokenizer as Core


class TokenType(Enum):
    NORMAL = "normal"  # a piece of text
    USER_DEFINED = "user_defined"  # text that is always one token
    SPECIAL = "special"  # control: adds nothing to the text
    BYTE = "byte"  # one raw byte, written <0xNN>


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Every token as the file spells it, and how that spelling stands for bytes ("byte_level" or "spm")."""

    tokens: Sequence[str]
    types: Sequence[TokenType]
    spelling: str


class Tokenizer:
    """Encodes and decodes; threads may share it.

    Args:
        core: the library's tokenizer; special tokens in the text are recognized.
        build_plain: makes the same tokenizer without its special tokens, for text that must not be able to form one.
        space_prefix: one space is put before the text on encoding, and taken away again on decoding.
    """

    def __init__(
        self,
        core: Core,
        vocabulary: Vocabulary,
        build_plain: Callable[[], Core],
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        space_prefix: bool = False,
    ) -> None:
        self._core, self._build_plain = core, build_plain
        self._prefix, self._suffix = list(prefix), list(suffix)
        self._space_prefix = space_prefix
        self._tokens = vocabulary.tokens
        self._special = frozenset(
            i for i, kind in enumerate(vocabulary.types) if kind is TokenType.SPECIAL
        )
        self._bytes = _all_bytes(vocabulary)
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)

    @cached_property
    def _plain(self) -> Core:
        return self._build_plain()

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        `add_special` puts the model's own begin (and end) tokens around it, never a second begin token; rendered
        chat templates bring theirs along and must not ask. `parse_special=False` takes "<|im_end|>" as plain letters.
        """
        core = self._core if parse_special else self._plain
        # Lone surrogates cannot be encoded; the replacement character is what any UTF-8 writer would send.
        clean = text.encode("utf-8", "replace").decode() if not text.isascii() else text
        ids: list[int] = core.encode(clean, add_special_tokens=False).ids
        if not add_special:
            return ids
        has_begin = bool(self._prefix) and ids[: len(self._prefix)] == self._prefix
        return [*([] if has_begin else self._prefix), *ids, *self._suffix]

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; b"" for special tokens and ids past the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        """For display: special tokens by name, a part of a character as the replacement character."""
        if token_id in self._special:
            return self._tokens[token_id]
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of a whole sequence."""
        raw = b"".join(self._shown_bytes(i, skip_special) for i in ids)
        if self._space_prefix and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode("utf-8", "replace")

    def _shown_bytes(self, token_id: int, skip_special: bool) -> bytes:
        if not skip_special and token_id in self._special:
            return self._tokens[token_id].encode()
        return self.token_bytes(token_id)


def _all_bytes(vocabulary: Vocabulary) -> list[bytes]:
    of_normal = _byte_level_bytes if vocabulary.spelling == "byte_level" else _spm_bytes
    by_type: dict[TokenType, Callable[[str], bytes]] = {
        TokenType.NORMAL: of_normal,
        TokenType.USER_DEFINED: _spm_bytes if vocabulary.spelling == "spm" else str.encode,
        TokenType.SPECIAL: lambda token: b"",
        TokenType.BYTE: lambda token: bytes([int(token[3:5], 16)]),
    }
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return [by_type[kind](token) for token, kind in pairs]


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the other 68 for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # added by hand, in plain letters
        return token.encode()


def _spm_bytes(token: str) -> bytes:
    return token.replace("▁", " ").encode()
