"""The structs of `native.cpp`, field by field; what each points to must outlive the call or the model."""

from __future__ import annotations

import ctypes
from typing import Any


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Matrix(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("attn_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("qkv", Matrix),
        ("attn_out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    ]


class Config(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_int32, "num_layers hidden ffn heads kv_heads head_dim vocab threads"),
        *_fields(ctypes.c_int32, "byte_activations unused"),
        *_fields(ctypes.c_float, "eps score_scale"),
        *_fields(ctypes.c_void_p, "inv_freq norm"),
        ("embed", Matrix),
        ("lm_head", Matrix),
        ("layers", ctypes.POINTER(Layer)),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *_fields(
            ctypes.c_int32,
            "num_tokens num_seqs num_logits block_size max_blocks num_blocks kv_kind",
        ),
        *_fields(
            ctypes.c_void_p, "token_ids positions slots query_start context_lens block_tables"
        ),
        *_fields(ctypes.c_void_p, "logits_rows keys values key_scales value_scales"),
        *_fields(ctypes.c_void_p, "logits hidden_states"),
    ]


class DrawRule(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_double, "temperature top_p"),
        *_fields(ctypes.c_float, "peak floor"),
        *_fields(ctypes.c_int32, "top_k unused"),
        ("key", ctypes.c_uint64),
    ]
