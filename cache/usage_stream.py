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

    async def append(self, number: int, rows: Sequence[UsageRecord]) -> None:
        """Write batch `number` (1, 2, ...) of this writer; a batch that is there already is not written again.

        Raises:
            StoreUnavailable: it may or may not be there. Send the very same rows under the same number again, and no
                later number before.
        """
        arguments = [number, USAGE_CURSOR_TTL_S, self._max_rows, *map(_encoder.encode, rows)]
        await self._store.run(APPEND_USAGE, [self._rows_key, self._cursor_key], arguments)

    async def read(self, after: str = "", count: int = 1000) -> list[tuple[str, UsageRecord]]:
        """Up to `count` rows in the order of writing, each with its id. `after`: the last id seen, "" for the start.

        Raises:
            StoreUnavailable: nothing was read.
        """
        start = f"({after}" if after else "-"
        entries = await self._store.call("XRANGE", self._rows_key, start, "+", "COUNT", count)
        return [(id_.decode(), _decoder.decode(fields[1])) for id_, fields in entries]
