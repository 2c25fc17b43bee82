"""Prompts out of a file: one a line of text, or JSON lines in the forms that public prompt sets come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIELDS = ("messages", "prompt", "turns", "question", "instruction", "text")  # the first one found
Messages = list[dict[str, Any]]


class PromptFileError(ValueError):
    """One line that names the file, and the line in it."""


def read_prompts(path: Path) -> list[Messages]:
    """Each prompt as the messages of a chat. `.jsonl` holds objects, any other file a prompt in each line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise PromptFileError(f"{path}: cannot be read ({exc})") from exc
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".jsonl":
        return [_from_json(line, f"{path}: line {number}") for number, line in numbered]
    return [_user(line) for _, line in numbered]


def _from_json(line: str, where: str) -> Messages:
    try:
        row = json.loads(line)
    except ValueError as exc:
        raise PromptFileError(f"{where} is not JSON ({exc})") from exc
    value = next((row[key] for key in FIELDS if key in row), None) if isinstance(row, dict) else row
    if isinstance(value, list) and value and isinstance(value[0], str):
        value = value[0]  # the first turn of several
    if isinstance(value, str) and value:
        return _user(value)
    if isinstance(value, list) and value and all(_is_message(item) for item in value):
        return value
    raise PromptFileError(
        f"{where} holds no prompt: a text or messages in one of {', '.join(FIELDS)}"
    )


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and {"role", "content"} <= item.keys()


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]
