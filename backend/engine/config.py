"""How large the engine may grow. No torch: the gateway and the worker's command line read it too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from backend.engine.params import Pooling

CPU_KV_CACHE_SHARE = 0.25  # of the memory that is free at start
CPU_KV_CACHE_MAX_GB = 2.0


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one engine. Raises ValueError naming the field that is out of range."""

    block_size: int = 16  # tokens in one KV block
    max_num_seqs: int = 64  # requests that decode together
    max_num_batched_tokens: int = 512  # tokens computed in one step, prefill and decode together
    kv_cache_gb: float | None = None  # None: a quarter of the free memory, at most 2 GB
    max_model_len: int | None = (
        None  # None: the model's own, or what the pool holds if that is less
    )
    num_blocks: int | None = None  # None: as many as kv_cache_gb holds
    enable_prefix_cache: bool = True
    deterministic: bool = False  # refuse a model whose last bits depend on what else a step holds
    speculative: Literal["off", "ngram"] = "off"  # who guesses, where no draft model does
    pooling: Pooling = "mean"  # how the hidden states of a prompt become one vector

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_gb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")


def kv_cache_blocks(config: EngineConfig, bytes_per_block: int) -> int:
    """How many KV blocks the configured (or the free) memory holds. ValueError when not even one."""
    if config.num_blocks is not None:
        return config.num_blocks
    cache_bytes = int((config.kv_cache_gb or _default_kv_cache_gb()) * 1e9)
    if cache_bytes < bytes_per_block:
        raise ValueError(
            f"kv_cache_gb leaves {cache_bytes} bytes, and one block of {config.block_size} tokens "
            f"takes {bytes_per_block}"
        )
    return cache_bytes // bytes_per_block


def _default_kv_cache_gb() -> float:
    return min(CPU_KV_CACHE_MAX_GB, CPU_KV_CACHE_SHARE * _free_memory_bytes() / 1e9)


def _free_memory_bytes() -> int:
    """Memory this process may still take: the machine's, or its container's if that is less."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free
