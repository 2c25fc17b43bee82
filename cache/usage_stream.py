"""Usage rows in a stream of the store, each exactly once however often a batch has to be sent."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from cache.keys import USAGE_CURSOR_TTL_S, USAGE_MAX_ROWS, USAGE_ROWS, usage_cursor
from cache.scripts import APPEND_USAGE
from cache.store import Store
from plugins.interfaces import UsageRecord

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(UsageRecord)


class UsageStream:
    """One writer of the stream, and a reader of all of it."""

    def __init__(self, store: Store, max_rows: int = USAGE_MAX_ROWS) -> None:
        self._store = store
        self._max_rows = max_rows
        self._rows_key = store.key(USAGE_ROWS)
        self._cursor_key = store.key(usage_cursor(uuid.uuid4().hex))

    async def append(
        self, number: int, rows: Sequence[UsageRecord], *, after_gap: bool = False
    ) -> tuple[int, bool]:
        """Write batch `number` (1, 2, ...) of this writer; one that is there already is not written again.

        Returns the number of the last batch that the store has, and whether it took this one now. Less than `number`:
        it lost some in a crash and did not take this one; send the lost ones first, or say `after_gap` where they are
        not kept any more.

        Raises:
            StoreUnavailable: it may or may not be there. Send the very same rows under the same number again.
        """
        head: list[int | bytes] = [number, int(after_gap), USAGE_CURSOR_TTL_S, self._max_rows]
        arguments = [*head, *map(_encoder.encode, rows)]
        stored, taken = await self._store.run(
            APPEND_USAGE, [self._rows_key, self._cursor_key], arguments
        )
        return stored, bool(taken)

    async def read(self, after: str = "", count: int = 1000) -> list[tuple[str, UsageRecord]]:
        """Up to `count` rows in the order of writing, each with its id. `after`: the last id seen, "" for the start.

        Raises:
            StoreUnavailable: nothing was read.
        """
        start = f"({after}" if after else "-"
        entries = await self._store.call("XRANGE", self._rows_key, start, "+", "COUNT", count)
        return [(id_.decode(), _decoder.decode(fields[1])) for id_, fields in entries]
