"""Which models there are, and the targets behind each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gateway.router.breaker import CircuitBreaker
from plugins.errors import ModelNotFound
from plugins.interfaces import Objective, Principal, Provider, ProviderSettings


@dataclass(slots=True)
class Target:
    """One "provider/upstream model" of a route. Targets live through a reload, so breakers keep what they know."""

    name: str
    provider: Provider
    settings: ProviderSettings
    upstream_model: str
    breaker: CircuitBreaker


@dataclass(frozen=True, slots=True)
class Route:
    """What one model name stands for."""

    model: str
    targets: tuple[Target, ...]
    policy: str = "ordered"
    objective: Objective = Objective()


class Routes:
    """The table from model name to route. Replaced whole on a reload, so a request sees one version."""

    def __init__(
        self,
        providers: Mapping[str, tuple[ProviderSettings, Provider]],
        clock: Callable[[], float],
    ) -> None:
        self._providers = providers
        self._clock = clock
        self._targets: dict[str, Target] = {}
        self._routes: dict[str, Route] = {}

    def load(self, models: Iterable[tuple[str, tuple[str, ...], str, Objective]]) -> None:
        """Set the table from (name, targets, policy, objective). Target names are "provider/upstream model"."""
        self._routes = {
            name: Route(name, tuple(self._target(target) for target in targets), policy, objective)
            for name, targets, policy, objective in models
        }

    def find(self, model: str, principal: Principal) -> Route:
        """Raises ModelNotFound also where the caller may not use it: what exists is nobody else's business."""
        route = self._routes.get(model)
        if route is None or not principal.may_use(model):
            raise ModelNotFound(
                f"The model `{model[:200]}` does not exist or you do not have access to it."
            )
        return route

    def models_of(self, principal: Principal) -> list[str]:
        return [name for name in self._routes if principal.may_use(name)]

    def open_breakers(self) -> list[str]:
        """Targets that are passed over now."""
        return [name for name, target in self._targets.items() if target.breaker.is_open]

    def any_ready(self) -> bool:
        return any(t.provider.ready() for route in self._routes.values() for t in route.targets)

    def _target(self, name: str) -> Target:
        if name not in self._targets:
            provider_name, _, upstream_model = name.partition("/")
            settings, provider = self._providers[provider_name]
            breaker = CircuitBreaker(name, settings.breaker, self._clock)
            self._targets[name] = Target(name, provider, settings, upstream_model, breaker)
        return self._targets[name]
