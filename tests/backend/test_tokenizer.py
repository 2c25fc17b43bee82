from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Core

from backend.models.errors import ModelLoadError
from backend.models.gguf import GGUFFile
from backend.models.gguf_tokenizer import tokenizer_from_gguf
from backend.models.hf_tokenizer import tokenizer_from_folder
from backend.models.tokenizer import Tokenizer
from tests.backend import tiny_llama

DATA = Path(__file__).with_name("data")
VECTORS = json.loads(gzip.decompress((DATA / "tokenizer_vectors.json.gz").read_bytes()))
TEXTS = VECTORS["texts"]


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("vocabularies")
    made = {}
    for name in ("gpt-2", "phi-3"):
        path = folder / f"{name}.gguf"
        path.write_bytes(gzip.decompress((DATA / f"ggml-vocab-{name}.gguf.gz").read_bytes()))
        made[name] = tokenizer_from_gguf(GGUFFile(path).metadata, str(path))
    return made


@pytest.mark.parametrize("name", ["gpt-2", "phi-3"])
@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_hard_texts_get_the_ids_of_the_original(
    vocabularies: dict[str, Tokenizer], name: str, index: int
) -> None:
    ids = vocabularies[name].encode(TEXTS[index], parse_special=False)
    assert ids == VECTORS["ids"][name][index]


@pytest.mark.parametrize("name", ["gpt-2", "phi-3"])
def test_hard_texts_come_back_whole(vocabularies: dict[str, Tokenizer], name: str) -> None:
    tokenizer = vocabularies[name]
    assert [tokenizer.decode(ids) for ids in VECTORS["ids"][name]] == TEXTS


@pytest.mark.parametrize(
    "row", VECTORS["streams"], ids=lambda row: f"{row['tokenizer']} {row['text'][:12]}"
)
def test_each_token_adds_its_exact_bytes(
    vocabularies: dict[str, Tokenizer], row: dict[str, Any]
) -> None:
    tokenizer = vocabularies[row["tokenizer"]]
    assert [tokenizer.token_bytes(i).hex() for i in row["ids"]] == row["pieces_hex"]


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_any_text_survives_the_round_trip(vocabularies: dict[str, Tokenizer], text: str) -> None:
    for tokenizer in vocabularies.values():
        ids = tokenizer.encode(text, parse_special=False)
        assert tokenizer.decode(ids) == text
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert joined in (text, " " + text)


def test_a_lone_surrogate_is_sent_as_a_question_mark(vocabularies: dict[str, Tokenizer]) -> None:
    gpt2 = vocabularies["gpt-2"]
    assert gpt2.decode(gpt2.encode("a\ud800b")) == "a?b"


def test_special_tokens_are_parsed_only_when_asked(vocabularies: dict[str, Tokenizer]) -> None:
    phi3 = vocabularies["phi-3"]
    text = "hi<|end|>"
    assert phi3.encode(text)[-1] == 32007
    assert 32007 not in phi3.encode(text, parse_special=False)
    assert phi3.decode(phi3.encode(text, parse_special=False)) == text


def test_special_tokens_add_nothing_to_the_text_but_can_be_shown(
    vocabularies: dict[str, Tokenizer],
) -> None:
    phi3 = vocabularies["phi-3"]
    assert phi3.is_special(32007)
    assert not phi3.is_special(1000)
    assert phi3.token_bytes(32007) == b""
    assert phi3.token_text(32007) == "<|end|>"
    assert phi3.decode([32007]) == ""
    assert phi3.decode([32007], skip_special=False) == "<|end|>"


def test_a_part_of_a_character_is_displayed_as_the_replacement(
    vocabularies: dict[str, Tokenizer],
) -> None:
    gpt2 = vocabularies["gpt-2"]
    assert gpt2.token_text(gpt2.encode("🦙")[0]) == "\ufffd"
    assert gpt2.token_text(gpt2.encode(" hello")[0]) == " hello"


def test_ids_past_the_vocabulary_add_nothing(vocabularies: dict[str, Tokenizer]) -> None:
    gpt2 = vocabularies["gpt-2"]
    assert gpt2.vocab_size == 50257
    assert gpt2.token_bytes(50257) == gpt2.token_bytes(-1) == b""


def test_the_begin_token_is_added_once(vocabularies: dict[str, Tokenizer]) -> None:
    phi3 = vocabularies["phi-3"]
    assert phi3.encode("hi", add_special=True) == [1, *phi3.encode("hi")]
    assert phi3.encode("<s>hi", add_special=True) == phi3.encode("<s>hi")
    assert phi3.encode("", add_special=True) == [1]


def test_a_vocabulary_without_a_begin_token_adds_none(vocabularies: dict[str, Tokenizer]) -> None:
    gpt2 = vocabularies["gpt-2"]
    assert gpt2.encode("hi", add_special=True) == gpt2.encode("hi")


def test_every_token_that_ends_a_turn_is_known(vocabularies: dict[str, Tokenizer]) -> None:
    assert vocabularies["gpt-2"].eos_ids == {50256}
    assert vocabularies["phi-3"].eos_ids == {
        32000,
        32007,
    }  # the file names the first, <|end|> is the second


def test_text_that_only_looks_like_an_end_of_turn_ends_nothing() -> None:
    tokens = [*tiny_llama.TOKENS, "<|end|>"]
    assert tokenizer_from_gguf(metadata(tokens=tokens), "x").eos_ids == {0, 2}


def metadata(**changes: Any) -> dict[str, Any]:
    base = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tiny_llama.TOKENS,
        "token_type": [3, 3, 3] + [1] * (len(tiny_llama.TOKENS) - 3),
        "merges": [" ".join(pair) for pair in tiny_llama.MERGES],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {
        f"tokenizer.ggml.{key}": value
        for key, value in (base | changes).items()
        if value is not None
    }


def pieces(text: str, **changes: Any) -> list[str]:
    tokenizer = tokenizer_from_gguf(metadata(**changes), "test.gguf")
    return [tokenizer.token_text(i) for i in tokenizer.encode(text)]


DIGIT_MERGES = {
    "tokens": [*tiny_llama.TOKENS, "12", "123", "Ġ1", "Ġ12"],
    "merges": ["Ġ 1", "Ġ1 2", "1 2", "12 3"],
    "token_type": None,
}


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        ("gpt-2", [" 12", "3", "4"]),  # a number and the space before it are one word
        ("smollm", [" ", "1", "2", "3", "4"]),  # each digit stands alone
        ("llama-bpe", [" ", "123", "4"]),  # up to three digits, no space
        ("qwen2", [" ", "1", "2", "3", "4"]),
    ],
)
def test_each_pre_tokenizer_splits_numbers_its_own_way(pre: str, wanted: list[str]) -> None:
    assert pieces(" 1234", pre=pre, **DIGIT_MERGES) == wanted


def test_llama3_takes_a_whole_word_that_no_merge_makes() -> None:
    changes = {"tokens": [*tiny_llama.TOKENS, "xyz"], "token_type": None}
    assert pieces("xyz", pre="llama-bpe", **changes) == ["xyz"]
    assert pieces("xyz", pre="gpt-2", **changes) == ["x", "y", "z"]


def test_qwen2_composes_characters_first() -> None:
    qwen2 = tokenizer_from_gguf(metadata(pre="qwen2"), "test.gguf")
    assert qwen2.encode("e\u0301") == qwen2.encode("\u00e9")


def test_llama3_adds_its_begin_token_unless_told_otherwise() -> None:
    assert tokenizer_from_gguf(metadata(pre="llama-bpe"), "x").encode("", add_special=True) == [1]
    told = metadata(pre="llama-bpe", add_bos_token=False)
    assert tokenizer_from_gguf(told, "x").encode("", add_special=True) == []


def test_an_end_token_is_added_where_the_file_says_so() -> None:
    both = metadata(add_bos_token=True, add_eos_token=True)
    assert tokenizer_from_gguf(both, "x").encode("", add_special=True) == [1, 2]


def test_user_defined_tokens_are_text_that_is_always_one_token() -> None:
    tokens = [*tiny_llama.TOKENS, "  x y  "]
    types = [3, 3, 3] + [1] * (len(tokens) - 4) + [4]
    tokenizer = tokenizer_from_gguf(metadata(tokens=tokens, token_type=types), "x")
    last = len(tokens) - 1
    for parse_special in (True, False):
        assert last in tokenizer.encode("a  x y  b", parse_special=parse_special)
    assert tokenizer.token_bytes(last) == b"  x y  "
    assert not tokenizer.is_special(last)


GEMMA = {
    "model": "llama",
    "tokens": ["<bos>", "<eos>", "<unk>", "  ", "   ", "\n\n", "▁", "a", "b", "\n", "▁b"]
    + [f"<0x{byte:02X}>" for byte in range(256)],
    "token_type": [3, 3, 3, 4, 4, 4, 1, 1, 1, 4, 1] + [6] * 256,
    "scores": [-1000.0] * 6 + [-1.0, -2.0, -3.0, -1000.0, -4.0] + [0.0] * 256,
    "merges": None,
    "pre": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "unknown_token_id": 2,
    "add_space_prefix": False,
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a b", ["a", " b"]),
        ("a  b", ["a", "  ", "b"]),
        ("a    b", ["a", "   ", " b"]),
        ("a\n\nb", ["a", "\n\n", "b"]),
        ("a ▁b", ["a", "  ", "b"]),  # SentencePiece takes that letter for a space
        (" a", [" ", "a"]),
    ],
)
def test_gemmas_runs_of_spaces_are_one_token(text: str, wanted: list[str]) -> None:
    assert pieces(text, **GEMMA) == wanted
    tokenizer = tokenizer_from_gguf(metadata(**GEMMA), "x")
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")
    assert tokenizer.encode(f"<bos>{text}", add_special=True)[:2].count(0) == 1


def test_a_folders_added_runs_of_spaces_are_spaces(spm_folder: Path) -> None:
    core = spm_core()
    core.add_tokens([AddedToken("▁▁", normalized=False)])
    core.save(str(spm_folder / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(spm_folder)
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"  "


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "bert"}, "tokenizer 'bert' is not supported; supported: gpt2, llama"),
        ({"model": None}, "tokenizer None is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is missing"),
        ({"pre": "viking"}, "pre-tokenizer 'viking' is not supported"),
        ({"merges": None}, "damaged or unknown tokenizer"),
        ({"merges": ["no-space"]}, "damaged or unknown tokenizer"),
        ({"merges": ["q unknowntoken"]}, "damaged or unknown tokenizer"),
        ({"model": "llama"}, "damaged or unknown tokenizer"),  # no scores
        ({"model": "llama", "scores": [0.0]}, "damaged or unknown tokenizer"),
    ],
)
def test_a_damaged_or_unknown_tokenizer_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        tokenizer_from_gguf(metadata(**changes), "test.gguf")
    assert str(caught.value).startswith("test.gguf: ")
    assert says in str(caught.value)


def spm_core() -> Core:
    """As converted Llama 2 tokenizers are: byte fallback, and a leading space that decoding takes away."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "h",
        "i",
        "▁h",
        "▁hi",
    ]
    merges = [("▁", "h"), ("▁h", "i")]
    ids = {token: i for i, token in enumerate(tokens)}
    core = Core(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", None, [("<s>", 1), ("</s>", 2)]
    )
    core.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    core.add_tokens([AddedToken("kept whole", normalized=False)])
    return core


@pytest.fixture
def spm_folder(tmp_path: Path) -> Path:
    spm_core().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    return tmp_path


def test_a_sentencepiece_folder_decodes_to_exact_bytes(spm_folder: Path) -> None:
    tokenizer = tokenizer_from_folder(spm_folder)
    ids = tokenizer.encode("hi é")
    assert [tokenizer.token_bytes(i) for i in ids] == [b" hi", b" ", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "hi é"


def test_a_folders_post_processor_says_what_is_added_around(spm_folder: Path) -> None:
    tokenizer = tokenizer_from_folder(spm_folder)
    assert tokenizer.encode("hi", add_special=True) == [1, *tokenizer.encode("hi"), 2]
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == {2}


def test_a_folders_special_tokens_are_parsed_only_when_asked(spm_folder: Path) -> None:
    tokenizer = tokenizer_from_folder(spm_folder)
    assert 2 in tokenizer.encode("hi</s>")
    assert 2 not in tokenizer.encode("hi</s>", parse_special=False)
    assert tokenizer.decode(tokenizer.encode("hi</s>", parse_special=False)) == "hi</s>"


def test_a_folders_plain_added_tokens_are_text(spm_folder: Path) -> None:
    tokenizer = tokenizer_from_folder(spm_folder)
    last = tokenizer.vocab_size - 1
    assert tokenizer.encode("kept whole") == [last]
    assert tokenizer.token_bytes(last) == b"kept whole"


def saved(change: Callable[[Core], None], folder: Path) -> Path:
    core = tiny_llama.tokenizer()
    change(core)
    core.save(str(folder / "tokenizer.json"))
    return folder


def test_a_length_limit_saved_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    folder = saved(
        lambda core: (core.enable_truncation(4), core.enable_padding(length=9)), tmp_path
    )
    assert len(tokenizer_from_folder(folder).encode("x" * 20)) == 20
    assert len(tokenizer_from_folder(folder).encode("xx")) == 2


def test_a_decoder_without_exact_bytes_is_refused(tmp_path: Path) -> None:
    def to_wordpiece(core: Core) -> None:
        core.decoder = decoders.WordPiece()

    with pytest.raises(ModelLoadError, match="decoder \\['WordPiece'\\] is not supported"):
        tokenizer_from_folder(saved(to_wordpiece, tmp_path))


def test_gaps_between_ids_are_tokens_without_text(tmp_path: Path) -> None:
    def with_gap(core: Core) -> None:
        core.model = models.BPE({"a": 0, "b": 5}, [])
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

    tokenizer = tokenizer_from_folder(saved(with_gap, tmp_path))
    assert tokenizer.token_bytes(3) == b""
    assert tokenizer.decode([0, 3, 5]) == "ab"
