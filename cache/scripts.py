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
-- Append one batch of rows, once: a batch that the writer's cursor has reached is skipped, and so is one that would
-- leave a gap, for the store may have lost its last seconds in a crash. Returns the cursor (the last batch it has)
-- and 1 where it took this one now.
-- KEYS: rows (stream), cursor (string). ARGV: batch number, "1" = a gap before it is all right, cursor TTL in s,
-- cap of the stream, rows...
local number, cursor = tonumber(ARGV[1]), tonumber(redis.call('GET', KEYS[2]) or '0')
if number <= cursor or (number > cursor + 1 and ARGV[2] ~= '1') then return {cursor, 0} end
for i = 5, #ARGV do
    redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[4], '*', 'row', ARGV[i])
end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[3])
return {number, 1}
""",
)
