"""The shape of a model, whatever file it came from. What a family leaves out keeps the default: a plain Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from backend.models.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts: "linear", "llama3" (frequency bands) or "yarn".

    `attention_factor` multiplies the rotated queries and keys (YaRN, https://arxiv.org/abs/2309.00071, section 3.4).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True  # yarn: the ramp begins and ends at whole pairs


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """A feed-forward of many experts, of which each row takes the few that its router scores highest."""

    num_experts: int
    per_token: int
    intermediate_size: int  # of one expert
    renormalize: bool  # the weights of the chosen experts sum to 1
    shared_size: int = 0  # of the expert that every row takes besides; 0: there is none
    dense_layers: tuple[int, ...] = ()  # layers with one plain feed-forward


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # longest context, in tokens
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    attention_out_bias: bool = False
    qk_norm: bool = False  # each head of q and k is normed before it is rotated
    windows: tuple[int | None, ...] = ()  # a layer: positions a row sees, its own included; (): all
    kv_sources: tuple[int, ...] = ()  # a layer: whose keys and values it reads; (): its own
    local_rope_theta: float | None = None  # of layers with a window, unscaled; None: as the others
    query_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    activation: str = "silu"  # or "gelu_tanh"
    sandwich_norms: bool = False  # what a layer part gives is normed before it is added, too
    experts: ExpertConfig | None = None

    def window_of(self, layer: int) -> int | None:
        """None: the layer sees the whole context, be it by a window that no context outgrows."""
        window = self.windows[layer] if self.windows else None
        return None if window is None or window >= self.max_position else window

    def is_local(self, layer: int) -> bool:
        """Whether the layer is of the kind that has a window, whatever the longest context is."""
        return bool(self.windows) and self.windows[layer] is not None

    @property
    def window(self) -> int | None:
        """Tokens further back than this are read by no layer; None: some layer reads them all."""
        windows = [self.window_of(layer) for layer in range(self.num_layers)]
        seen = [window for window in windows if window is not None]
        return max(seen) if len(seen) == len(windows) else None

    def kv_source(self, layer: int) -> int:
        return self.kv_sources[layer] if self.kv_sources else layer

    @property
    def cache_layers(self) -> list[int]:
        """The layers that write keys and values, in order: one pair of cache tensors each."""
        return [layer for layer in range(self.num_layers) if self.kv_source(layer) == layer]

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def limited_to(self, max_model_len: int | None) -> ModelConfig:
        """The same model with a shorter context; never a longer one."""
        if max_model_len is None:
            return self
        if not 1 <= max_model_len <= self.max_position:
            raise ModelLoadError(
                f"max_model_len must be between 1 and {self.max_position}, the model's own limit;"
                f" got {max_model_len}"
            )
        return replace(self, max_position=max_model_len)

    def check(self, source: str) -> ModelConfig:
        """Refuse shapes that no file of ours can run; `source` names the file in the error."""
        fault = self._size_fault() or self._layer_fault() or self._expert_fault()
        if fault:
            raise ModelLoadError(f"{source}: {fault}")
        return self

    def _size_fault(self) -> str | None:
        sizes = {
            "vocabulary size": self.vocab_size,
            "hidden size": self.hidden_size,
            "feed-forward size": self.intermediate_size,
            "number of layers": self.num_layers,
            "number of heads": self.num_heads,
            "number of KV heads": self.num_kv_heads,
            "head size": self.head_dim,
            "context length": self.max_position,
        }
        for name, value in sizes.items():
            if not 1 <= value <= 1 << 24:
                return f"the {name} is {value}"
        if self.num_layers > 1024 or self.head_dim > 1 << 16:
            return f"{self.num_layers} layers with heads of {self.head_dim} are no model"
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly"
        if self.head_dim % 2:
            return f"head size {self.head_dim} is odd: rotary embedding needs pairs"
        return None

    def _layer_fault(self) -> str | None:
        for name, each in (("windows", self.windows), ("KV sources", self.kv_sources)):
            if each and len(each) != self.num_layers:
                return f"{len(each)} {name} for {self.num_layers} layers"
        for window in self.windows:
            if window is not None and window < 1:
                return f"an attention window of {window} tokens"
        for layer, source in enumerate(self.kv_sources):
            if not 0 <= source <= layer or self.kv_sources[source] != source:
                return f"layer {layer} cannot take its keys and values from layer {source}"
        return None

    def _expert_fault(self) -> str | None:
        experts = self.experts
        if experts is None:
            return None
        if not 1 <= experts.per_token <= experts.num_experts <= 1 << 12:
            return f"{experts.per_token} of {experts.num_experts} experts for each token"
        if not 1 <= experts.intermediate_size <= 1 << 24 or experts.shared_size < 0:
            return f"an expert size of {experts.intermediate_size} and {experts.shared_size}"
        return None
