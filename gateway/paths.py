"""URL spellings that clients really use, brought to one: with or without /v1, spare slashes."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

API_ROOTS = frozenset({"chat", "completions", "models", "embeddings", "responses", "messages"})


def canonical_path(path: str) -> str:
    """`//chat/completions/` -> `/v1/chat/completions`; a doubled /v1 stays: a wrong base URL should show."""
    parts = [part for part in path.split("/") if part]
    rest = parts[1:] if parts[:1] == ["v1"] else parts
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
