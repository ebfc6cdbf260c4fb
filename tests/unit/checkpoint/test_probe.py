"""A probe file may be anyone's: what is none is refused before a model runs on it; no number in it hides others."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.probe import FILE, Probe, ProbePicture
from erniekit.checkpoint.published import check_answer
from erniekit.cli.main import main
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import CheckpointError

IDS = torch.arange(40, 56)[None]
INF = float("inf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def good(model: Path) -> Probe:
    with torch.no_grad():
        return probes.measure(ModelFolder(model).build().eval(), Probe(IDS, IDS.roll(-1)), "cpu/float32/x/one device")


def written(folder: Path, probe: Probe, tensors: dict[str, torch.Tensor], meta: object = None) -> Path:
    """The file with some of its tensors replaced and its metadata changed."""
    rows = probe.rows
    assert rows is not None
    held = {"ids": probe.ids, "labels": probe.labels, "rows": rows, **tensors}
    said: Any = {"loss": probe.loss.hex(), "digest": probe.digest, "setting": probe.setting}
    said = {**said, **meta} if isinstance(meta, dict) else said if meta is None else meta
    whole = {name: tensor.clone() for name, tensor in held.items()}
    save_file(whole, str(folder / FILE), {"probe": said if isinstance(said, str) else json.dumps(said)})
    return folder


ROWS = torch.zeros(4, 1280)
PICTURE = {
    "patches": torch.zeros(4, 588, dtype=torch.uint8),
    "grids": torch.tensor([[1, 2, 2]]),
    "positions": torch.zeros(1, 16, 3, dtype=torch.int64),
    "modality": torch.zeros(1, 16, dtype=torch.uint8),
    "places": torch.zeros(1, dtype=torch.int64),
}
WRONG = {
    "labels beyond the logits": {"labels": IDS + 10_000},
    "labels below zero": {"labels": -IDS},
    "tokens below zero": {"ids": IDS - 50},
    "tokens of another type": {"ids": IDS.int(), "labels": IDS.int()},
    "no tokens": {"ids": IDS[:, :0], "labels": IDS[:, :0], "rows": ROWS},
    "tokens of three dimensions": {"ids": IDS[None], "labels": IDS[None]},
    "whole logits": {"rows": ROWS.long()},
    "logits that are true or false": {"rows": ROWS > 0},
    "complex logits": {"rows": ROWS.to(torch.complex64)},
    "logits of 8 bits": {"rows": ROWS.to(torch.float8_e4m3fn)},
    "fewer logits": {"rows": ROWS[:1]},
    "more logits": {"rows": ROWS.repeat(3, 1)},
    "no logits": {"rows": ROWS[:0]},
    "a grid that is too large": {**PICTURE, "grids": torch.tensor([[2**32, 2**32, 1]])},
    "a kind of token that is none": {**PICTURE, "modality": torch.full((1, 16), 9, dtype=torch.uint8)},
    "half a picture": {"grids": PICTURE["grids"]},
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_are_not_a_probes_are_refused_with_a_way_out(name: str, good: Probe, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"probe\.safetensors is not a probe that erniekit wrote") as error:
        probes.load(written(tmp_path, good, WRONG[name]))
    assert error.value.where == str(tmp_path / FILE)
    assert "move it away" in error.value.fix


@pytest.mark.parametrize(
    "meta", [{"loss": "0x1p99999"}, {"loss": "1" * 10_000}, {"loss": 3}, [], "null", "{", "[" * 10_000, ""]
)
def test_words_that_are_not_a_probes_are_refused(meta: object, good: Probe, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a probe that erniekit wrote"):
        probes.load(written(tmp_path, good, {}, meta))


@pytest.mark.parametrize("raw", [b"", b"no tensors here", bytes(99), struct.pack("<Q", 2**62) + b"{}"])
def test_what_is_no_safetensors_file_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"probe\.safetensors is not a valid safetensors file"):
        probes.load(tmp_path)


def test_a_probe_is_read_as_it_was_saved(good: Probe, tmp_path: Path) -> None:
    probes.save(tmp_path, good)
    found = probes.load(tmp_path)
    assert found is not None
    assert found.rows is not None
    assert good.rows is not None
    assert (found.loss, found.digest, found.setting) == (good.loss, good.digest, good.setting)
    assert torch.equal(found.rows, good.rows)
    assert torch.equal(found.ids, IDS)


@pytest.mark.parametrize("tensors", [{"ids": IDS + 100_000}, PICTURE])
def test_a_probe_that_a_model_cannot_be_run_on_is_refused_before_it_is(
    tensors: dict[str, torch.Tensor], model: Path, good: Probe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    written(tmp_path, good, tensors)
    built = ModelFolder(tmp_path).build().eval()
    with pytest.raises(CheckpointError, match="is of another model than this") as error:
        check_answer(tmp_path, built)
    assert error.value.where == str(tmp_path / FILE)
    assert main(["export", str(tmp_path)]) == 2
    assert "probe.safetensors is of another model than this" in capsys.readouterr().err
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("number", [INF, -INF, float("nan"), 1e30])
@pytest.mark.parametrize("other", [0.0, 1.0])
def test_a_logit_that_is_none_is_no_excuse_for_others(number: float, other: float, good: Probe) -> None:
    assert good.rows is not None
    rows = good.rows + other
    rows[0, 0] = number
    crafted, logits = replace(good, rows=rows), torch.cat([torch.zeros(12, rows.shape[1]), good.rows])[None]
    verdict = probes.compare(logits, crafted, probes.allowed(crafted, torch.bfloat16))
    assert not verdict.max_difference <= verdict.tolerance
    with pytest.raises(CheckpointError, match="does not answer as it did when saved") as error:
        probes.check(lambda _: logits, crafted, "checkpoint-4", good.setting, torch.float32, where="r/checkpoint-4")
    assert error.value.where == "r/checkpoint-4"


def test_a_probe_of_16_bits_is_repeated_in_32_to_the_rounding_of_16(good: Probe) -> None:
    assert good.rows is not None
    rows = good.rows + 0.01
    saved, logits = replace(good, setting="cpu/bfloat16/one"), torch.cat([torch.zeros(12, rows.shape[1]), rows])[None]
    assert not probes.check(lambda _: logits, saved, "checkpoint-4", "cpu/float32/one", torch.float32).exact
    with pytest.raises(CheckpointError):
        probes.check(lambda _: logits, replace(saved, setting="cpu/float32/one"), "it", "", torch.float32)


def test_logits_of_another_vocabulary_are_as_far_as_can_be(good: Probe) -> None:
    assert good.rows is not None
    assert good.difference(good.rows[:, :1]) == INF
    assert good.difference(good.rows[:1]) == INF
    assert good.difference(good.rows) == 0


@pytest.mark.parametrize(
    "change",
    [{"patches": torch.zeros(4, 3, dtype=torch.uint8)}, {"places": torch.zeros(2, dtype=torch.int64)},
     {"grids": torch.tensor([[1, 1, 4]])}, {"grids": torch.tensor([[4, 1, 1]])}],
)  # fmt: skip
def test_a_picture_of_other_sizes_does_not_fit(change: dict[str, torch.Tensor], good: Probe) -> None:
    class Shape:
        merge, patch_size = 2, 588

    class Config:
        vocab_size, vision = 1280, Shape

    assert replace(good, picture=ProbePicture(**PICTURE)).fits(Config)
    assert not replace(good, picture=ProbePicture(**{**PICTURE, **change})).fits(Config)
