"""Tools, tool choice and response format of a chat request, in the forms of today and those before tools."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gateway.endpoints.json_schema import check_schema
from gateway.endpoints.openai_validation import invalid_value, missing, unknown_value
from plugins.errors import InvalidRequest
from plugins.events import Json, Request, ResponseFormat, Tool, ToolChoice

Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]+$", max_length=64)]


class FunctionBody(Struct, kw_only=True):
    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class CustomToolBody(Struct, kw_only=True):
    name: Name
    description: str | None = None
    format: Json | None = None


class ToolBody(Struct, kw_only=True):
    type: str = "function"
    function: FunctionBody | None = None
    custom: CustomToolBody | None = None
    cache_control: Json | None = None


class NameBody(Struct):
    name: str


class AllowedToolsBody(Struct):
    tools: list[ToolChoiceBody]
    mode: str = "auto"


class ToolChoiceBody(Struct, kw_only=True):
    type: str | None = None
    function: NameBody | None = None
    custom: NameBody | None = None
    allowed_tools: AllowedToolsBody | None = None


class JsonSchemaBody(Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: Json | None = None
    strict: bool | None = None


class ResponseFormatBody(Struct, kw_only=True):
    type: str
    json_schema: JsonSchemaBody | None = None
    schema: Json | None = None  # llama.cpp and others: a schema beside "json_object"
    pattern: str | None = None
    grammar: str | None = None


# -- Tools -----------------------------------------------------------------------------------------------------------


def read_tools(tools: list[ToolBody] | None, functions: list[FunctionBody] | None) -> list[Tool]:
    if tools:
        return [_read_tool(tool, i) for i, tool in enumerate(tools)]
    return [_function_tool(function) for function in functions or ()]


def _read_tool(body: ToolBody, i: int) -> Tool:
    if body.type == "function":
        if body.function is None:
            raise missing(f"tools[{i}].function")
        tool = _function_tool(body.function)
    elif body.type == "custom":
        if body.custom is None:
            raise missing(f"tools[{i}].custom")
        custom = body.custom
        extra = {"format": custom.format} if custom.format else None
        tool = Tool(custom.name, custom.description, kind="custom", extra=extra)
    else:
        raise unknown_value(f"tools[{i}].type", body.type, ("function", "custom"))
    if body.cache_control is not None:
        tool.extra = {**(tool.extra or {}), "cache_control": body.cache_control}
    return tool


def _function_tool(body: FunctionBody) -> Tool:
    return Tool(body.name, body.description, body.parameters, body.strict)


def asked_in_functions(request: Request) -> bool:
    """Whether the client wrote `functions`, the form before tools, and so reads `function_call` in the answer."""
    if not request.tools or b'"functions"' not in request.body:
        return False
    document: Any = msgspec.json.decode(request.body)
    return bool(document.get("functions")) and not document.get("tools")


# -- Tool choice -----------------------------------------------------------------------------------------------------

_MODES = {
    "none": ToolChoice("none"),
    "auto": ToolChoice("auto"),
    "required": ToolChoice("required"),
    "any": ToolChoice("required"),  # Mistral's word
}


def read_tool_choice(choice: str | ToolChoiceBody | None, tools: list[Tool]) -> ToolChoice | None:
    """Without tools, "auto" and "none" ask for nothing; whatever asks for a call is refused."""
    if choice is None:
        return None
    read = _read_mode(choice) if isinstance(choice, str) else _read_named(choice)
    if not tools:
        if read.mode in ("none", "auto"):
            return None
        raise InvalidRequest(
            "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are "
            "specified.",
            param="tool_choice",
            code="invalid_value",
        )
    known = {tool.name for tool in tools}
    for name in read.names:
        if name not in known:
            raise InvalidRequest(
                f"Invalid value for 'tool_choice': no tool named '{name[:80]}' in 'tools'.",
                param="tool_choice",
                code="invalid_value",
            )
    return read


def read_function_call(choice: str | NameBody | None, tools: list[Tool]) -> ToolChoice | None:
    """The choice in the form before tools: "none", "auto" or a name."""
    body = choice if choice is None or isinstance(choice, str) else ToolChoiceBody(function=choice)
    return read_tool_choice(body, tools)


def _read_mode(choice: str) -> ToolChoice:
    mode = _MODES.get(choice)
    if mode is None:
        raise unknown_value("tool_choice", choice, ("none", "auto", "required"))
    return mode


def _read_named(choice: ToolChoiceBody) -> ToolChoice:
    named = choice.function or choice.custom
    if named is not None:
        return ToolChoice("named", [named.name])
    allowed = choice.allowed_tools
    if allowed is None:
        raise missing("tool_choice.function")
    if allowed.mode not in ("auto", "required"):
        raise unknown_value("tool_choice.allowed_tools.mode", allowed.mode, ("auto", "required"))
    names = [name for tool in allowed.tools for name in _read_named(tool).names]
    return ToolChoice("allowed", names, "required" if allowed.mode == "required" else "auto")


# -- Response format -------------------------------------------------------------------------------------------------

_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_response_format(body: ResponseFormatBody | None) -> ResponseFormat | None:
    if body is None:
        return None
    if body.type == "text":
        return ResponseFormat("text")
    if body.type == "json_object":
        if body.schema is not None:
            check_schema(body.schema, "response")
            return ResponseFormat("json_schema", body.schema, "response")
        return ResponseFormat("json_object")
    if body.type == "json_schema":
        return _read_json_schema(body.json_schema)
    if body.type == "regex" and body.pattern is not None:
        return ResponseFormat("regex", pattern=body.pattern)
    if body.type == "grammar" and body.grammar is not None:
        return ResponseFormat("grammar", pattern=body.grammar)
    raise unknown_value("response_format.type", body.type, ("text", "json_object", "json_schema"))


def _read_json_schema(body: JsonSchemaBody | None) -> ResponseFormat:
    if body is None:
        raise missing("response_format.json_schema")
    if not body.name:
        raise missing("response_format.json_schema.name")
    if not _SCHEMA_NAME.fullmatch(body.name):
        why = "expected 1 to 64 letters, digits, '_' and '-'."
        raise invalid_value("response_format.json_schema.name", why)
    if body.schema is None:
        raise missing("response_format.json_schema.schema")
    check_schema(body.schema, body.name)
    return ResponseFormat("json_schema", body.schema, body.name, body.description, body.strict)
