"""A draft head: guesses the next tokens from the hidden state that the last one was drawn from.

A recurrent MLP on the target's final hidden state, in the line of the MLP speculator (Wertheimer et al., 2024) and
ReDrafter (Zhang et al., 2024). It keeps no keys and values, and the state it starts from is that of the row computed
last, which every step has: prefix hits, chunked prefill and preemption leave it nothing to catch up with.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from backend.models.errors import ModelLoadError

FILE_NAME = "head.safetensors"
FORMAT = "tidegate-draft-head-1"


class DraftHead(nn.Module):
    """Reads and guesses the tokens of `draft_ids` only; every other token is read as one unknown token.

    `forward` makes the state behind a token, which stands for the target's hidden state there; `logits` reads it.
    """

    def __init__(
        self, draft_ids: Tensor, vocab_size: int, hidden_size: int, inner_size: int
    ) -> None:
        """`draft_ids` [num_drafts] int64: distinct tokens of the target's vocabulary."""
        super().__init__()
        num_drafts = len(draft_ids)
        rows = torch.full((vocab_size,), num_drafts)
        rows[draft_ids] = torch.arange(num_drafts)
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", draft_ids)
        self._row_of: Tensor  # [vocab_size], into `embed`
        self.register_buffer("_row_of", rows, persistent=False)
        self.embed = nn.Parameter(torch.empty(num_drafts + 1, hidden_size))
        self.mix = nn.Parameter(torch.empty(hidden_size, 2 * hidden_size))
        self.gate_up = nn.Parameter(torch.empty(2 * inner_size, 2 * hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, inner_size))
        self.out = nn.Parameter(torch.empty(num_drafts, hidden_size))

    def forward(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """state [rows, hidden_size], token_ids [rows] int64 -> the state behind each token [rows, hidden_size]."""
        x = self.inputs(state, token_ids)
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(x, self.mix) + F.linear(F.silu(gate) * up, self.down)

    def inputs(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """What the layers read: state and token, normed, beside each other [rows, 2 * hidden_size]."""
        token = self.embed[self._row_of[token_ids]]
        return torch.cat([_normed(state), _normed(token)], dim=-1)

    def logits(self, state: Tensor) -> Tensor:
        """-> [rows, num_drafts], of the tokens `draft_ids`."""
        return F.linear(state, self.out)


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def save_draft_head(head: DraftHead, folder: Path) -> Path:
    """Half precision: a guess needs no more. The file replaces an older one in one move."""
    tensors = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
    }
    path = folder / FILE_NAME
    part = path.with_suffix(".part")
    # `save_file` would let the owner alone read it.
    part.write_bytes(save(tensors, {"format": FORMAT, "vocab_size": str(head.vocab_size)}))
    part.replace(path)
    return path


def load_draft_head(path: Path) -> DraftHead:
    """From a file, or the folder that `tidegate distill-draft` wrote. Raises ModelLoadError."""
    file = path / FILE_NAME if path.is_dir() else path
    if not file.exists():
        raise ModelLoadError(f"{file}: no such file; a draft head is what distill-draft writes")
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as exc:
        raise ModelLoadError(f"{file}: not a readable safetensors file ({exc})") from exc
    if metadata.get("format") != FORMAT:
        raise ModelLoadError(f"{file}: not a draft head of this version ({FORMAT})")
    try:
        head = DraftHead(
            tensors["draft_ids"],
            int(metadata["vocab_size"]),
            tensors["out"].shape[1],
            tensors["down"].shape[1],
        )
        head.load_state_dict(tensors)
    except (KeyError, ValueError, IndexError, RuntimeError) as exc:
        raise ModelLoadError(f"{file}: the tensors of this draft head do not fit together") from exc
    return head.requires_grad_(False)
