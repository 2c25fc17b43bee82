"""Every key we keep in the store, and for how long. `Store.key` puts the configured prefix before each.

What one script touches shares a hash tag, the part in braces, so that a cluster keeps it on one node.
"""

from __future__ import annotations

USAGE_ROWS = "{usage}:rows"  # stream: one usage row an entry
USAGE_MAX_ROWS = 500_000  # about, 500 bytes each; the oldest go first
USAGE_CURSOR_TTL_S = (
    86_400  # how long a batch of usage rows may wait for its retry and still be written once
)


def usage_cursor(writer: str) -> str:
    """String: number of the last batch that this writer has in the stream."""
    return f"{{usage}}:cursor:{writer}"
