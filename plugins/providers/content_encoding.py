"""Take gzip and deflate off a body piece by piece, a bounded amount at a time."""

from __future__ import annotations

import zlib

PIECE_BYTES = 256 * 1024
MAX_INFLATED_BYTES = 512 * 1024 * 1024
_GZIP_OR_ZLIB = 47  # wbits: 15 + 32, zlib finds out which of the two
_RAW = -15


class BrokenEncoding(Exception):
    """The body is not what its content-encoding says, or grows without end; the message says which."""


class Inflater:
    """`push` compressed bytes, `pull` plain ones until there are none; never holds more than one piece of them."""

    __slots__ = ("_full", "_inflate", "_input", "_num_inflated", "_started")

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._input = b""
        self._full = False
        self._started = False
        self._num_inflated = 0

    @property
    def complete(self) -> bool:
        """Whether the compressed stream came to its own end: else the body was cut."""
        return self._inflate.eof or not self._started

    def push(self, data: bytes) -> None:
        self._input += data

    def pull(self) -> bytes:
        """Up to PIECE_BYTES of plain bytes; b"" when more input is needed.

        Raises:
            BrokenEncoding: the bytes make no sense, or there are more than MAX_INFLATED_BYTES of them.
        """
        while self._input or self._full:
            piece = self._step()
            self._full = len(piece) == PIECE_BYTES  # zlib may hold a little more without more input
            if piece:
                self._num_inflated += len(piece)
                if self._num_inflated > MAX_INFLATED_BYTES:
                    raise BrokenEncoding(
                        f"more than {MAX_INFLATED_BYTES} bytes after decompression"
                    )
                return piece
        return b""

    def _step(self) -> bytes:
        if self._inflate.eof:  # gzip allows several members in a row
            self._inflate = zlib.decompressobj(_GZIP_OR_ZLIB)
        try:
            piece = self._inflate.decompress(self._input, PIECE_BYTES)
        except zlib.error as exc:
            if self._started:
                raise BrokenEncoding("compressed bytes that cannot be read") from exc
            self._started = True
            self._inflate = zlib.decompressobj(
                _RAW
            )  # "deflate" from servers that leave out zlib's frame
            return self._step()
        self._started = True
        self._input = (
            self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
        )
        return piece
