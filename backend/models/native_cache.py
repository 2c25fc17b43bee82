"""The KV cache of the native tier: how it is allocated, and where `native.cpp` finds it.

The keys of a block lie as `[block_size / 16, head_dim, 16]`: whole blocks may be copied, single tokens are not
contiguous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from backend.cpu.native_matrix import huge_pages
from backend.models.batch import KVCache
from backend.models.config import ModelConfig
from backend.quant.kv import Int8Cache, KVTensor, row_bytes

KEYS_ABREAST = 16  # keys that lie side by side in a block; block_size must be a multiple
KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # in the order of `enum KVKind`


class NativeCacheFormat:
    """Allocates caches of one model, and checks those that come back. `dtype`: one of KV_DTYPES."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        if dtype not in KV_DTYPES:
            raise ValueError(f"the native tier has no KV cache of {dtype}")
        self._config, self._dtype = config, dtype
        self._latest: CachePointers | None = None

    def bytes_per_block(self, block_size: int) -> int:
        c = self._config
        return 2 * c.num_layers * c.num_kv_heads * block_size * row_bytes(c.head_dim, self._dtype)

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        if block_size % KEYS_ABREAST:
            raise ValueError(f"block_size must be a multiple of {KEYS_ABREAST}, got {block_size}")
        c = self._config
        shape = (2, c.num_layers, *self._shape(num_blocks, block_size))
        cells = huge_pages(shape, self._dtype).zero_()
        keys: list[KVTensor] = list(cells[0])
        values: list[KVTensor] = list(cells[1])
        if self._dtype == torch.int8:
            scales = huge_pages(shape[:-1], torch.float32).zero_()
            keys = list(map(Int8Cache, cells[0], scales[0]))
            values = list(map(Int8Cache, cells[1], scales[1]))
        return KVCache(keys, values, block_size)

    def pointers(self, kv: KVCache) -> CachePointers:
        """Raises ValueError for a cache that `allocate` would not make."""
        if self._latest is None or self._latest.kv is not kv:
            self._check(kv)
            self._latest = CachePointers(kv, KV_DTYPES.index(self._dtype))
        return self._latest

    def _shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int]:
        return (self._config.num_kv_heads, num_blocks, block_size, self._config.head_dim)

    def _check(self, kv: KVCache) -> None:
        if {len(kv.keys), len(kv.values)} != {self._config.num_layers}:
            raise ValueError("this cache was not made by new_kv_cache of this model")
        if kv.block_size % KEYS_ABREAST:
            raise ValueError("this cache was not made by new_kv_cache of this model")
        shape = self._shape(kv.num_blocks, kv.block_size)
        for layer in (*kv.keys, *kv.values):
            cells = layer.codes if isinstance(layer, Int8Cache) else layer
            if cells.shape != shape or cells.dtype != self._dtype or not cells.is_contiguous():
                kind = str(self._dtype).removeprefix("torch.")
                raise ValueError(f"the cache of a layer must be contiguous {kind} {list(shape)}")


class CachePointers:
    """What `native_abi.Step` holds of a cache; keeps it alive."""

    def __init__(self, kv: KVCache, kind: int) -> None:
        self.kv, self.kind = kv, kind
        self.keys, self.key_scales = _layers(kv.keys)
        self.values, self.value_scales = _layers(kv.values)


_Pointers = ctypes.Array[ctypes.c_void_p]


def _layers(layers: Sequence[KVTensor]) -> tuple[_Pointers, _Pointers | None]:
    """Cells and scales, a pointer for each layer."""
    if isinstance(layers[0], Int8Cache):
        quantized = [layer for layer in layers if isinstance(layer, Int8Cache)]
        return _array([c.codes for c in quantized]), _array([c.scales for c in quantized])
    return _array([layer for layer in layers if isinstance(layer, Tensor)]), None


def _array(tensors: Sequence[Tensor]) -> _Pointers:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
