"""GPTQ matrices as AutoGPTQ and GPTQModel store them: w[out, in] = scale[g, out] * (code[in, out] - zero[g, out]).

`qweight` int32 [in * bits / 32, out]: the codes of successive inputs in one word, the first in the lowest bits.
`qzeros` int32 [groups, out * bits / 32]: the zero points of successive outputs, likewise. `scales` [groups, out].
`g_idx` int32 [in], not always there: the group of each input; without it g = in // group_size.

The format "gptq_v2" stores zero points as they are, "gptq" (v1) one lower. Writers subtract that from whole words
(GPTQModel, `convert_gptq_v2_to_v1_format`), so a zero point of 0 borrows from its neighbour in the word: adding to
whole words is what undoes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backend.quant.affine import AffineWeight
from backend.quant.w8 import quantize_w8

_ONES = {4: 0x11111111, 8: 0x01010101}
_REPACKED_GROUP = 32


def read_gptq(parts: Mapping[str, Tensor], *, sym: bool, v2: bool) -> AffineWeight:
    """`parts`: the tensors qweight, qzeros, scales and, if there, g_idx of one matrix.

    Args:
        sym: every zero point is the middle code, and `qzeros` is not read: files of all versions store anything there.

    Inputs in another order than their groups' (`desc_act` without static groups) fit no blocks: the weight is then
    quantized again, to int8 in groups of 32. Raises ValueError, in one line, for shapes or bits that do not fit.
    """
    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"].float()
    bits = word_bits(qzeros, scales)
    if bits not in _ONES:
        raise ValueError(f"GPTQ in {bits} bits is not supported; supported: 4, 8")
    middle = 1 << bits - 1
    codes = _unpacked(qweight.T, bits)  # [out, in]
    words = qzeros if v2 else qzeros + _ONES[bits]
    zeros = torch.full_like(scales, middle) if sym else _unpacked(words, bits).float()
    group_of = _groups(parts.get("g_idx"), codes.shape[1], len(scales))
    if codes.shape[0] != scales.shape[1]:
        raise ValueError(f"qweight has {codes.shape[0]} outputs, scales have {scales.shape[1]}")
    if group_of is not None:
        dense = (codes - zeros[group_of].T) * scales[group_of].T
        return quantize_w8(dense, _REPACKED_GROUP)
    shift = middle if bits == 8 else 0  # codes of 8 bits are kept signed
    return AffineWeight((codes - shift).to(torch.int8), scales.T, ((shift - zeros) * scales).T)


def word_bits(qzeros: Tensor, scales: Tensor) -> int:
    """How many bits of a word hold one zero point; 0: none, or more than a word."""
    return 32 * qzeros.shape[1] // max(1, scales.shape[1]) if qzeros.dim() == 2 else 0


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> int16 [n, m * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    fields = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return fields.flatten(1).to(torch.int16)


def _groups(g_idx: Tensor | None, cols: int, num_groups: int) -> Tensor | None:
    """The group of each input, or None where they follow one another in equal runs."""
    if cols % num_groups == 0:
        runs = torch.arange(cols) // (cols // num_groups)
        if g_idx is None or torch.equal(g_idx.long(), runs):
            return None
    if g_idx is None:
        raise ValueError(f"{num_groups} groups do not share {cols} inputs evenly")
    if g_idx.shape != (cols,) or not 0 <= int(g_idx.amin()) <= int(g_idx.amax()) < num_groups:
        raise ValueError(
            f"g_idx does not give a group below {num_groups} for each of {cols} inputs"
        )
    return g_idx.long()
