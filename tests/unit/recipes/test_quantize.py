"""`erniekit quantize` and `erniekit export quant=...` as a person types them: what is done, said and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.cli.main import main
from erniekit.demo.tiny import FAMILIES, SHAPE, TRAIN, make_tiny_model
from erniekit.lora.adapter import Adapter, LowRank
from erniekit.lora.adapter_files import write_adapter
from erniekit.models import MODELS
from erniekit.models.init import init_weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("quantize") / "dense")


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    shell = ModelFolder(model).meta()
    torch.manual_seed(0)
    low = LowRank(torch.randn(4, 256) / 16, torch.randn(128, 4) / 16, 2.0)
    write_adapter(tmp_path / "adapter", Adapter({"model.layers.0.mlp.down_proj": low}, 4, 8.0, base=str(model)), shell)
    return tmp_path / "adapter"


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main([str(word) for word in words]) == code
    out = capsys.readouterr()
    return out.out if code == 0 else out.err


def test_a_model_is_calibrated_on_rows_and_the_result_the_report_and_the_next_command_are_named(
    model: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "out"
    words = ["quant=w8a16", f"output_dir={out}", "--data", TRAIN, "calibration_rows=3", f"cache_dir={tmp_path}/cache"]
    words.append("dataset_num_proc=1")
    told = said(capsys, "quantize", model, *words, "eval_dataset_path=" + str(TRAIN))
    assert "GPTQ" in told
    assert "perplexity" in told
    assert "on 3 evaluation rows" in told
    assert str(out / "quantize_report.html") in told
    assert told.splitlines()[-1].endswith(f"erniekit chat {out}")
    assert json.loads((out / "quantize_report.json").read_text())["calibration_rows"] == 3
    assert (out / "tokenizer.model").is_file()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["quant=w4a16", "quant_method=gptq"], "none are given"),
        (["quant=fp8_static"], "none are given"),
        (["quant=nf4", "method=gptq", "--data", str(TRAIN)], "nf4 is rounded to nearest only"),
        (["quant=w4a16", "group_size=100"], "groups of 100 are read by no engine"),
        (["quant=w3a16"], "w4a16"),
        (["quant=w4a16", "calibration_row=3"], "calibration_rows"),
        (["quant=w4a16", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        ([], "quant must be given"),
        (["quant=w4a16", "lora_path=x"], "merges no adapters"),
        (["quant=w8a8", "group_size=64"], "no group size to choose"),
        (["quant=w4a16", "format=gguf"], "format is a key of `erniekit export`"),
        (["quant=w4a16", "gguf_type=q4_0"], "gguf_type is a key of `erniekit export`"),
        (["quant=w4a16", "merge_grid=int4"], "merge_grid is a key of `erniekit export`"),
    ],
)
def test_what_cannot_be_done_is_refused_in_three_lines_before_any_work(
    model: Path, tmp_path: Path, capsys, words: list[str], what: str
) -> None:
    error = said(capsys, "quantize", model, f"output_dir={tmp_path / 'out'}", *words, code=2)
    assert what in error
    assert [line.split(":")[0] for line in error.splitlines() if not line.startswith(" ")][-3:] == [
        "error",
        "where",
        "fix",
    ]
    assert not list(tmp_path.iterdir())


def test_an_adapter_is_not_a_model_and_export_merges_and_quantises_it_in_one(
    model: Path, adapter: Path, tmp_path: Path, capsys
) -> None:
    error = said(capsys, "quantize", adapter, "quant=w4a16", f"output_dir={tmp_path / 'out'}", code=2)
    assert "holds an adapter" in error
    assert f"erniekit export {adapter} quant=w4a16" in error
    said(capsys, "export", model, f"lora_path={adapter}", f"output_dir={tmp_path / 'merged'}", "quant=w4a16")
    merged, quantised = ModelFolder(tmp_path / "merged"), ModelFolder(tmp_path / "merged-w4a16")
    assert quantised.quantised
    assert not merged.quantised
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(merged.tensor(name), ModelFolder(model).tensor(name))
    apart = (merged.tensor(name) - quantised.tensor(name)).norm() / merged.tensor(name).norm()
    assert 0 < apart < 0.2


def test_readers_that_cannot_load_the_result_are_named(tmp_path: Path, capsys) -> None:
    moe = make_tiny_model(tmp_path / "moe", family="ernie4_5_moe")
    assert main(["quantize", str(moe), "quant=w8a8", f"output_dir={tmp_path / 'out'}"]) == 0
    assert "transformers: cannot load int8 experts of w8a8" in capsys.readouterr().err


def test_a_notebook_quantises_and_evaluates_with_the_same_words(model: Path, tmp_path: Path) -> None:
    import erniekit

    keys = {"cache_dir": tmp_path / "cache", "dataset_num_proc": 1}
    out = tmp_path / "out"
    done = erniekit.run(
        "quantize", model, quant="w4a16", output_dir=out, method="rtn", data=TRAIN, calibration_rows=2, **keys
    )
    assert done.output_dir == out
    assert done.metrics["kl"] > 0
    loss = erniekit.run("eval", out, eval_dataset_path=TRAIN, output_dir=tmp_path / "eval", **keys)
    assert loss.metrics["eval_loss"] > 0


def test_preference_pairs_and_documents_calibrate_too(model: Path, tmp_path: Path, capsys, root: Path) -> None:
    keys = [f"cache_dir={tmp_path}/cache", "dataset_num_proc=1", "quant=w8a16", "calibration_rows=2", "method=rtn"]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"A tale of {k} ships. " * 9}) + "\n" for k in range(40)))
    for name, words in {
        "pairs": ["stage=DPO", "--data", root / "examples" / "data" / "dpo-train.jsonl"],
        "text": ["stage=PT", "--data", text, "max_seq_len=64"],
    }.items():
        said(capsys, "quantize", model, f"output_dir={tmp_path / name}", *keys, *words)
        facts = json.loads((tmp_path / name / "quantize_report.json").read_text())
        assert facts["calibration_rows"] == (2 if name == "pairs" else 4)  # two sequences, of two documents each
        assert 0 < facts["quality"]["kl"] < 0.1


def test_export_refuses_what_the_quantiser_would_refuse_before_it_merges(
    model: Path, adapter: Path, tmp_path: Path, capsys
) -> None:
    words = ["export", model, f"lora_path={adapter}", f"output_dir={tmp_path / 'merged'}"]
    assert "none are given" in said(capsys, *words, "quant=fp8_static", code=2)
    assert "groups of 100" in said(capsys, *words, "quant=w4a16", "group_size=100", code=2)
    assert not (tmp_path / "merged").exists()
    assert "no adapter to merge" in said(capsys, "export", model, "quant=w4a16", "merge_grid=int8", code=2)


def test_a_path_below_a_file_and_the_result_of_an_export_are_left_alone(model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("mine")
    words = ["quantize", model, "quant=w8a16"]
    assert "nothing can be written" in said(capsys, *words, f"output_dir={tmp_path / 'file' / 'out'}", code=2)
    said(capsys, "export", model, "save_format=hf")
    assert "is a result of `erniekit export`" in said(capsys, *words, f"output_dir={model / 'export'}", code=2)


@pytest.mark.parametrize("kind", ["fp16", "wint8", "fp8"])
def test_a_recipes_compute_type_is_not_one_to_quantise_in_and_that_is_said(
    model: Path, tmp_path: Path, capsys, kind: str
) -> None:
    told = said(capsys, "quantize", model, "quant=w8a16", f"output_dir={tmp_path / 'out'}", f"compute_type={kind}")
    assert f"compute_type: {kind} -> bf16" in told


def odd_model(folder: Path, **broken: float) -> Path:
    """Widths that no group divides; broken: a tensor's name -> what its first row becomes."""
    raw = {"model_type": "ernie4_5", **SHAPE, **FAMILIES["ernie4_5"], "hidden_size": 36, "intermediate_size": 50}
    raw |= {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}
    spec = MODELS.get("ernie4_5")
    config = spec.read_config(raw, "hf", False, "")
    made = spec.build(config)
    init_weights(made, 0, config.init_std)
    state = made.state_dict()
    for name, value in broken.items():
        state[name][0] = value
    write_model(folder, config, state.__getitem__)
    return folder


def test_a_file_in_the_place_of_the_work_folder_is_left_alone(model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / ".erniekit-out.layers").write_text("mine")
    error = said(capsys, "quantize", model, "quant=w8a16", f"output_dir={tmp_path / 'out'}", code=2)
    assert ".erniekit-out.layers is not a folder" in error
    assert (tmp_path / ".erniekit-out.layers").read_text() == "mine"


def test_a_disk_too_small_for_layers_and_result_is_told_before_the_first_layer(
    model: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1_000_000))
    error = said(capsys, "quantize", model, "quant=w8a16", f"output_dir={tmp_path / 'out'}", code=2)
    assert "out needs 0.00" in error
    assert "the disk has 0.001 GB free" in error
    assert not list((tmp_path / ".erniekit-out.layers").iterdir())


def test_odd_widths_are_refused_with_kinds_that_take_them_and_those_do(tmp_path: Path, capsys) -> None:
    folder = odd_model(tmp_path / "odd")
    for quant in ("w4a16", "w8a16", "mxfp4"):
        error = said(capsys, "quantize", folder, f"quant={quant}", f"output_dir={tmp_path / quant}", code=2)
        assert "quant=w8a8, fp8_dynamic or nf4" in error
    for quant in ("w8a8", "fp8_dynamic", "nf4"):
        said(capsys, "quantize", folder, f"quant={quant}", f"output_dir={tmp_path / quant}")
        weight, rounded = (ModelFolder(f).tensor("model.layers.0.mlp.down_proj.weight") for f in
                           (folder, tmp_path / quant))  # fmt: skip
        assert (weight - rounded).norm() / weight.norm() < 0.12


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("embed.weight", float("nan"), "model.embed_tokens.weight holds NaN or infinity"),
        ("norm.weight", float("inf"), "model.norm.weight holds NaN or infinity"),
        ("layers.1.attn_norm.weight", float("nan"), "input_layernorm.weight holds NaN or infinity"),
        ("layers.1.mlp.down.weight", float("nan"), "mlp.down_proj.weight holds NaN or infinity"),
    ],
)
def test_weights_that_are_not_finite_are_refused_wherever_they_are(
    tmp_path: Path, capsys, name: str, value: float, what: str
) -> None:
    folder = odd_model(tmp_path / "odd", **{name: value})
    assert what in said(capsys, "quantize", folder, "quant=nf4", f"output_dir={tmp_path / 'out'}", code=2)
    assert not (tmp_path / "out").exists()


def test_numbers_that_a_kind_would_make_infinite_are_refused(model: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(model, tmp_path / "large", ignore=shutil.ignore_patterns("export*"))
    tensors = load_file(tmp_path / "large" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0] = 3e38  # NF4 rounds its scales a second time: up, here
    save_file(tensors, tmp_path / "large" / "model.safetensors")
    words = ["quantize", tmp_path / "large", f"output_dir={tmp_path / 'out'}"]
    assert "layers.1.mlp.down.weight holds numbers too large for nf4" in said(capsys, *words, "quant=nf4", code=2)
    said(capsys, *words, "quant=w8a16")


def test_a_static_fp8_folder_is_exported_dequantised_and_that_is_said(model: Path, tmp_path: Path, capsys) -> None:
    words = ["--data", TRAIN, "calibration_rows=2", f"cache_dir={tmp_path}/cache", "dataset_num_proc=1"]
    said(capsys, "quantize", model, "quant=fp8_static", f"output_dir={tmp_path / 'fp8'}", *words)
    told = said(capsys, "export", tmp_path / "fp8")
    assert "written dequantised, and inputs unrounded" in told
    name = "model.layers.0.mlp.down_proj.weight"
    plain = ModelFolder(tmp_path / "fp8" / "export")
    assert torch.equal(plain.tensor(name), ModelFolder(tmp_path / "fp8").tensor(name))
    assert not plain.quantised
