"""Chat bodies as clients send them."""

from __future__ import annotations

import json
from typing import Any

from gateway.endpoints.chat import ChatEndpoint
from plugins.events import Request

USER = {"role": "user", "content": "hi"}
OPTIONAL_FIELDS = [
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "temperature",
    "top_p",
    "n",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "response_format",
    "user",
    "parallel_tool_calls",
    "metadata",
    "service_tier",
    "functions",
    "function_call",
    "reasoning_effort",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "store",
    "chat_template_kwargs",
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def chat_request(**fields: Any) -> Request:
    body = {"model": "m", "messages": [USER]} | fields
    return ChatEndpoint().decode(json.dumps(body).encode(), "req_1", 0.0)
