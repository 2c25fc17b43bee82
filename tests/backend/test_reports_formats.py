"""Reports of users of other engines about model files: what is read from them must be what was meant."""

from __future__ import annotations

import gzip
import itertools
import random
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.models.gguf import GGUFFile
from backend.models.gguf_tokenizer import tokenizer_from_gguf
from backend.models.loader import LoadedModel, load_model
from backend.models.tokenizer import byte_level_alphabet
from tests.backend import tiny_families, tiny_llama
from tests.backend.real_engine import family_engine
from tests.backend.toy_model import request, run

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = [3 + (11 * i) % 250 for i in range(40)]


def logits(loaded: LoadedModel) -> Tensor:
    kv = loaded.model.new_kv_cache(3, 16)
    return tiny_llama.step(loaded.model, kv, [IDS], [len(IDS)], [[0, 1, 2]])[0]


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return tiny_llama.dense_logits(tiny_llama.tensors(), IDS)[-1].float()


def cosine(first: Tensor, second: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(first, second, dim=0))


@pytest.mark.parametrize("native", [False, True], ids=["portable", "native"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_report_56_transformers_31788_a_llama_gguf_with_grouped_heads_is_unpermuted(
    tmp_path: Path, expected: Tensor, kind: str, native: bool
) -> None:
    """Six query heads and two of keys: each kind has its own number of interleaved rows."""
    path = tiny_llama.write_gguf(tmp_path / "m.gguf", tiny_llama.tensors(), kind=kind)
    loaded = load_model(path, dtype="float32", native=native, threads=1)
    assert cosine(logits(loaded), expected) > 0.999


def test_report_56_transformers_31788_rows_in_the_wrong_order_would_show(
    tmp_path: Path, expected: Tensor
) -> None:
    """What the test above would see if the rows of q and k were taken as they lie."""
    tensors = tiny_llama.tensors()
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensors[name].shape[0] // tiny_llama.CONFIG.head_dim
            tensors[name] = tiny_llama.interleaved(tensors[name], heads)
    path = tiny_llama.write_folder(tmp_path / "m", tensors)
    loaded = load_model(path, dtype="float32", native=False, threads=1)
    assert cosine(logits(loaded), expected) < 0.9


WORDS = (
    "the Quick brown it's they'll I'VE don't naïve Straße 北京 東京都 привет שלום مرحبا नमस्ते "
    "😀 👩‍👩‍👧 e\u0301 12 3.14159 1,000,000 ½ Ⅷ x_y C++ <|endoftext|> --- ... !? () "
    "{\"a\":1} 'd ''"
)
SPACES = ["", " ", " ", " ", "  ", "   ", "\t", "\u00a0", "\u3000", " \t "]


def corpus() -> list[str]:
    rng, words = random.Random(2), WORDS.split(" ")
    return [
        "".join(rng.choice(words) + rng.choice(SPACES) for _ in range(rng.randint(1, 12)))
        for _ in range(1000)
    ]


class PlainBPE:
    """GPT-2's tokenizer as its paper has it: split by the pattern, then merge the best pair until none is left."""

    def __init__(self, tokens: list[str], merges: list[str], alphabet: str) -> None:
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        self._letters = {byte: char for char, byte in byte_level_alphabet().items()}
        letters, numbers = (
            re.escape("".join(sorted({c for c in alphabet if unicodedata.category(c)[0] == kind})))
            for kind in "LN"
        )
        self._pattern = re.compile(
            rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{letters}]+| ?[{numbers}]+"
            rf"| ?[^\s{letters}{numbers}]+|\s+(?!\S)|\s+"
        )

    def encode(self, text: str) -> list[int]:
        return [
            self._ids[piece] for word in self._pattern.findall(text) for piece in self._merged(word)
        ]

    def _merged(self, word: str) -> Iterator[str]:
        pieces = [self._letters[byte] for byte in word.encode()]
        while pairs := [p for p in itertools.pairwise(pieces) if p in self._ranks]:
            best = min(pairs, key=lambda pair: self._ranks[pair])
            at = 0
            while at < len(pieces) - 1:
                if (pieces[at], pieces[at + 1]) == best:
                    pieces[at : at + 2] = ["".join(best)]
                at += 1
        yield from pieces


def test_report_57_transformers_31630_a_tokenizer_from_a_gguf_splits_as_the_original(
    tmp_path: Path,
) -> None:
    """A thousand lines; where they went wrong was numbers, contractions and blanks in a row."""
    path = tmp_path / "gpt-2.gguf"
    stored = Path(__file__).with_name("data") / "ggml-vocab-gpt-2.gguf.gz"
    path.write_bytes(gzip.decompress(stored.read_bytes()))
    metadata, lines = GGUFFile(path).metadata, corpus()
    plain = PlainBPE(
        metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"], "".join(lines)
    )
    ours = tokenizer_from_gguf(metadata, "gpt-2")
    wrong = [line for line in lines if ours.encode(line, parse_special=False) != plain.encode(line)]
    assert wrong == []


@pytest.mark.parametrize("budget", [5, 512])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral", "qwen2"])
def test_report_62_vllm_51756_each_layer_keeps_its_own_window(name: str, budget: int) -> None:
    """Layers of 8 tokens beside layers of all: the scores of a prompt are transformers', however it is cut."""
    ids, reference = tiny_families.expected(name)
    item = request("a", ids, prompt_logprobs=0, max_tokens=1)
    out = run(family_engine(name, block_size=4, max_num_batched_tokens=budget), item)["a"]
    wanted = reference.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    got = torch.tensor([entry.logprob for entry in out.prompt_logprobs[1:]])
    assert (got - wanted).abs().max() < 2e-3


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_report_62_vllm_ascend_13501_blocks_behind_a_window_are_freed_when_nobody_reads_them(
    name: str,
) -> None:
    """Pool, chunks, guesses and preemption decide when blocks go; the text is that of a pool for all."""
    prompts = [[1 + (7 * i + k) % 90 for i in range(9 + 7 * k)] for k in range(5)]
    items = [request(str(k), ids, max_tokens=30) for k, ids in enumerate(prompts)]
    wanted = {item.request_id: run(family_engine(name), item) for item in items}
    tight = {
        "block_size": 4,
        "num_blocks": 22,
        "max_num_batched_tokens": 16,
        "speculative": "ngram",
    }
    engine = family_engine(name, **tight)
    for _ in range(2):
        for key, out in run(engine, *items).items():
            assert out.token_ids == wanted[key][key].token_ids
