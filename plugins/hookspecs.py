"""Every hook, typed; the docstring is the contract.

Hooks collect: each is called once per plugin at start and hands over objects. The request path walks plain tuples of
those objects, in the order of `plugins.enabled`, so a hook that nobody uses costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pluggy

from plugins.interfaces import Observer, ProviderType, RequestFilter, TransformFactory

hookspec = pluggy.HookspecMarker("tidegate")
hookimpl = pluggy.HookimplMarker("tidegate")


@hookspec
def register_provider_types(register: Callable[[ProviderType], None]) -> None:
    """Add values for `type` in `[[providers]]`. A name that is taken already refuses the start."""


@hookspec
def register_filters(
    register: Callable[[RequestFilter], None], settings: Mapping[str, Any]
) -> None:
    """Add request filters. They run in the order of registration, inside the order of `plugins.enabled`.

    `settings` is the plugin's own table, `[plugins.NAME]`, without Tidegate's keys `on_error` and `timeout_s`. Raise
    `ValueError` with a sentence to refuse the start because of it.
    """


@hookspec
def register_transforms(
    register: Callable[[TransformFactory], None], settings: Mapping[str, Any]
) -> None:
    """Add factories of stream transforms: called once per request; None means "not for this one"."""


@hookspec
def register_observers(register: Callable[[Observer], None], settings: Mapping[str, Any]) -> None:
    """Add observers of finished requests. They run off the request's path; a slow one loses records, counted."""
