"""`erniekit quantize` and `erniekit export quant=...` as a person types them: what is done, said and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.cli.main import main
from erniekit.demo.tiny import TRAIN, make_tiny_model
from erniekit.lora.adapter import Adapter, LowRank
from erniekit.lora.adapter_files import write_adapter


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
