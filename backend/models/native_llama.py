"""The Llama family on the native tier: the whole step is one call into `backend/cpu/native.cpp`.

Weights stay in the file's blocks and are widened to float32 inside the kernels, so the result is that of float32
transformers on the dequantized weights up to the order of summation, at the memory traffic of the packed file.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backend.cpu import native, native_abi
from backend.cpu.native_matrix import Arena, NativeMatrix, pack_matrix
from backend.cpu.packed import PackedWeight
from backend.models.batch import Batch, KVCache
from backend.models.config import ModelConfig
from backend.models.llama import LlamaLayerWeights, LlamaWeights
from backend.models.native_cache import CachePointers, NativeCacheFormat

MAX_HEAD_DIM = 512


def build_native(
    config: ModelConfig,
    weights: LlamaWeights,
    *,
    max_position: int | None = None,
    threads: int | None = None,
    kv_dtype: torch.dtype | None = None,
    activations: str = "float32",
) -> NativeLlama | None:
    """None when this machine or this shape of model has no native tier; the portable one then serves.

    `native.native_available()` and `unsupported(config)` say why.
    """
    if unsupported(config) or native.native_available():
        return None
    return NativeLlama(
        config,
        weights,
        max_position=max_position,
        threads=threads,
        activations=activations,
        kv_dtype=kv_dtype,
    )


def unsupported(config: ModelConfig) -> str | None:
    """Why the portable tier must serve this model; None: the native one can."""
    for feature, has_it in (
        ("experts", config.experts is not None),
        ("biases of the attention products", config.attention_bias or config.attention_out_bias),
        ("norms on the heads of q and k", config.qk_norm),
        ("attention windows", any(map(config.window_of, range(config.num_layers)))),
        ("layers that share a cache", len(config.cache_layers) < config.num_layers),
        ("norms behind each half of a layer", config.sandwich_norms),
        (f"activation {config.activation}", config.activation != "silu"),
        ("scaled embedding", config.embedding_scale != 1),
        ("softcaps", bool(config.attention_softcap or config.logit_softcap)),
        ("query scale", config.query_scale is not None),
        ("yarn rope scaling", bool(config.rope_scaling and config.rope_scaling.kind == "yarn")),
    ):
        if has_it:
            return f"the native tier has no {feature}"
    if config.head_dim % 16 or config.head_dim > MAX_HEAD_DIM:
        return f"head size {config.head_dim} is no multiple of 16 up to {MAX_HEAD_DIM}"
    if config.intermediate_size % 8:
        return f"feed-forward size {config.intermediate_size} is no multiple of 8"
    return None


class NativeLlama:
    """Implements `backend.models.batch.Model`. Not thread-safe: one step at a time."""

    is_batch_invariant = True

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        *,
        max_position: int | None = None,
        threads: int | None = None,
        kv_dtype: torch.dtype | None = None,
        activations: str = "float32",
    ) -> None:
        """`activations`: "float32" multiplies exactly, "int8" rounds them to bytes, 32 columns to a scale."""
        self.config = config
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_position = max_position or config.max_position
        self.window: int | None = None
        kv_dtype = kv_dtype or torch.float32
        kv_format = str(kv_dtype).removeprefix("torch.")
        self.fingerprint = f"{weights.fingerprint}-native-{activations}-{kv_format}"
        self.activations = activations
        self.threads = threads or native.default_threads()
        self._arena = Arena()
        self._matrices: list[NativeMatrix] = []
        self._vectors: list[Tensor] = []
        self._library = native.native_library()
        self._layers = (native_abi.Layer * config.num_layers)(*map(self._layer, weights.layers))
        self._handle = self._library.tidegate_model_new(ctypes.byref(self._struct(weights)))
        if not self._handle:
            raise MemoryError("the native tier could not allocate its model or start its threads")
        self._finalizer = weakref.finalize(self, self._library.tidegate_model_free, self._handle)
        # A process that ends, or a forked child of it, has no threads to join.
        self._finalizer.atexit = False
        self._cache_format = NativeCacheFormat(config, kv_dtype)

    @property
    def weight_bytes(self) -> int:
        """Of all packed matrices; a decode step reads each once, less the rows of an untied embedding."""
        return sum(m.num_bytes for m in self._matrices)

    def kv_bytes_per_block(self, block_size: int) -> int:
        return self._cache_format.bytes_per_block(block_size)

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        return self._cache_format.allocate(num_blocks, block_size)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """-> float32 logits [num_logits, vocab_size]. Raises ValueError for a batch that points outside."""
        logits = torch.empty(len(batch.logits_rows), self.vocab_size)
        self._step(batch, kv, logits=logits)
        return logits

    @torch.inference_mode()
    def hidden_states(self, batch: Batch, kv: KVCache) -> Tensor:
        hidden = torch.empty(len(batch.logits_rows), self.hidden_size)
        self._step(batch, kv, hidden_states=hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(torch.float32).contiguous()
        if hidden.dim() != 2 or hidden.shape[1] != self.hidden_size:
            raise ValueError(f"hidden must be [rows, {self.hidden_size}], got {list(hidden.shape)}")
        logits = torch.empty(len(hidden), self.vocab_size)
        if len(hidden) and self._library.tidegate_logits(
            self._handle, hidden.data_ptr(), len(hidden), logits.data_ptr()
        ):
            raise MemoryError(f"no memory for the logits of {len(hidden)} rows")
        return logits

    def _step(self, batch: Batch, kv: KVCache, **outputs: Tensor) -> None:
        """`outputs`: which of `logits` and `hidden_states` to fill."""
        cache = self._cache_format.pointers(kv)
        inputs = _StepInputs(batch)
        if not len(inputs.token_ids):
            return
        step = inputs.struct(cache)
        for name, tensor in outputs.items():
            setattr(step, name, tensor.data_ptr())
        fault = self._library.tidegate_forward(self._handle, ctypes.byref(step))
        if fault == b"out of memory":
            raise MemoryError(f"no memory for a step of {len(inputs.token_ids)} tokens")
        if fault:
            raise ValueError(f"{fault.decode()} of this step points outside its range")

    def _struct(self, weights: LlamaWeights) -> native_abi.Config:
        c = self.config
        embed = self._matrix([weights.embed])
        tied = weights.lm_head is weights.embed
        return native_abi.Config(
            c.num_layers,
            c.hidden_size,
            c.intermediate_size,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            c.vocab_size,
            self.threads,
            self.activations == "int8",
            0,
            c.rms_norm_eps,
            1 / math.sqrt(c.head_dim),
            self._vector(weights.inv_freq),
            self._vector(weights.norm),
            embed,
            embed if tied else self._matrix([weights.lm_head]),
            self._layers,
        )

    def _layer(self, layer: LlamaLayerWeights) -> native_abi.Layer:
        assert layer.down is not None
        return native_abi.Layer(
            self._vector(layer.attn_norm),
            self._vector(layer.mlp_norm),
            self._matrix(layer.qkv),
            self._matrix([layer.attn_out]),
            self._matrix(layer.gate_up, _eight_and_eight(self.config.intermediate_size)),
            self._matrix([layer.down]),
        )

    def _matrix(
        self, weights: Sequence[PackedWeight], order: np.ndarray | None = None
    ) -> native_abi.Matrix:
        self._matrices.append(pack_matrix(weights, order, self._arena))
        return self._matrices[-1].struct

    def _vector(self, vector: Tensor) -> int:
        self._vectors.append(vector.to(torch.float32).contiguous())
        return self._vectors[-1].data_ptr()


class _StepInputs:
    """A batch in the types that the library reads; keeps them alive for the call."""

    def __init__(self, batch: Batch) -> None:
        num_tokens, num_seqs = len(batch.token_ids), len(batch.context_lens)
        self.token_ids = _int64(batch.token_ids, "token_ids", num_tokens)
        self.positions = _int64(batch.positions, "positions", num_tokens)
        self.slots = _int64(batch.slot_mapping, "slot_mapping", num_tokens)
        self.logits_rows = _int64(batch.logits_rows, "logits_rows", len(batch.logits_rows))
        self.query_start = np.asarray(batch.query_start, dtype=np.int32)
        self.context_lens = np.asarray(batch.context_lens, dtype=np.int32)
        self.tables = batch.block_tables.to(torch.int32).contiguous()
        if self.query_start.shape != (num_seqs + 1,):
            raise ValueError(
                f"query_start must have {num_seqs + 1} elements for {num_seqs} sequences"
            )
        if self.tables.dim() != 2 or len(self.tables) != num_seqs:
            raise ValueError(
                f"block_tables must be [{num_seqs}, max_blocks], got {list(self.tables.shape)}"
            )

    def struct(self, cache: CachePointers) -> native_abi.Step:
        """Without the tensors to fill."""
        return native_abi.Step(
            num_tokens=len(self.token_ids),
            num_seqs=len(self.context_lens),
            num_logits=len(self.logits_rows),
            block_size=cache.kv.block_size,
            max_blocks=self.tables.shape[1],
            num_blocks=cache.kv.num_blocks,
            kv_kind=cache.kind,
            token_ids=self.token_ids.data_ptr(),
            positions=self.positions.data_ptr(),
            slots=self.slots.data_ptr(),
            query_start=self.query_start.ctypes.data,
            context_lens=self.context_lens.ctypes.data,
            block_tables=self.tables.data_ptr(),
            logits_rows=self.logits_rows.data_ptr(),
            keys=ctypes.addressof(cache.keys),
            values=ctypes.addressof(cache.values),
            key_scales=_address(cache.key_scales),
            value_scales=_address(cache.value_scales),
        )


def _address(array: ctypes.Array[ctypes.c_void_p] | None) -> int | None:
    return None if array is None else ctypes.addressof(array)


def _int64(values: Tensor, name: str, size: int) -> Tensor:
    if values.dim() != 1 or len(values) != size:
        raise ValueError(f"{name} must have {size} elements, got {list(values.shape)}")
    return values.to(torch.int64).contiguous()


def _eight_and_eight(ffn: int) -> np.ndarray:
    """Gate rows and up rows in turns of eight, so that one panel holds both sides of eight gated values."""
    return np.arange(2 * ffn).reshape(2, ffn // 8, 8).swapaxes(0, 1).reshape(-1)
