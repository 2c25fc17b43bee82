"""Build every part once and name every route. The only place where concrete classes meet."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route as HTTPRoute
from starlette.types import Receive, Scope, Send

from cache.responses import NoResponseCache
from cache.store import Store
from gateway.accounting import Accounting, RequestMeter
from gateway.auth import Authenticator
from gateway.config import Config
from gateway.endpoints.chat import ChatEndpoint
from gateway.endpoints.completions import CompletionsEndpoint
from gateway.endpoints.embeddings import EmbeddingsEndpoint
from gateway.endpoints.health import Readiness
from gateway.endpoints.inference import InferenceEndpoint, new_request_id
from gateway.endpoints.models import ModelsEndpoint
from gateway.errors import error_headers, openai_error_body
from gateway.filters import FilterChain
from gateway.limits import LocalLimiter
from gateway.paths import CanonicalPaths
from gateway.pipeline import Pipeline
from gateway.queues.online import OnlineQueue
from gateway.router.dispatch import Dispatcher
from gateway.router.routes import Routes
from gateway.telemetry import Telemetry
from plugins.errors import GatewayError, MethodNotAllowed, NotFound
from plugins.events import Request
from plugins.interfaces import Objective, Principal, Provider, ProviderSettings, Runtime

log = logging.getLogger("tidegate")
USAGE_TIMEOUT_MS = 2000


class Gateway:
    """All parts of one gateway process."""

    def __init__(self, config: Config, runtime: Runtime, store_url: str) -> None:
        clock = time.monotonic
        parts = config.parts
        self.providers: dict[str, tuple[ProviderSettings, Provider]] = {
            settings.name: (settings, parts.provider_types[settings.type].build(settings, runtime))
            for settings in config.providers
        }
        self.routes = Routes(self.providers, clock)
        self.queue = OnlineQueue(config.queue.max_waiting, config.queue.max_wait_s)
        self.store = Store(store_url, config.store.timeout_ms)
        self.telemetry = Telemetry([model.name for model in config.models])
        # Nobody waits for usage rows, and a busy event loop takes long to read even a quick reply.
        self.usage_store = Store(store_url, max(config.store.timeout_ms, USAGE_TIMEOUT_MS))
        self.accounting = Accounting(self.usage_store, parts.observers, self.telemetry)
        only_providers = {name: provider for name, (_, provider) in self.providers.items()}
        self.readiness = Readiness(only_providers, self.routes.any_ready, clock)
        self.telemetry.observe(
            only_providers, self.store, self.accounting, self.routes.open_breakers
        )
        self.pipeline = Pipeline(
            limiter=LocalLimiter(clock),
            filters=FilterChain(parts.filters),
            transforms=tuple(parts.transforms),
            response_cache=NoResponseCache(),
            routes=self.routes,
            dispatcher=Dispatcher(self.queue, asyncio.sleep, random.Random()),
            open_meter=self._open_meter,
        )
        max_body_bytes = config.server.max_body_mb * 2**20
        authenticator = Authenticator(config.auth)
        self.models = ModelsEndpoint(self.routes, authenticator, int(time.time()))
        self.inference = {
            f"/v1/{path}": InferenceEndpoint(
                dialect, self.pipeline, authenticator, max_body_bytes, self.telemetry.refuse
            )
            for path, dialect in (
                ("chat/completions", ChatEndpoint()),
                ("completions", CompletionsEndpoint()),
                ("embeddings", EmbeddingsEndpoint()),
            )
        }
        self._load_routes(config)

    def reload(self, config: Config) -> None:
        """Take over keys, limits and models. The supervisor has refused a config in which anything else changed."""
        self._load_routes(config)
        self.telemetry.set_models([model.name for model in config.models])
        authenticator = Authenticator(config.auth)
        for endpoint in (self.models, *self.inference.values()):
            endpoint.authenticator = authenticator

    def _load_routes(self, config: Config) -> None:
        self.routes.load(
            (m.name, tuple(m.targets), m.policy, Objective(m.slo.ttft_ms, m.slo.tpot_ms))
            for m in config.models
        )

    def _open_meter(self, request: Request, principal: Principal) -> RequestMeter:
        return RequestMeter(request, principal, self.accounting)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Start what runs beside requests; stop in reverse order."""
        async with AsyncExitStack() as stack:
            await self.store.start()
            stack.push_async_callback(self.store.aclose)
            stack.push_async_callback(self.usage_store.aclose)
            await self.accounting.start()
            stack.push_async_callback(self.accounting.aclose)
            for _, provider in self.providers.values():
                await provider.start()
                stack.push_async_callback(provider.aclose)
            yield


def create_app(config: Config, runtime: Runtime, store_url: str) -> Starlette:
    """The ASGI application of one gateway process; `app.state.gateway` is its `Gateway`."""
    gateway = Gateway(config, runtime, store_url)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        async with gateway.running():
            yield

    async def metrics(request: HTTPRequest) -> Response:
        body, content_type = gateway.telemetry.render()
        return Response(body, media_type=content_type)

    routes = [HTTPRoute(path, endpoint) for path, endpoint in gateway.inference.items()]
    routes += [
        HTTPRoute("/v1/models", gateway.models.list_models),
        HTTPRoute("/v1/models/{model:path}", gateway.models.retrieve),
        HTTPRoute("/livez", gateway.readiness.livez),
        HTTPRoute("/readyz", gateway.readiness.readyz),
    ]
    if config.telemetry.metrics:
        routes.append(HTTPRoute("/metrics", metrics))
    app = Application(
        routes=routes,
        middleware=_middleware(config),
        exception_handlers={GatewayError: _gateway_error, HTTPException: _http_exception},
        lifespan=lifespan,
    )
    if not config.server.cors_origins:
        app.direct = gateway.inference
    app.state.gateway = gateway
    return app


class Application(Starlette):
    """The endpoints that ask a model stand before starlette's layers: they answer every failure themselves.

    The layers and the router take 30 us of a request. Odd spellings of a path and all other routes pass through them.
    """

    direct: Mapping[str, InferenceEndpoint] = MappingProxyType({})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.direct.get(scope["path"]) if scope["type"] == "http" else None
        await (super().__call__ if endpoint is None else endpoint)(scope, receive, send)


def _middleware(config: Config) -> list[Middleware]:
    layers = [Middleware(CanonicalPaths)]
    if config.server.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.server.cors_origins),
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "openai-processing-ms"],
            max_age=86400,
        )
        layers.append(cors)
    return layers


def _gateway_error(request: HTTPRequest, exc: Exception) -> Response:
    assert isinstance(exc, GatewayError)
    headers = {k.decode(): v.decode() for k, v in error_headers(exc)}
    headers["x-request-id"] = new_request_id()
    return Response(openai_error_body(exc), exc.status, headers, "application/json")


def _http_exception(request: HTTPRequest, exc: Exception) -> Response:
    """Starlette's own 404 and 405, in the envelope."""
    assert isinstance(exc, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    if exc.status_code == 405:
        return _gateway_error(request, MethodNotAllowed(f"Not allowed to {where}."))
    return _gateway_error(request, NotFound(f"Invalid URL ({where})"))
