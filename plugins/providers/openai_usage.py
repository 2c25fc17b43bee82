"""Token counts of OpenAI-shaped answers, normalised once."""

from __future__ import annotations

from typing import Any

from plugins.events import Usage
from plugins.providers.lenient_json import a_count, an_object


def read_usage(value: Any) -> Usage | None:
    """Token counts, wherever a server puts the details. A missing count is what the total leaves."""
    usage = an_object(value)
    prompt = a_count(usage, "prompt_tokens", "input_tokens")
    completion = a_count(usage, "completion_tokens", "output_tokens")
    total = a_count(usage, "total_tokens")
    if prompt is None and completion is None and total is None:
        return None
    if completion is None:
        completion = max(0, (total or 0) - (prompt or 0))
    prompt_details = an_object(usage.get("prompt_tokens_details"))
    details = an_object(usage.get("completion_tokens_details"))
    cached = a_count(prompt_details, "cached_tokens")
    if cached is None:
        cached = a_count(usage, "prompt_cache_hit_tokens", "cached_tokens")
    return Usage(
        prompt_tokens=max(0, (total or 0) - completion) if prompt is None else prompt,
        completion_tokens=completion,
        cached_tokens=cached or 0,
        cache_write_tokens=a_count(prompt_details, "cache_write_tokens") or 0,
        reasoning_tokens=a_count(details, "reasoning_tokens") or 0,
        accepted_prediction_tokens=a_count(details, "accepted_prediction_tokens") or 0,
        rejected_prediction_tokens=a_count(details, "rejected_prediction_tokens") or 0,
    )
