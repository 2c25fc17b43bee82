"""What each family's settings mean, as published config.json files and GGUF headers write them."""

from __future__ import annotations

from typing import Any

import pytest

from backend.models.config import ModelConfig, RopeScaling
from backend.models.errors import ModelLoadError
from backend.models.gguf_config import config_from_gguf
from backend.models.hf_config import config_from_hf
from backend.models.native_llama import unsupported
from tests.backend import tiny_families

WINDOW = 512


def hf(architecture: str, **changes: Any) -> ModelConfig:
    document = {
        "architectures": [architecture],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
    }
    document |= changes
    return config_from_hf({k: v for k, v in document.items() if v != "absent"}, "config.json")


def gguf(arch: str, **changes: Any) -> ModelConfig:
    keys = {
        "block_count": 6,
        "context_length": 8192,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"{arch}.{key}": value for key, value in keys.items()}
    return config_from_gguf({"general.architecture": arch, **metadata}, 1000, "x.gguf")


# Windows


def test_every_layer_of_mistral_has_its_window() -> None:
    config = hf("MistralForCausalLM", sliding_window=WINDOW)
    assert config.windows == (WINDOW,) * 6
    assert config.window == WINDOW


@pytest.mark.parametrize(("value", "wanted"), [(None, None), ("absent", 4096)])
def test_a_mistral_without_a_window_says_null(value: Any, wanted: int | None) -> None:
    assert hf("MistralForCausalLM", sliding_window=value).window == wanted


def test_a_window_that_no_context_outgrows_is_none() -> None:
    config = hf("MistralForCausalLM", sliding_window=WINDOW).limited_to(WINDOW)
    assert config.window is None
    assert unsupported(config) is None


def test_llama_has_no_window_whatever_its_file_says() -> None:
    assert hf("LlamaForCausalLM", sliding_window=WINDOW).windows == ()


def test_qwen_has_windows_only_where_it_uses_them() -> None:
    off = hf("Qwen2ForCausalLM", sliding_window=WINDOW, max_window_layers=4)
    on = hf("Qwen2ForCausalLM", sliding_window=WINDOW, max_window_layers=4, use_sliding_window=True)
    assert off.windows == ()
    assert on.windows == (None,) * 4 + (WINDOW,) * 2
    assert on.window is None


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3"])
def test_files_without_layer_types_follow_the_familys_rule(name: str) -> None:
    settings = tiny_families.settings(name)
    named = config_from_hf(settings, "config.json")
    del settings["layer_types"]
    settings["sliding_window_pattern"] = 2  # Gemma 3: the last of so many layers sees all
    assert config_from_hf(settings, "config.json").windows == named.windows


def test_the_window_of_a_model_is_the_largest_of_its_layers() -> None:
    config = hf("Gemma2ForCausalLM", sliding_window=WINDOW, layer_types=["sliding_attention"] * 6)
    assert config.window == WINDOW


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_nothing_is_refused(window: int) -> None:
    with pytest.raises(ModelLoadError, match=f"an attention window of {window} tokens"):
        hf("Gemma2ForCausalLM", sliding_window=window)


# Gemma


def test_gemma_3_takes_its_defaults_from_its_class_as_published_files_do() -> None:
    """google/gemma-3-4b: the text part names only what differs."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    document = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    config = config_from_hf(document, "config.json")
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    assert (config.head_dim, config.max_position, config.query_scale) == (256, 131072, 1 / 16)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 10000.0)
    assert config.rope_scaling == RopeScaling("linear", 8.0)
    assert config.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert (config.tie_word_embeddings, config.activation) == (True, "gelu_tanh")
    assert (config.attention_softcap, config.logit_softcap) == (None, None)


def test_gemma_3_takes_its_bases_from_old_and_new_keys_alike() -> None:
    old = hf("Gemma3ForCausalLM", rope_theta=5e5, rope_local_base_freq=2e4)
    by_kind = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    assert hf("Gemma3ForCausalLM", rope_parameters=by_kind) == old


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types has the unexpected value"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "rope scaling 'yarn' of layers with a window is not supported",
        ),
    ],
)
def test_a_gemma_that_cannot_run_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        hf("Gemma3ForCausalLM", **changes)


def test_gemma_3_ggufs_may_leave_the_period_of_their_windows_to_the_reader() -> None:
    config = gguf("gemma3", attention__sliding_window=WINDOW)
    assert config.windows == (WINDOW,) * 5 + (None,)
    assert gguf(
        "gemma3", attention__sliding_window=WINDOW, attention__sliding_window_pattern=3
    ).windows == (WINDOW, WINDOW, None, WINDOW, WINDOW, None)


def test_the_widest_gemmas_scale_their_scores_by_the_models_width() -> None:
    wide = gguf("gemma3", attention__sliding_window=WINDOW, block_count=62)
    assert wide.query_scale == (64 / 4) ** -0.5
    narrow = gguf(
        "gemma3",
        attention__sliding_window=WINDOW,
        attention__key_length=32,
        attention__value_length=32,
    )
    assert narrow.query_scale == 32**-0.5


def test_gemma_2_has_its_caps_unless_the_file_takes_them_away() -> None:
    config = hf("Gemma2ForCausalLM")
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    bare = hf("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (bare.attention_softcap, bare.logit_softcap) == (None, None)


# Rotary scaling


def test_yarn_reaches_as_far_as_its_factor_says() -> None:
    """Qwen's model cards add the scaling and leave max_position_embeddings at the trained length."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = hf("Qwen2ForCausalLM", max_position_embeddings=32768, rope_scaling=yarn)
    assert config.max_position == 131072
    assert config.rope_scaling is not None
    assert config.rope_scaling.attention_factor == pytest.approx(1.1386294)


def test_yarns_weights_of_the_logarithm_are_a_ratio() -> None:
    yarn = {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    scaling = hf("LlamaForCausalLM", rope_scaling=yarn).rope_scaling
    assert scaling is not None
    assert scaling.attention_factor == 1.0


def test_yarn_is_read_from_gguf() -> None:
    scaling = gguf(
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32768,
    ).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_max_position) == ("yarn", 4.0, 32768)
    assert scaling.attention_factor == pytest.approx(1.1386294)


# Experts and shared caches


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 5}, "5 of 4 experts for each token"),
        ({"num_local_experts": "absent"}, "num_local_experts is missing"),
        ({"num_local_experts": 0, "num_experts_per_tok": 0}, "0 of 0 experts"),
    ],
)
def test_experts_that_make_no_sense_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        hf("MixtralForCausalLM", **({"num_local_experts": 4, "num_experts_per_tok": 2} | changes))


def test_every_second_layer_may_have_the_experts() -> None:
    config = hf(
        "Qwen3MoeForCausalLM",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    )
    assert [layer for layer in range(6) if config.has_experts(layer)] == [3, 5]


def test_the_last_layers_share_the_cache_of_the_last_of_their_kind() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    config = hf(
        "Gemma2ForCausalLM", sliding_window=WINDOW, layer_types=kinds, num_kv_shared_layers=3
    )
    assert config.kv_sources == (0, 1, 2, 1, 2, 1)
    assert config.cache_layers == [0, 1, 2]


def test_a_shared_cache_without_a_source_is_named() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    with pytest.raises(ModelLoadError, match="leaves no layer of its own with window None"):
        hf("Gemma2ForCausalLM", layer_types=kinds, num_kv_shared_layers=1)


# What the native tier leaves to the portable one


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gemma2", "attention windows"),
        ("gemma3", "norms on the heads"),
        ("llama", "biases of the attention products"),
        ("llama_shared_kv", "layers that share a cache"),
        ("mistral", "attention windows"),
        ("mixtral", "experts"),
        ("qwen2", "biases of the attention products"),
        ("qwen3", "norms on the heads"),
    ],
)
def test_the_native_tier_says_what_it_lacks(name: str, says: str) -> None:
    reason = unsupported(config_from_hf(tiny_families.settings(name), "config.json"))
    assert reason is not None
    assert reason.startswith("the native tier has no")
    assert says in reason
