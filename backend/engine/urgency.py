"""What the four classes mean to the scheduler: how soon a request is due, and how long it may stand still.

Online classes (interactive, standard) have somebody waiting at the other end; background work (flex, batch) takes what
they leave. Nobody starves: whoever has not moved for its class's patience becomes the one *guest*, who is served like
an interactive request until it ends. One at a time, so a long backlog never turns into a crowd of urgent requests.
"""

from __future__ import annotations

from backend.engine.params import Objective, RequestClass

# Seconds from arrival to the first token where the request brings no objective of its own.
_TTFT_S = {
    RequestClass.INTERACTIVE: 0.5,
    RequestClass.STANDARD: 2.0,
    RequestClass.FLEX: 60.0,
    RequestClass.BATCH: 600.0,
}
# Seconds without a computed token after which a request may become the guest.
PATIENCE_S = {
    RequestClass.INTERACTIVE: float("inf"),  # nothing is better: its own order protects it
    RequestClass.STANDARD: 10.0,
    RequestClass.FLEX: 60.0,
    RequestClass.BATCH: 300.0,
}
AGEING_INTERVAL_S = 1.0  # how often the scheduler looks for a guest


def is_online(klass: RequestClass) -> bool:
    return klass <= RequestClass.STANDARD


def deadline_s(arrival_s: float, klass: RequestClass, objective: Objective) -> float:
    """When the first token is due, on the engine's clock."""
    if objective.ttft_ms is None:
        return arrival_s + _TTFT_S[klass]
    return arrival_s + objective.ttft_ms / 1000
