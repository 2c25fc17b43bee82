"""URL spellings that clients really use, brought to one: with or without /v1, doubled or trailing slashes."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

API_ROOTS = frozenset({"chat", "completions", "models", "embeddings", "responses", "messages"})


def canonical_path(path: str) -> str:
    """`//v1/v1/chat/completions/` -> `/v1/chat/completions`; paths outside the API lose only spare slashes."""
    parts = [part for part in path.split("/") if part]
    rest = parts
    while rest and rest[0] == "v1":
        rest = rest[1:]
    if rest and rest[0] in API_ROOTS:
        return "/v1/" + "/".join(rest)
    return "/" + "/".join(parts)


class CanonicalPaths:
    """Rewrites the path before routing, so that no redirect turns a POST into a GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = canonical_path(scope["path"])
        await self._app(scope, receive, send)
