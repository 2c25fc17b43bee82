"""Requests of our vocabulary -> bodies of chat, completions and embeddings, for requests that came in another form."""

from __future__ import annotations

import msgspec

from plugins.events import EmbeddingForm, Json, Request, ResponseFormat, Sampling, Tool, ToolChoice
from plugins.providers.openai_messages import encode_messages

_encode = msgspec.json.Encoder().encode
_OWN_DIALECTS = ("chat", "completions", "embeddings")


def encode_request(request: Request, upstream_model: str) -> bytes:
    """Every field that is set, and none that is not. Fields that only the client's dialect knows are left out."""
    own = request.dialect in _OWN_DIALECTS
    body: Json = {"model": upstream_model}
    if request.dialect == "embeddings":
        body["input"] = _one_or_all(request.prompts)
        body |= _embedding(request.embedding)
    elif request.dialect == "completions":
        body["prompt"] = _one_or_all(request.prompts)
        body |= _sampling(request.sampling) | _completions_sampling(request.sampling)
    else:
        body["messages"] = encode_messages(request.messages, keep_cache_control=own)
        body |= (
            _sampling(request.sampling)
            | _chat_sampling(request.sampling)
            | _chat_fields(request, own)
        )
    body |= _about_the_caller(request)
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if own:
        body = {**request.extra, **body}
    return _encode(body)


def _given(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def _sampling(sampling: Sampling) -> Json:
    return _given(
        {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": sampling.n if sampling.n != 1 else None,
            "seed": sampling.seed,
            "stop": sampling.stop or None,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": sampling.logit_bias,
            # Not OpenAI's, but what vLLM, SGLang, llama.cpp and others take by these names.
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "min_tokens": sampling.min_tokens,
            "stop_token_ids": sampling.stop_token_ids or None,
            "ignore_eos": True if sampling.ignore_eos else None,
        }
    )


def _chat_sampling(sampling: Sampling) -> Json:
    if not sampling.logprobs:
        return {}
    return {"logprobs": True, "top_logprobs": sampling.top_logprobs}


def _completions_sampling(sampling: Sampling) -> Json:
    return _given(
        {
            "logprobs": sampling.top_logprobs if sampling.logprobs else None,
            "echo": True if sampling.echo else None,
            "best_of": sampling.best_of,
        }
    )


def _embedding(form: EmbeddingForm) -> Json:
    asked = form.encoding_format if form.encoding_format != "float" else None  # the default
    return _given({"encoding_format": asked, "dimensions": form.dimensions})


def _chat_fields(request: Request, own: bool) -> Json:
    fields: Json = {"reasoning_effort": request.reasoning_effort}
    if request.tools:
        fields["tools"] = [_tool(tool, own) for tool in request.tools]
        fields["parallel_tool_calls"] = request.parallel_tool_calls
        if request.tool_choice is not None:
            fields["tool_choice"] = _tool_choice(request.tool_choice, request.tools)
    if request.response_format is not None:
        fields |= _response_format(request.response_format)
    return _given(fields)


def _about_the_caller(request: Request) -> Json:
    return _given(
        {
            "user": request.user,
            "metadata": request.metadata,
            "service_tier": request.service_tier,
        }
    )


def _tool(tool: Tool, keep_cache_control: bool) -> Json:
    extra = dict(tool.extra or {})
    cache_control = extra.pop("cache_control", None)
    payload = _given({"name": tool.name, "description": tool.description})
    if tool.kind == "custom":
        payload |= extra
    else:
        payload |= _given({"parameters": tool.parameters, "strict": tool.strict})
    encoded: Json = {"type": tool.kind, tool.kind: payload}
    if keep_cache_control and cache_control:
        encoded["cache_control"] = cache_control
    return encoded


def _tool_choice(choice: ToolChoice, tools: list[Tool]) -> str | Json:
    kinds = {tool.name: tool.kind for tool in tools}
    named = [
        {"type": kinds.get(name, "function"), kinds.get(name, "function"): {"name": name}}
        for name in choice.names
    ]
    if choice.mode == "named" and named:
        return named[0]
    if choice.mode == "allowed":
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.allowed_mode, "tools": named},
        }
    return choice.mode


def _response_format(wanted: ResponseFormat) -> Json:
    """Regular expressions and grammars have no place in OpenAI's field; vLLM has one for them."""
    if wanted.kind in ("regex", "grammar"):
        return {"structured_outputs": {wanted.kind: wanted.pattern}}
    if wanted.kind != "json_schema":
        return {"response_format": {"type": wanted.kind}}
    schema = _given(
        {
            "name": wanted.name or "response",
            "description": wanted.description,
            "schema": wanted.schema,
            "strict": wanted.strict,
        }
    )
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _one_or_all(prompts: list[str | list[int]]) -> str | list[int] | list[str | list[int]]:
    return prompts[0] if len(prompts) == 1 else prompts
