"""Tokenizers rebuilt from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE with scores ("llama").

A GGUF names its pre-tokenizer but does not describe it, so what each name stands for is a table here; an unknown name
is refused, because a near miss gives wrong ids without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

from backend.models.errors import ModelLoadError
from backend.models.tokenizer import Tokenizer, TokenType, Vocabulary

_TYPES = {
    1: TokenType.NORMAL,
    2: TokenType.SPECIAL,  # unknown
    3: TokenType.SPECIAL,
    4: TokenType.USER_DEFINED,
    5: TokenType.SPECIAL,  # unused
    6: TokenType.BYTE,
}
# Control tokens that end a turn wherever they exist; files tend to name only one of them.
_END_OF_TURN = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE = {  # the same rules under other names
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "starcoder": "smollm",
    "refact": "smollm",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Raises ModelLoadError for tokenizer kinds and pre-tokenizers that we do not know."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"{source}: tokenizer {kind!r} is not supported; supported: gpt2, llama"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
        raise ModelLoadError(f"{source}: tokenizer.ggml.tokens is missing")
    vocabulary = Vocabulary(
        tokens, _token_types(metadata, len(tokens)), "spm" if kind == "llama" else "byte_level"
    )
    try:
        build = partial(_build_core, metadata, vocabulary)
        return _wrap(
            metadata, vocabulary, build(parse_special=True), partial(build, parse_special=False)
        )
    except Exception as exc:  # the library raises the bare class for what it does not like
        raise ModelLoadError(f"{source}: damaged or unknown tokenizer: {exc}") from exc


def _wrap(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, core: Core, build_plain: partial[Core]
) -> Tokenizer:
    spm = vocabulary.spelling == "spm"
    bos_id, eos_id = _id(metadata, "bos"), _id(metadata, "eos")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", spm or _pre(metadata) == "llama-bpe")
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    return Tokenizer(
        core,
        vocabulary,
        build_plain,
        bos_id=bos_id,
        eos_ids=_end_ids(metadata, vocabulary),
        prefix=[bos_id] if adds_bos and bos_id is not None else [],
        suffix=[eos_id] if adds_eos and eos_id is not None else [],
        space_prefix=spm and metadata.get("tokenizer.ggml.add_space_prefix", True),
    )


def _token_types(metadata: Mapping[str, Any], count: int) -> list[TokenType]:
    codes = metadata.get("tokenizer.ggml.token_type") or []
    types = [_TYPES.get(code, TokenType.NORMAL) for code in codes[:count]]
    return types + [TokenType.NORMAL] * (count - len(types))


def _id(metadata: Mapping[str, Any], name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) else None


def _end_ids(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> set[int]:
    named = {_id(metadata, name) for name in ("eos", "eot", "eom")} - {None}
    known = {
        i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind is TokenType.SPECIAL and token in _END_OF_TURN
    }
    return {i for i in named | known if i is not None}


def _pre(metadata: Mapping[str, Any]) -> str:
    name = str(metadata.get("tokenizer.ggml.pre", ""))
    return _PRE.get(name, name)


def _build_core(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, *, parse_special: bool
) -> Core:
    unknown = _id(metadata, "unknown")
    ids = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if parse_special or kind is not TokenType.SPECIAL or i == unknown
    }
    if vocabulary.spelling == "spm":
        core = _spm_core(metadata, vocabulary.tokens, ids)
    else:
        core = _byte_level_core(metadata, ids)
    core.add_tokens(_added(vocabulary, TokenType.USER_DEFINED))
    if parse_special:
        core.add_special_tokens(_added(vocabulary, TokenType.SPECIAL))
    return core


def _added(vocabulary: Vocabulary, wanted: TokenType) -> list[AddedToken]:
    """Texts that the library finds before it splits; handed over at once, for it builds an automaton each time.

    A run of spaces (Gemma) is looked for where spaces have become the letter that stands for them.
    """
    return [
        AddedToken(token, normalized=not token.strip(" "), special=wanted is TokenType.SPECIAL)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind is wanted and token
    ]


def _byte_level_core(metadata: Mapping[str, Any], ids: dict[str, int]) -> Core:
    pre = _pre(metadata)
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    core = Core(models.BPE(ids, merges, ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel
    splits = {
        "gpt-2": lambda: [byte_level(add_prefix_space=False)],
        "smollm": lambda: [
            pre_tokenizers.Digits(individual_digits=True),
            byte_level(add_prefix_space=False),
        ],
        "llama-bpe": lambda: _split_by(_LLAMA3_SPLIT),
        "qwen2": lambda: _split_by(_QWEN2_SPLIT),
    }
    if pre not in splits:
        raise ValueError(f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(splits)}")
    core.pre_tokenizer = pre_tokenizers.Sequence(splits[pre]())
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    return core


def _split_by(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _pair(merge: str) -> tuple[str, str]:
    at = merge.index(" ", 1)
    return merge[:at], merge[at + 1 :]


def _spm_core(metadata: Mapping[str, Any], tokens: Sequence[str], ids: dict[str, int]) -> Core:
    unknown = _id(metadata, "unknown")
    core = Core(
        models.BPE(
            ids,
            _merges_by_score(ids, metadata["tokenizer.ggml.scores"]),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
    core.normalizer = normalizers.Sequence(steps)
    return core


def _merges_by_score(ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores highest: every way to split a token is a merge."""
    ranked = [
        (-scores[whole], ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for token, whole in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
