from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.models.chat_template import TemplateError
from backend.models.checkpoint import SafetensorsCheckpoint
from backend.models.config import RopeScaling
from backend.models.errors import ModelLoadError
from backend.models.gguf_config import config_from_gguf
from backend.models.hf_config import config_from_hf
from backend.models.llama import Llama
from backend.models.loader import LoadedModel, load_model
from backend.models.native_llama import NativeLlama
from tests.backend import tiny_llama
from tests.backend.tiny_llama import CONFIG, step

IDS = [3, 40, 41, 200, 7, 99]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write_folder(
        tmp_path_factory.mktemp("models") / "tiny-llama", tiny_llama.tensors()
    )


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write_gguf(
        tmp_path_factory.mktemp("models") / "tiny.Q.gguf", tiny_llama.tensors()
    )


def logits(loaded: LoadedModel) -> torch.Tensor:
    model = loaded.model
    return step(model, model.new_kv_cache(4, 16), [IDS], [len(IDS)], [[0]])[0]


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(path, native=False, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_loads_with_all_its_parts(folder: Path) -> None:
    loaded = load_model(folder, native=False)
    assert loaded.name == "tiny-llama"
    assert loaded.config == CONFIG
    assert loaded.tokenizer.encode("hello") == [tiny_llama.TOKENS.index("hello")]
    assert loaded.tokenizer.bos_id == 1
    assert loaded.tokenizer.eos_ids == {0, 2}
    assert loaded.chat_template is not None
    rendered = loaded.chat_template.render([{"role": "user", "content": "hi"}], None)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_gguf_loads_with_all_its_parts(gguf_path: Path) -> None:
    loaded = load_model(gguf_path, native=False)
    assert loaded.name == "tiny.Q"
    assert loaded.config == CONFIG
    assert loaded.tokenizer.encode("hello") == [tiny_llama.TOKENS.index("hello")]
    assert loaded.tokenizer.bos_id == 1
    assert loaded.tokenizer.eos_ids == {0, 2}
    assert loaded.chat_template is not None


def test_a_folder_that_holds_one_gguf_loads_it(gguf_path: Path) -> None:
    assert load_model(gguf_path.parent, native=False).name == "tiny.Q"


def test_both_tiers_answer_alike(gguf_path: Path) -> None:
    portable, native = (load_model(gguf_path, native=wanted) for wanted in (False, True))
    assert isinstance(portable.model, Llama)
    if not isinstance(native.model, NativeLlama):
        pytest.skip("no native tier on this machine")
    assert torch.allclose(logits(portable), logits(native), atol=1e-4)


def test_shards_answer_like_a_single_file(tmp_path: Path, folder: Path) -> None:
    sharded = tiny_llama.write_folder(tmp_path, tiny_llama.tensors(), shards=3)
    assert len(list(sharded.glob("*.safetensors"))) == 3
    assert torch.equal(
        logits(load_model(sharded, native=False)), logits(load_model(folder, native=False))
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_checkpoints_load(tmp_path: Path, folder: Path, dtype: str) -> None:
    weights = {name: t.to(getattr(torch, dtype)) for name, t in tiny_llama.tensors().items()}
    half = load_model(tiny_llama.write_folder(tmp_path, weights), native=False, dtype="float32")
    assert (
        logits(half) - logits(load_model(folder, native=False, dtype="float32"))
    ).abs().max() < 0.05


def test_a_shorter_context_can_be_asked_for(folder: Path) -> None:
    loaded = load_model(folder, native=False, max_model_len=40)
    assert loaded.config.max_position == loaded.model.max_position == 40


def test_a_longer_context_than_the_models_is_refused_with_the_numbers(folder: Path) -> None:
    assert "between 1 and 128, the model's own limit; got 129" in refused(folder, max_model_len=129)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "fp8"}, "dtype must be one of auto, float32, bfloat16; got 'fp8'"),
        ({"quantization": "w2"}, "quantization must be one of auto, none, w8, w4, w8a8; got 'w2'"),
        ({"quantization": "w8a8", "dtype": "bfloat16"}, "w8a8 needs dtype float32"),
        ({"quantization": "w8a8", "activations": "float32"}, "w8a8 needs activations int8 or auto"),
        ({"activations": "int4"}, "activations must be one of auto, float32, int8; got 'int4'"),
        ({"activations": "int8", "dtype": "bfloat16"}, "activations int8 needs dtype float32"),
    ],
)
def test_a_number_format_that_we_do_not_have_is_refused(
    folder: Path, options: dict[str, str], says: str
) -> None:
    assert says in refused(folder, **options)


@pytest.mark.parametrize("quantization", ["none", "w8", "w4", "w8a8"])
def test_both_tiers_answer_alike_in_each_quantization(gguf_path: Path, quantization: str) -> None:
    portable, native = (
        load_model(gguf_path, native=wanted, dtype="float32", quantization=quantization)
        for wanted in (False, True)
    )
    if not isinstance(native.model, NativeLlama):
        pytest.skip("no native tier on this machine")
    assert torch.allclose(logits(portable), logits(native), atol=1e-4)


@pytest.mark.parametrize("native", [False, True])
def test_w8a8_is_w8_with_activations_in_bytes(folder: Path, native: bool) -> None:
    first, second = (
        load_model(folder, native=native, quantization=quantization, activations=activations)
        for quantization, activations in (("w8a8", "auto"), ("w8", "int8"))
    )
    assert first.model.fingerprint == second.model.fingerprint
    assert torch.equal(logits(first), logits(second))


def test_none_widens_the_blocks_of_a_quantized_file(tmp_path: Path) -> None:
    path = tiny_llama.write_gguf(tmp_path / "q.gguf", tiny_llama.tensors(), kind="Q4_1")
    packed, dense = (
        load_model(path, native=False, dtype="float32", quantization=quantization)
        for quantization in ("auto", "none")
    )
    assert packed.model.fingerprint != dense.model.fingerprint
    assert torch.equal(logits(packed), logits(dense))


def test_a_width_that_a_format_cannot_hold_names_the_tensor(tmp_path: Path) -> None:
    weights = tiny_llama.tensors()
    for layer in range(CONFIG.num_layers):
        for name, cut in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            key = f"model.layers.{layer}.mlp.{name}.weight"
            weights[key] = weights[key].narrow(cut, 0, 80)
    folder = tiny_llama.write_folder(tmp_path, weights, intermediate_size=80)
    assert refused(folder, quantization="w4").endswith(
        "tensor model.layers.0.mlp.down_proj.weight: w4 needs a width that is a multiple of 32, got 80"
    )


@pytest.mark.parametrize("native", [False, True])
def test_rounded_activations_are_part_of_the_fingerprint(folder: Path, native: bool) -> None:
    models = [load_model(folder, native=native, activations=a).model for a in ("auto", "int8")]
    assert models[0].fingerprint != models[1].fingerprint


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such file or folder"


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path).startswith(
        f"{tmp_path}: neither a config.json nor exactly one .gguf file"
    )


def damaged(folder: Path, name: str, content: bytes | None) -> Path:
    tiny_llama.write_folder(folder, tiny_llama.tensors())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", b"{", "config.json: cannot be read as JSON"),
        ("config.json", b"[]", "config.json: expected a JSON object"),
        ("config.json", b"\xff\xfe", "config.json: cannot be read as JSON"),
        ("model.safetensors", None, "model.safetensors: no such file"),
        ("model.safetensors", b"", "model.safetensors: not a readable safetensors file"),
        ("model.safetensors", b"\xff" * 64, "model.safetensors: not a readable safetensors file"),
        ("model.safetensors.index.json", b"{}", "index.json: weight_map is missing"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', "is missing"),
        ("tokenizer.json", None, "tokenizer.json: no such file"),
        ("tokenizer.json", b"{}", "tokenizer.json: not a readable tokenizer"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "chat template"),
        ("generation_config.json", b"nope", "generation_config.json: cannot be read as JSON"),
    ],
)
def test_a_damaged_folder_is_named_with_its_fault(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    message = refused(damaged(tmp_path, name, content))
    assert str(tmp_path) in message
    assert says in message


def test_a_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    folder = tiny_llama.write_folder(tmp_path, tiny_llama.tensors())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert str(path) in refused(folder)


def test_a_checkpoint_in_integers_is_refused(tmp_path: Path) -> None:
    weights = tiny_llama.tensors()
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int32)
    assert "model.norm.weight is stored as torch.int32" in refused(
        tiny_llama.write_folder(tmp_path, weights)
    )


def test_a_shard_that_points_outside_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tiny_llama.write_folder(tmp_path / "inside", tiny_llama.tensors())
    (tmp_path / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    weight_map = dict.fromkeys(tiny_llama.tensors(), "../outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "inside/outside.safetensors: no such file" in refused(folder)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["BertModel"]}, "architectures ['BertModel'] not supported"),
        ({"architectures": None}, "not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size has the unexpected value '64'"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 KV heads"),
        ({"head_dim": 15}, "head size 15 is odd"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers has the unexpected value 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quant_method None"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "original_max_position_embeddings is missing",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope scaling 'longrope' is not supported; supported: default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
        ({"vocab_size": 300}, "is [272, 64], expected [300, 64]"),
    ],
)
def test_a_config_that_cannot_run_is_named(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    assert says in refused(tiny_llama.write_folder(tmp_path, tiny_llama.tensors(), **config))


HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}


def test_absent_settings_take_the_formats_defaults() -> None:
    config = config_from_hf(HF, "config.json")
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert config.rope_scaling is None
    assert not config.tie_word_embeddings


def test_rope_settings_are_read_from_their_new_place_too() -> None:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = config_from_hf({**HF, "rope_parameters": llama3}, "config.json")
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_linear_rope_scaling_is_read_from_gguf() -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
    }
    assert config_from_gguf(metadata, 32, "x.gguf").rope_scaling == RopeScaling("linear", 2.0)


def test_rope_divisors_in_a_gguf_are_applied(tmp_path: Path) -> None:
    weights = tiny_llama.tensors()
    plain = load_model(tiny_llama.write_gguf(tmp_path / "plain.gguf", weights), native=False)
    divisors = {"rope_freqs.weight": torch.full((CONFIG.head_dim // 2,), 4.0)}
    scaled = load_model(
        tiny_llama.write_gguf(tmp_path / "scaled.gguf", weights | divisors), native=False
    )
    linear = load_model(
        tiny_llama.write_folder(
            tmp_path / "linear", weights, rope_scaling={"type": "linear", "factor": 4.0}
        ),
        native=False,
    )
    assert torch.allclose(logits(scaled), logits(linear), atol=1e-5)
    assert not torch.allclose(logits(scaled), logits(plain), atol=1e-3)


def test_more_tokens_than_embedding_rows_are_refused(tmp_path: Path) -> None:
    tokens = [*tiny_llama.TOKENS, "one too many"]
    path = tiny_llama.write_gguf(
        tmp_path / "x.gguf", tiny_llama.tensors(), tokenizer__ggml__tokens=tokens
    )
    assert "273 tokens but only 272 embedding rows" in refused(path)


def test_a_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    folder = tiny_llama.write_folder(tmp_path, tiny_llama.tensors())
    (folder / "chat_template.jinja").write_text("from the file")
    template = load_model(folder, native=False).chat_template
    assert template is not None
    assert template.render([], None) == "from the file"


def test_named_templates_serve_requests_with_and_without_tools(tmp_path: Path) -> None:
    folder = tiny_llama.write_folder(tmp_path, tiny_llama.tensors())
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools|length }} tools"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = load_model(folder, native=False).chat_template
    assert template is not None
    assert template.render([], None) == "plain"
    assert template.render([], [{}]) == "1 tools"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    folder = tiny_llama.write_folder(tmp_path, tiny_llama.tensors())
    (folder / "tokenizer_config.json").unlink()
    assert load_model(folder, native=False).chat_template is None


def test_the_templates_special_tokens_are_the_models(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ eos_token }}{% if not messages %}{{ raise_exception('empty') }}{% endif %}"
    path = tiny_llama.write_gguf(
        tmp_path / "x.gguf", tiny_llama.tensors(), tokenizer__chat_template=template
    )
    chat_template = load_model(path, native=False).chat_template
    assert chat_template is not None
    assert chat_template.render([{"role": "user", "content": ""}], None) == "<|im_start|><|im_end|>"
    with pytest.raises(TemplateError, match=r"^empty$"):
        chat_template.render([], None)


def test_reading_a_shard_is_put_off_until_its_weight_is_wanted(tmp_path: Path) -> None:
    folder = tiny_llama.write_folder(tmp_path, tiny_llama.tensors(), shards=2)
    checkpoint = SafetensorsCheckpoint(folder)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(ModelLoadError, match="no such file"):
        checkpoint.weight("model.norm.weight")
