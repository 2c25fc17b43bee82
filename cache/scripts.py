"""The Lua that runs in the store, each script one atomic step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Script:
    """A script, called by the SHA-1 of its source. The store learns the source when it does not know it."""

    name: str
    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


APPEND_USAGE = Script(
    "append_usage",
    """
-- Append one batch of rows, once: a batch whose number the writer's cursor has reached is skipped.
-- KEYS: rows (stream), cursor (string). ARGV: batch number, cursor TTL in s, cap of the stream, rows...
-- Returns the number of rows appended.
if tonumber(ARGV[1]) <= tonumber(redis.call('GET', KEYS[2]) or '0') then return 0 end
for i = 4, #ARGV do
    redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', 'row', ARGV[i])
end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2])
return #ARGV - 3
""",
)
