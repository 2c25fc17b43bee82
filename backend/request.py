"""From the gateway's request to the engine's `Generate`: what the engine cannot do is refused here, with its name."""

from __future__ import annotations

from typing import Any

from backend.answer_form import grammar_spec
from backend.engine.params import EmbeddingParams, Objective, RequestClass, SamplingParams
from backend.protocol import Generate
from plugins.errors import InvalidRequest, Unsupported
from plugins.events import (
    Media,
    Message,
    Part,
    Reasoning,
    Refusal,
    Request,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)

MAX_CHOICES = 128
NO_OBJECTIVE = Objective()
MAX_URGENT_INPUTS = 16  # texts to embed in one request; more are a bulk, which lets chats go first
# Top-level fields that change what is generated, and that we cannot honour yet. Others we do not know are harmless.
_TEMPLATE_ARGUMENTS = frozenset(
    ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")
)
_REFUSED_FIELDS = (
    "suffix",
    "functions",
    "function_call",
    "web_search_options",
    "audio",
    "use_beam_search",
)


def to_generate(
    request: Request, tenant: str = "", objective: Objective = NO_OBJECTIVE
) -> Generate:
    """Prefix-cache blocks are shared within `tenant` only: what another has cached shows in the time to first token.

    Raises:
        InvalidRequest, Unsupported: with `param`.
    """
    if request.dialect == "embeddings":
        return _to_embed(request, tenant, objective)
    _refuse(request)
    sampling = request.sampling
    generate = Generate(
        0,  # set by the connection it goes out on
        _params(sampling),
        n=sampling.n,
        best_of=sampling.best_of or 0,
        klass=RequestClass[request.klass.upper()],
        objective=objective,
        cache_salt=_cache_salt(request, tenant),
        echo=sampling.echo,
        grammar=grammar_spec(request),
    )
    if request.dialect == "completions":
        generate.prompts = request.prompts
        return generate
    messages = request.messages
    if not messages:
        raise InvalidRequest("messages is empty: it needs at least one message", param="messages")
    generate.messages = template_messages(messages)
    if tools := usable_tools(request):
        generate.tools = [_template_tool(tool, i) for i, tool in enumerate(tools)]
        generate.must_call = _must_call(request.tool_choice, tools)
        named = request.tool_choice is not None and request.tool_choice.mode == "named"
        generate.parallel_calls = request.parallel_tool_calls is not False and not named
    generate.continue_final_message = messages[-1].role == "assistant"
    generate.template_kwargs = _template_kwargs(request)
    return generate


def _to_embed(request: Request, tenant: str, objective: Objective) -> Generate:
    klass = RequestClass[request.klass.upper()]
    if len(request.prompts) > MAX_URGENT_INPUTS:
        klass = max(klass, RequestClass.FLEX)
    return Generate(
        0,
        SamplingParams(),
        prompts=request.prompts,
        klass=klass,
        objective=objective,
        cache_salt=_cache_salt(request, tenant),
        embedding=EmbeddingParams(request.embedding.dimensions),
    )


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates know them: `content` is a string, tool results are messages of their own."""
    out: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        _refuse_media(message, i)
        results = [part for part in message.parts if isinstance(part, ToolResult)]
        out += [_tool_message(result) for result in results]
        if len(results) < len(message.parts) or not message.parts:
            out.append(_plain_message(message))
    return out


def _plain_message(message: Message) -> dict[str, Any]:
    parts = message.parts
    entry: dict[str, Any] = {"role": message.role, "content": _joined_text(parts)}
    if message.name is not None:
        entry["name"] = message.name
    if reasoning := "".join(part.text for part in parts if isinstance(part, Reasoning)):
        entry["reasoning_content"] = reasoning
    if calls := [_template_call(part) for part in parts if isinstance(part, ToolCall)]:
        entry["tool_calls"] = calls
    return entry


def _tool_message(result: ToolResult) -> dict[str, Any]:
    entry = {
        "role": "tool",
        "tool_call_id": result.tool_call_id,
        "content": _joined_text(list(result.parts)),
    }
    if result.name is not None:
        entry["name"] = result.name
    return entry


def _joined_text(parts: list[Part]) -> str:
    return "\n".join(part.text for part in parts if isinstance(part, Text | Refusal))


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Arguments stay JSON text: the chat template parses them where it wants an object."""
    function = {"name": call.name, "arguments": call.arguments or "{}"}
    return {"id": call.id, "type": "function", "function": function}


def _template_tool(tool: Tool, index: int) -> dict[str, Any]:
    if tool.kind != "function":
        message = f"tools[{index}].type: this model takes functions only, got {tool.kind}"
        raise Unsupported(message, param=f"tools[{index}].type")
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def _template_kwargs(request: Request) -> dict[str, Any]:
    kwargs = request.extra.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise InvalidRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    taken = _TEMPLATE_ARGUMENTS & kwargs.keys()
    if taken:
        message = f"chat_template_kwargs cannot set {', '.join(sorted(taken))}"
        raise InvalidRequest(message, param="chat_template_kwargs")
    if request.reasoning_effort is not None:
        return {"reasoning_effort": request.reasoning_effort, **kwargs}
    return dict(kwargs)


def _params(sampling: Sampling) -> SamplingParams:
    """None means "the default" on both sides; ranges are the engine's to check."""
    given = {
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logit_bias=sampling.logit_bias or None,
        logprobs=sampling.top_logprobs if sampling.logprobs else None,
        prompt_logprobs=_prompt_logprobs(sampling),
        **{name: value for name, value in given.items() if value is not None},
    )


def _prompt_logprobs(sampling: Sampling) -> int | None:
    """`echo` with max_tokens 0 computes the prompt and nothing more, even when nobody asks for its logprobs."""
    if sampling.prompt_logprobs or (sampling.echo and sampling.logprobs):
        return sampling.top_logprobs
    return 0 if sampling.echo and sampling.max_tokens == 0 else None


def _cache_salt(request: Request, tenant: str) -> bytes:
    salt = request.extra.get("cache_salt", "")
    if not isinstance(salt, str):
        raise InvalidRequest("cache_salt must be a string", param="cache_salt")
    return f"{tenant}\0{salt}".encode()


def _refuse_media(message: Message, index: int) -> None:
    for part in message.parts:
        inner = part.parts if isinstance(part, ToolResult) else [part]
        for media in inner:
            if isinstance(media, Media):
                param = f"messages[{index}].content"
                text = f"{param} holds an {media.kind} part; this model reads text only"
                raise InvalidRequest(text.replace("an file", "a file"), param=param)


def _refuse(request: Request) -> None:
    sampling = request.sampling
    if not 1 <= sampling.n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}, got {sampling.n}", param="n")
    _check_best_of(request)
    if sampling.prompt_logprobs and not sampling.echo:
        raise _unsupported("prompt_logprobs", "come with the prompt's text; set echo to true")
    if sampling.max_tokens == 0 and not sampling.echo:
        message = "max_tokens must be at least 1, got 0; only with echo may it be 0"
        raise InvalidRequest(message, param="max_tokens")
    for name in _REFUSED_FIELDS:
        if request.extra.get(name):
            raise _unsupported(name, "is not supported by this model")


def _check_best_of(request: Request) -> None:
    n, best_of = request.sampling.n, request.sampling.best_of
    if best_of is None or best_of == n:
        return
    if not n <= best_of <= MAX_CHOICES:
        message = f"best_of must be between n, which is {n}, and {MAX_CHOICES}, got {best_of}"
        raise InvalidRequest(message, param="best_of")
    if request.stream:
        message = "best_of above n cannot stream: which choices are best shows at their end"
        raise InvalidRequest(message, param="best_of")


def usable_tools(request: Request) -> list[Tool]:
    """Those that the model may call; it is told of no others."""
    choice = request.tool_choice
    if choice is None or choice.mode in ("auto", "required", "named"):
        return request.tools
    if choice.mode == "none":
        return []
    return [tool for tool in request.tools if tool.name in choice.names]


def _must_call(choice: ToolChoice | None, tools: list[Tool]) -> list[str]:
    """One of these; empty: the model may as well answer."""
    if choice is None:
        return []
    if choice.mode == "named":
        return choice.names
    required = choice.mode == "required" or choice.allowed_mode == "required"
    return [tool.name for tool in tools] if required else []


def _unsupported(param: str, message: str) -> Unsupported:
    return Unsupported(f"{param}: {message}", param=param)
