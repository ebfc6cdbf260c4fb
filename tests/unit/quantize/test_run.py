"""Whole models quantised: what is written is what was calibrated, nothing else changes, and it says what it cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from erniekit.api_load import load
from erniekit.checkpoint import manifest, probe
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.errors import CheckpointError, ConfigError, ErnieKitError
from erniekit.export.run import export
from erniekit.files.record import NotOurs
from erniekit.quant_schemes import QUANT_RECIPES
from erniekit.quantize import run as engine
from erniekit.quantize.layer_weights import is_quantised
from erniekit.quantize.streams import OneLayer, Streams

KINDS = tuple(QUANT_RECIPES)


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("quant", KINDS)
def test_every_kind_reads_back_with_its_probe_and_all_but_the_products_unchanged(
    quant: str, moe, quantised, tmp_path: Path
) -> None:
    facts = quantised(moe, quant, rows=1, compensate=False, tokenizer=moe.folder)
    manifest.check(tmp_path / "out")
    plain, written = ModelFolder(moe.folder), ModelFolder(tmp_path / "out")
    model, tokenizer = load(tmp_path / "out")
    assert tokenizer is not None
    stored = probe.load(tmp_path / "out")
    assert stored is not None
    with torch.no_grad():
        assert probe.check(model, stored, "it", stored.setting, torch.float32).exact
    theirs = {entry.ours: entry for entry in written.entries()}
    for entry in plain.entries():
        before, after = plain.read(entry), written.read(theirs[entry.ours])
        changed = entry.ours.startswith("layers.") and is_quantised(entry.ours)
        assert before.dtype == after.dtype
        assert torch.equal(before, after) is not changed, entry.ours
        assert (before - after).norm() <= 0.2 * before.norm()
    assert facts["bytes_after"] < 0.7 * facts["bytes_before"]
    assert 0 < facts["quality"]["kl"] < 0.2
    assert json.loads((tmp_path / "out" / "quantize_report.json").read_text()) == facts
    assert not list(tmp_path.glob(".erniekit-*.layers"))


@pytest.mark.parametrize(
    ("which", "quant"),
    [
        ("dense", "w4a16"),
        ("moe", "w4a16"),
        pytest.param("dense", "mxfp4", marks=pytest.mark.full),
        pytest.param("moe", "mxfp4", marks=pytest.mark.full),
    ],
)
def test_carried_errors_give_every_layer_nearer_outputs_than_rounding_to_nearest(
    which: str, quant: str, quantised, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    trained = request.getfixturevalue(which)
    rows = {"calibrating": trained.packs[:4], "measuring": trained.packs[4:]}
    facts = quantised(trained, quant, out="gptq", **rows)
    nearest = quantised(trained, quant, out="rtn", compensate=False, **rows)
    assert facts["quality"]["kl"] < nearest["quality"]["kl"]
    assert len(facts["weights"]) == (8 if which == "dense" else 4 + 4 + 2 * 8)
    assert all(row["output_error"] < row["rounded_to_nearest"] for row in facts["weights"])
    # The layers themselves, each on what the plain model gives it.
    outputs = {}
    for name in (trained.folder, tmp_path / "gptq", tmp_path / "rtn"):
        one = OneLayer(ModelFolder(trained.folder), torch.device("cpu"), torch.float32)
        other = OneLayer(ModelFolder(name), torch.device("cpu"), torch.float32)
        streams = Streams(one, trained.packs[:4], ())
        for number in range(2):
            streams.quantised = [x.clone() for x in streams.plain]
            streams.advance_quantised(other.open(number), QUANT_RECIPES["w4a16"], {})
            streams.advance_plain(one.open(number))
            outputs[name.name, number] = streams.drift()
    for number in range(2):
        assert outputs[trained.folder.name, number] == 0
        assert 0 < outputs["gptq", number] < outputs["rtn", number]


def test_rows_that_measure_do_not_calibrate(dense, quantised, tmp_path: Path) -> None:
    quantised(dense, "w4a16", out="one")
    quantised(dense, "w4a16", out="other", measuring=dense.rows[170:172])
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_experts_with_few_tokens_are_topped_up_and_starved_ones_named(moe, quantised) -> None:
    tokens = sum(row.num_tokens for row in moe.rows[:2])
    facts = quantised(moe, "w4a16", rows=2, tokens=tokens - 1, compensate=False)
    assert facts["topped_up"]
    assert all(row["routed"] < row["used"] == tokens - 1 for row in facts["topped_up"])
    assert not facts["starved"]
    starved = quantised(moe, "w4a16", rows=2, tokens=10 * tokens, compensate=False)["starved"]
    assert {row["expert"] for row in starved} == set(range(8))
    assert all(row["used"] == tokens for row in starved), "all there are"


def test_without_rows_nothing_is_measured_and_the_files_are_the_same_at_every_run(dense, quantised, tmp_path) -> None:
    facts = quantised(dense, "w4a16", rows=0, out="a")
    assert facts["quality"] is None
    assert "not measured" in (tmp_path / "a" / "quantize_report.html").read_text()
    quantised(dense, "w4a16", rows=0, out="b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_what_was_done_before_an_interruption_is_kept_and_the_result_is_the_same(
    moe, quantised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised(moe, "w4a16", rows=1, compensate=False, out="whole")
    real, calls = engine._Quantisation._layer, []

    def stopping(self, one, streams, number, done, advance):
        if number == 1 and not calls:
            calls.append(number)
            raise KeyboardInterrupt
        assert done is (number == 0)
        return real(self, one, streams, number, done, advance)

    monkeypatch.setattr(
        engine._Quantisation, "_layer", lambda *a: real(*a) if a[3] == 0 and not calls else stopping(*a)
    )
    with pytest.raises(KeyboardInterrupt):
        quantised(moe, "w4a16", rows=1, compensate=False)
    assert [p.name for p in (tmp_path / ".erniekit-out.layers").iterdir()] == ["layer-00000"]
    quantised(moe, "w4a16", rows=1, compensate=False)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_layers_of_other_settings_are_done_again(dense, quantised, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(engine._Quantisation, "publish", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quantised(dense, "w8a16", rows=0)
    monkeypatch.undo()
    quantised(dense, "w4a16", rows=0)
    quantised(dense, "w4a16", rows=0, out="fresh")
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_a_file_of_somebody_else_among_finished_layers_stops_it(moe, quantised, tmp_path: Path) -> None:
    (tmp_path / ".erniekit-out.layers").mkdir()
    (tmp_path / ".erniekit-out.layers" / "thesis.txt").write_text("mine")
    with pytest.raises(NotOurs, match=r"thesis\.txt"):
        quantised(moe, "w4a16", rows=1)
    assert (tmp_path / ".erniekit-out.layers" / "thesis.txt").read_text() == "mine"


def test_a_folder_that_is_not_an_earlier_result_is_left_alone(dense, quantised, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(NotOurs, match=r"thesis\.txt"):
        quantised(dense, "w4a16", rows=1)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    (tmp_path / "out" / "thesis.txt").unlink()
    quantised(dense, "w4a16", rows=0)
    quantised(dense, "w8a16", rows=0)
    assert ModelFolder(tmp_path / "out").quantised, "an earlier result is replaced"


def test_a_weight_that_is_not_finite_is_named(dense, quantised, tmp_path: Path) -> None:
    broken = export(dense.folder, None, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    (broken / "MANIFEST.json").unlink()
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds NaN"):
        quantised(replace(dense, folder=broken), "w4a16", rows=0)
    assert not (tmp_path / "out").exists()


def test_a_quantised_model_is_not_quantised_again(dense, quantised, tmp_path: Path) -> None:
    quantised(dense, "w8a16", rows=0)
    with pytest.raises(CheckpointError, match="quantised already"):
        quantised(replace(dense, folder=tmp_path / "out"), "w4a16", out="twice")


@pytest.mark.parametrize(
    ("quant", "group", "words"),
    [("w4a16", 128, "32 columns"), ("w4a16", 48, "read by no engine"), ("fp8_dynamic", 64, "no group size")],
)
def test_a_group_size_that_does_not_fit_is_refused_before_any_work(
    moe, quantised, tmp_path, quant, group, words
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        quantised(moe, quant, group=group)
    assert error.value.fix
    assert not list(tmp_path.iterdir())


def test_the_largest_group_that_divides_every_width_is_taken(dense, moe, quantised, tmp_path: Path) -> None:
    for trained, size in ((dense, 64), (moe, 32)):
        quantised(trained, "w4a16", rows=0, out=trained.folder.parent.name)
        told = json.loads((tmp_path / trained.folder.parent.name / "config.json").read_text())
        assert told["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == size


def test_a_quantised_model_exports_as_plain_weights_that_answer_the_same(dense, quantised, tmp_path: Path) -> None:
    quantised(dense, "w4a16", rows=0)
    plain = export(tmp_path / "out", None, tmp_path / "plain", probe=probe.load(tmp_path / "out"))
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    ids = torch.arange(3, 40)[None]
    (one, _), (other, _) = load(tmp_path / "out"), load(plain)
    with torch.no_grad():
        assert torch.equal(one(ids), other(ids))


def test_a_wrong_tensor_in_the_written_folder_stops_publication(dense, quantised, tmp_path, monkeypatch) -> None:
    real = engine.write_weights

    def swapped(folder, source, recipe, parts_of, size):
        def parts(number):
            out = parts_of(number)
            a, b = (f"model.layers.0.self_attn.{p}_proj.weight_scale" for p in "kv")
            if a in out:
                out[a], out[b] = out[b], out[a]
            return out

        real(folder, source, recipe, parts, size)

    monkeypatch.setattr(engine, "write_weights", swapped)
    with pytest.raises(ErnieKitError, match=r"layers\.0\.attn\.qkv\.weight changed while it was copied"):
        quantised(dense, "w4a16", rows=0)
    assert not (tmp_path / "out").exists()
