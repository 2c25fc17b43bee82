"""Tokenizers of transformers folders: `tokenizer.json`, and the settings and end-token lists beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Core

from backend.models.checkpoint import read_json
from backend.models.errors import ModelLoadError
from backend.models.tokenizer import Tokenizer, TokenType, Vocabulary

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Raises ModelLoadError when `tokenizer.json` is missing, damaged or of a kind that has no exact bytes."""
    path = folder / "tokenizer.json"
    document = read_json(path)
    core = _build_core(document, str(path))
    vocabulary = _vocabulary(core, document, str(path))
    config = _optional_json(folder / "tokenizer_config.json")
    prefix, suffix = _added_around(core)
    return Tokenizer(
        core,
        vocabulary,
        partial(_build_core, _without_special(document), str(path)),
        bos_id=_token_id(core, config.get("bos_token")),
        eos_ids=_eos_ids(folder, core, config),
        prefix=prefix,
        suffix=suffix,
        space_prefix=vocabulary.spelling == "spm" and _strips_first_space(document),
    )


def special_token_text(value: Any) -> str:
    """`tokenizer_config.json` writes a special token as text, as an object with `content`, or as null."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _build_core(document: Mapping[str, Any], source: str) -> Core:
    try:
        core = Core.from_str(json.dumps(document))
    except Exception as exc:  # the library raises bare Exception
        raise ModelLoadError(f"{source}: not a readable tokenizer ({exc})") from exc
    core.no_padding()
    core.no_truncation()
    return core


def _vocabulary(core: Core, document: Mapping[str, Any], source: str) -> Vocabulary:
    by_id = {i: token for token, i in core.get_vocab(with_added_tokens=True).items()}
    added = core.get_added_tokens_decoder()
    spelling = _spelling(document, source)
    tokens = [by_id.get(i, "") for i in range(max(by_id, default=-1) + 1)]
    types = []
    for i, token in enumerate(tokens):
        if i in added:
            types.append(TokenType.SPECIAL if added[i].special else TokenType.USER_DEFINED)
        elif spelling == "spm" and _BYTE_TOKEN.fullmatch(token):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL)
    return Vocabulary(tokens, types, spelling)


def _spelling(document: Mapping[str, Any], source: str) -> str:
    kinds = {step.get("type") for step in _steps(document.get("decoder"))}
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace"}:
        return "spm"
    raise ModelLoadError(f"{source}: decoder {sorted(map(str, kinds))} is not supported")


def _steps(part: Any) -> Sequence[Mapping[str, Any]]:
    """The steps of a decoder or normalizer, which may be absent, one step, or a sequence."""
    if not isinstance(part, Mapping):
        return []
    for key in ("decoders", "normalizers"):
        if key in part:
            return part[key]
    return [part]


def _strips_first_space(document: Mapping[str, Any]) -> bool:
    return any(
        step.get("type") == "Strip"
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in _steps(document.get("decoder"))
    )


def _without_special(document: Mapping[str, Any]) -> dict[str, Any]:
    """No text can form a special token then."""
    added = [token for token in document.get("added_tokens") or [] if not token.get("special")]
    return {**document, "added_tokens": added}


def _added_around(core: Core) -> tuple[list[int], list[int]]:
    bare, full = core.encode("a", add_special_tokens=False).ids, core.encode("a").ids
    at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return full[:at], full[at + len(bare) :]


def _eos_ids(folder: Path, core: Core, config: Mapping[str, Any]) -> set[int]:
    """generation_config.json knows best; the tokenizer's own end token joins it."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(folder / name).get("eos_token_id")
        ids.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    own = _token_id(core, config.get("eos_token"))
    return ids if own is None else ids | {own}


def _token_id(core: Core, value: Any) -> int | None:
    text = special_token_text(value)
    return core.token_to_id(text) if text else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
