"""GET /v1/models and /v1/models/{id}: the models that the caller's key may use."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from gateway.auth import Authenticator
from gateway.router.routes import Routes


class ModelsEndpoint:
    def __init__(self, routes: Routes, authenticator: Authenticator, created_s: int) -> None:
        self.authenticator = authenticator
        self._routes = routes
        self._created_s = created_s

    async def list_models(self, request: HTTPRequest) -> Response:
        principal = self.authenticator.check(request.scope["headers"])
        data = [self._model(name) for name in self._routes.models_of(principal)]
        return _json({"object": "list", "data": data})

    async def retrieve(self, request: HTTPRequest) -> Response:
        """Raises ModelNotFound. Ids may hold slashes; the client percent-encodes them."""
        principal = self.authenticator.check(request.scope["headers"])
        route = self._routes.find(request.path_params["model"], principal)
        return _json(self._model(route.model))

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._created_s, "owned_by": "tidegate"}


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
