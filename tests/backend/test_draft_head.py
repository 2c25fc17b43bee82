from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.cpu.native import native_available
from backend.models.draft_head import FILE_NAME, FORMAT, DraftHead, load_draft_head, save_draft_head
from backend.models.errors import ModelLoadError
from backend.models.native_head import NativeHead, fast_head

DRAFT_IDS = torch.tensor([7, 2, 9])


def random_head() -> DraftHead:
    head = DraftHead(DRAFT_IDS, vocab_size=12, hidden_size=8, inner_size=6)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator)
    return head


def guess(head: DraftHead, token_ids: list[int]) -> torch.Tensor:
    state = torch.linspace(-1, 1, 8).expand(len(token_ids), 8)
    with torch.inference_mode():
        return head.logits(head(state, torch.tensor(token_ids)))


def test_a_head_that_was_saved_guesses_as_before(tmp_path: Path) -> None:
    head = random_head()
    save_draft_head(head, tmp_path)
    for path in (tmp_path, tmp_path / FILE_NAME):
        torch.testing.assert_close(
            guess(load_draft_head(path), [7, 2, 9, 0]),
            guess(head, [7, 2, 9, 0]),
            rtol=0.02,
            atol=0.05,
        )


def test_every_token_outside_its_vocabulary_is_read_as_one() -> None:
    known, other, another = (guess(random_head(), [token_id]) for token_id in (2, 0, 11))
    assert torch.equal(other, another)
    assert not torch.equal(known, other)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    together = guess(random_head(), [7, 2, 9])
    for index, token_id in enumerate([7, 2, 9]):
        torch.testing.assert_close(
            together[index], guess(random_head(), [token_id])[0], rtol=1e-5, atol=1e-4
        )


def test_a_head_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"{tmp_path / FILE_NAME}: no such file"):
        load_draft_head(tmp_path)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"\0" * 64)
    with pytest.raises(ModelLoadError, match="not a readable safetensors file"):
        load_draft_head(tmp_path)


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ModelLoadError, match="not a draft head of this version"):
        load_draft_head(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("name", "value"),
    [("out", torch.zeros(3, 5)), ("down", None), ("draft_ids", torch.tensor([1, 2, 40]))],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, value: torch.Tensor | None
) -> None:
    path = save_draft_head(random_head(), tmp_path)
    tensors = load_file(path)
    del tensors[name]
    if value is not None:
        tensors[name] = value
    save_file(tensors, path, {"format": FORMAT, "vocab_size": "12"})
    with pytest.raises(ModelLoadError, match="do not fit together"):
        load_draft_head(path)


# The native tier


@pytest.fixture
def wide_head() -> DraftHead:
    head = DraftHead(torch.arange(40), vocab_size=50, hidden_size=64, inner_size=32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return head.requires_grad_(False)


@pytest.mark.skipif(native_available() is not None, reason=str(native_available()))
@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_native_head_guesses_as_the_head_it_was_made_of(
    wide_head: DraftHead, num_rows: int
) -> None:
    fast = fast_head(wide_head)
    assert isinstance(fast, NativeHead)
    state = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(1))
    token_ids = torch.arange(num_rows) * 11
    with torch.inference_mode():
        wanted, got = wide_head(state, token_ids), fast(state, token_ids)
        assert (got - wanted).norm() < 0.03 * wanted.norm()
        wanted, got = wide_head.logits(state), fast.logits(state)
        assert (got - wanted).norm() < 0.01 * wanted.norm()


def test_sizes_that_make_no_whole_blocks_are_computed_by_torch() -> None:
    head = random_head()
    assert fast_head(head) is head
