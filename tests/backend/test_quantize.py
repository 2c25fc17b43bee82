"""`tidegate quantize`: what it writes is served as it was, only smaller; what it refuses leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.models.errors import ModelLoadError
from backend.models.gguf import GGUFFile
from backend.models.loader import LoadedModel, load_model
from backend.models.prequantized import open_folder
from backend.quant.weights import is_quantized
from backend.quantize import folder_copy
from backend.quantize.calibration import calibrate
from backend.quantize.command import _appearing, main
from backend.quantize.conversion import Conversion
from tests.backend import tiny_llama

IDS = [3, 40, 41, 200, 7, 7, 99, 150, 31, 12, 64, 5, 77, 180, 21, 90, 33, 34, 35, 36, 37, 210, 8]
TEXT = "The cat sat on the mat, and said hello to the world. " * 40


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write_folder(tmp_path_factory.mktemp("tiny") / "model", tiny_llama.tensors())


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write_gguf(
        tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama.tensors()
    )


def logits(loaded: LoadedModel, ids: list[int] = IDS) -> Tensor:
    kv = loaded.model.new_kv_cache(32, 4)
    return tiny_llama.step(loaded.model, kv, [ids], [len(ids)], [list(range(32))])


def portable(path: Path, quantization: str = "auto") -> LoadedModel:
    return load_model(path, dtype="float32", native=False, quantization=quantization)


@pytest.mark.parametrize("to", ["w8", "w4"])
@pytest.mark.parametrize("source", ["folder", "gguf_file"])
def test_the_copy_computes_what_quantizing_at_start_computes(
    source: str, to: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(source)
    assert main([str(path), "--to", to, "--out", str(tmp_path / "out"), "--report-tokens=0"]) == 0
    assert torch.equal(logits(portable(tmp_path / "out")), logits(portable(path, to)))
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("source", ["folder", "gguf_file"])
def test_tokenizer_and_template_go_along(
    source: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(source)
    main([str(path), "--to", "w4", "--out", str(tmp_path / "out"), "--report-tokens=0"])
    before, after = portable(path), portable(tmp_path / "out")
    messages = [{"role": "user", "content": "hello world"}]
    assert before.chat_template is not None
    assert after.chat_template is not None
    text = before.chat_template.render(messages, None)
    assert after.chat_template.render(messages, None) == text
    assert after.tokenizer.encode(text) == before.tokenizer.encode(text)
    assert after.tokenizer.eos_ids == before.tokenizer.eos_ids


def test_who_may_read_the_settings_may_read_the_weights(folder: Path, tmp_path: Path) -> None:
    main([str(folder), "--to", "w8", "--out", str(tmp_path / "out"), "--report-tokens=0"])
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_all_but_the_matrices_of_a_gguf_file_stays_byte_for_byte(
    gguf_file: Path, tmp_path: Path
) -> None:
    main([str(gguf_file), "--to", "w8", "--out", str(tmp_path / "out"), "--report-tokens=0"])
    before, after = GGUFFile(gguf_file), GGUFFile(tmp_path / "out" / "tiny-w8.gguf")
    assert after.metadata_bytes.tobytes() == before.metadata_bytes.tobytes()
    assert list(after.tensors) == list(before.tensors)
    kept = [name for name in before.tensors if after.tensors[name].kind == "F32"]
    assert {"token_embd.weight", "output.weight", "blk.0.attn_norm.weight"} <= set(kept)
    assert after.tensors["blk.1.ffn_down.weight"].kind == "Q8_0"
    for name in kept:
        assert after.tensor(name).raw.tobytes() == before.tensor(name).raw.tobytes()


def test_other_programs_read_the_gguf_file(gguf_file: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    main([str(gguf_file), "--to", "w4", "--out", str(tmp_path / "out"), "--report-tokens=0"])
    reader = GGUFReader(tmp_path / "out" / "tiny-w4.gguf")
    assert {t.name: list(t.shape) for t in reader.tensors} == {
        name: list(reversed(info.dims)) for name, info in GGUFFile(gguf_file).tensors.items()
    }


@pytest.mark.timeout(300)
def test_the_command_reports_before_and_after(folder: Path, tmp_path: Path) -> None:
    """The whole way: the gateway's command line, another process, a table."""
    arguments = ["--to", "w4", "--group-size", "32", "--out", str(tmp_path / "out")]
    arguments += ["--report-tokens", "150", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "quantize", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    for row in ("weights, MB", "perplexity", "output tokens/s"):
        (line,) = [line for line in done.stdout.splitlines() if row in line]
        assert line.count("│") == 5
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings == {"quant_method": "tidegate", "format": "w4", "group_size": 32}


def test_large_models_are_written_in_shards(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_copy, "SHARD_BYTES", 20_000)
    main([str(folder), "--to", "w8", "--out", str(tmp_path / "out"), "--report-tokens=0"])
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert torch.equal(logits(portable(tmp_path / "out")), logits(portable(folder, "w8")))


def test_calibration_sees_what_the_matrices_meet(folder: Path) -> None:
    moments = calibrate(folder, TEXT, note=lambda num_tokens: None)
    importance = moments.importance("model.layers.0.self_attn.q_proj.weight")
    assert importance is not None
    weights = tiny_llama.tensors()
    token_ids = torch.tensor(portable(folder).tokenizer.encode(TEXT))
    x = weights["model.embed_tokens.weight"][token_ids]
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + tiny_llama.CONFIG.rms_norm_eps)
    x = x * weights["model.layers.0.input_layernorm.weight"]
    torch.testing.assert_close(importance, x.square().mean(0), rtol=1e-4, atol=1e-5)
    assert moments.importance("lm_head.weight") is None


def test_calibration_errs_less_where_inputs_are_large(folder: Path, tmp_path: Path) -> None:
    """The error of a product, by the mean squares of its inputs: it falls for every matrix of the model."""
    (tmp_path / "text").write_text(TEXT)
    moments = calibrate(folder, TEXT, note=lambda num_tokens: None)
    for name, extra in (("plain", []), ("fitted", [f"--calibrate={tmp_path / 'text'}"])):
        out = f"--out={tmp_path / name}"
        assert main([str(folder), "--to=w4", out, "--report-tokens=0", *extra]) == 0
    exact, plain, fitted = map(open_folder, (folder, tmp_path / "plain", tmp_path / "fitted"))
    for name in filter(is_quantized, exact.names()):
        importance, weight = moments.importance(name), exact.weight(name).dequantize()
        assert importance is not None
        errors = [
            ((each.weight(name).dequantize() - weight).square() * importance).sum()
            for each in (plain, fitted)
        ]
        assert errors[1] < errors[0]


FAULTS = {
    "no such model": (["{tmp}/none"], "none: no such file or folder"),
    "an empty folder": (["{tmp}"], "neither a config.json nor exactly one .gguf file in it"),
    "a folder that exists": (["{model}", "--out={tmp}"], "exists already"),
    "a folder that cannot be": (["{model}", "--out={tmp}/a/b"], "a is no folder"),
    "groups of w8": (["{model}", "--to=w8", "--group-size=64"], "--group-size: only of --to w4"),
    "groups too wide for a file": (["{gguf}", "--group-size=64"], "groups of 32"),
    "a width that is no multiple": (["{model}", "--group-size=128"], "multiple of 128, got "),
    "no text": (["{model}", "--calibrate={tmp}/none"], "No such file"),
    "too short a text": (["{model}", "--calibrate={tmp}/short"], "1000 characters or more"),
    "no threads": (["{model}", "--threads=0"], "--threads must be at least 1"),
    "a report on one token": (["{model}", "--report-tokens=1"], "2 and more, got 1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_refused_in_one_line(
    name: str, folder: Path, gguf_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text("short")
    given, sentence = FAULTS[name]
    places = {"tmp": tmp_path, "model": folder, "gguf": gguf_file}
    arguments = ["--to=w4", f"--out={tmp_path}/out", "--report-tokens=0"]
    assert main([*arguments, *(each.format(**places) for each in given)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tidegate quantize: ")
    assert sentence in line
    assert [path.name for path in tmp_path.iterdir()] == ["short"]


def test_what_is_quantized_already_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert main([str(folder), "--to=w8", f"--out={first}", "--report-tokens=0"]) == 0
    assert main([first, "--to=w4", f"--out={second}", "--report-tokens=0"]) == 2
    assert "quantized already (tidegate)" in capsys.readouterr().err
    with pytest.raises(
        ModelLoadError, match="already quantized; quantization must be auto or none"
    ):
        load_model(tmp_path / "first", quantization="w4")


def test_a_broken_weight_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    weights = tiny_llama.tensors()
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    source = tiny_llama.write_folder(tmp_path / "broken", weights)
    with (
        pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight"),
        _appearing(tmp_path / "out") as out,
    ):
        Conversion("w4", 32).write(source, out, lambda amount: None)
    assert list(tmp_path.iterdir()) == [source]


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), _appearing(tmp_path / "out") as out:
        (out / "half").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_blocks_cut_short_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    main([str(folder), "--to=w8", f"--out={tmp_path / 'out'}", "--report-tokens=0"])
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(shard)
    name = "model.layers.0.mlp.up_proj.weight.Q8_0"
    tensors[name] = tensors[name][:, :-3].contiguous()
    save_file(tensors, shard)
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight\.Q8_0 .* is no rows of Q8_0 blocks"):
        portable(tmp_path / "out")
