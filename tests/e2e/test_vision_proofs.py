"""Runs with pictures: features kept on disk change no bit, and checkpoints prove weights and preprocessing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import erniekit
from erniekit.checkpoint import probe as probes
from erniekit.cli.main import main
from erniekit.config import load
from erniekit.data.media.decode import ReadPatches
from erniekit.data.media.worker import MediaPool
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.vision import proof_file
from erniekit.data.vision.features import key_of
from erniekit.errors import ConfigError
from erniekit.kernels import attention as kernel
from erniekit.models.layers.vision_language import PictureInput
from erniekit.recipes.datasets import TrainData
from erniekit.recipes.doctor import DoctorError
from erniekit.serve.loaded_models import find_models, load_models
from support.jsonl import write_jsonl

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded vision-language model, its tokenizer, and rows with pictures."""
    folder = tmp_path_factory.mktemp("seeing")
    shutil.copytree(DATA / "paddle-vl" / "vl_hf", folder / "model")
    shutil.copytree(DATA / "paddle-vl" / "tokenizer", folder / "model", dirs_exist_ok=True)
    shutil.copytree(DATA / "paddle-vl" / "media", folder / "media")
    shutil.copy(DATA / "paddle-vl" / "rows.jsonl", folder)
    return folder


@pytest.fixture(scope="module")
def run(seeing: Path) -> Callable[..., Path]:
    def go(name: str, **keys: object) -> Path:
        values = dict(
            stage="VL-SFT",
            model_name_or_path=seeing / "model",
            train_dataset_path=seeing / "rows.jsonl",
            output_dir=seeing / name,
            cache_dir=seeing / "cache",
            compute_type="fp32",
            max_seq_len=256,
            max_steps=3,
            max_bad_fraction=1,
            logging_steps=1,
            dataset_num_proc=1,
            media_num_proc=1,
            report_to="none",
            device="cpu",
        )
        erniekit.run("train", **{**values, **keys})
        return seeing / name

    return go


@pytest.fixture(scope="module")
def live(run: Callable[..., Path]) -> Path:
    return run("live", vision_feature_cache="off")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of media whose pixels were asked for after the doctor's batch."""
    names: list[str] = []
    plain = MediaPool.run

    def ask(self, work, name, limits=None):
        if isinstance(work, ReadPatches) and not work.check:
            names.append(key_of(work.medium))
        return plain(self, work, name, limits)

    first = TrainData.first_batch

    def first_batch(self):
        made = first(self)
        names.clear()
        return made

    monkeypatch.setattr(MediaPool, "run", ask)
    monkeypatch.setattr(TrainData, "first_batch", first_batch)
    return names


def records(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [told for told in map(json.loads, lines) if "learning_rate" in told]


def weights(folder: Path) -> bytes:
    return next(folder.glob("*model.safetensors")).read_bytes()


def test_kept_features_change_no_bit_and_spare_every_decoding(
    live: Path, run: Callable[..., Path], decoded: list[str], seeing: Path
) -> None:
    made = run("made")
    assert decoded
    again = run("again")
    kept = {file.stem for file in (seeing / "cache" / "features").rglob("*.safetensors")}
    assert not kept & set(decoded), "but packs made ahead of the last step, which nothing has looked at, are decoded"
    for folder in (made, again):
        assert weights(folder) == weights(live)
        assert [r["loss"] for r in records(folder)] == [r["loss"] for r in records(live)]
    assert sum(r["feature_cache_made"] for r in records(made)) > 0
    assert sum(r["feature_cache_made"] for r in records(again)) == 0
    assert sum(r["feature_cache_hits"] for r in records(again)) > 0
    assert "vision_feature_cache" in (again / "report.html").read_text()
    for file in (seeing / "cache" / "features").rglob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    healed = run("healed")
    assert weights(healed) == weights(live)
    assert decoded, "damaged entries are looked at again"


@pytest.mark.full
def test_features_behind_a_frozen_resampler_change_no_bit(run: Callable[..., Path]) -> None:
    keys = dict(fine_tuning="Full", freeze_config="freeze_vision,freeze_resampler")
    plain, made, again = (
        run(f"tokens {n}", vision_feature_cache=word, **keys) for n, word in enumerate(("off", "on", "auto"))
    )
    assert weights(plain) == weights(made) == weights(again)
    assert sum(r["feature_cache_made"] for r in records(again)) == 0


def test_a_cache_that_cannot_be_is_refused_where_asked_for(run: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="the tower is trained"):
        run("trained tower", fine_tuning="Full", vision_feature_cache="on")


def test_preferences_say_that_they_keep_no_features_and_refuse_to_where_asked(
    run: Callable[..., Path], seeing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"messages": [{"role": "user", "content": "<image>what?"}], "images": ["media/a.png"]}
    pairs = write_jsonl(seeing / "pairs.jsonl", [{**asked, "chosen": "a bar.", "rejected": "a star."}] * 2)
    keys = dict(stage="DPO", train_dataset_path=pairs, max_steps=1, doctor="off", fine_tuning="LoRA")
    with pytest.raises(ConfigError, match="stage DPO keeps no features"):
        run("refused pairs", vision_feature_cache="on", **keys)
    run("pairs", **keys)
    assert "pictures go through the tower in every step: stage DPO keeps no features" in capsys.readouterr().out


def test_a_limit_below_what_the_pictures_need_is_said(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run("too little", fine_tuning="LoRA", vision_feature_cache="on", vision_feature_cache_gb=1e-6, max_steps=1)
    assert "vision_feature_cache_gb is 1e-06: pictures beyond it are computed in every step" in capsys.readouterr().out


def test_losses_and_loads_are_told_by_modality_and_the_report_has_the_checks(live: Path) -> None:
    told = records(live)
    assert all("loss_pictures" in r and r["moe_load_text"] > 0 < r["moe_load_vision"] for r in told)
    mixed = next(r for r in told if "loss_text" in r)  # rows of text share a pack with pictures
    low, high = sorted((mixed["loss_pictures"], mixed["loss_text"]))
    assert low < mixed["loss"] < high
    found = {check["check"]: check["found"] for check in json.loads((live / "run.json").read_text())["checks"]}
    assert found["pixels"] == "pixels affect only their own document"
    assert "with blank pixels" in found["blank pixels"]
    assert "with blank pixels" in (live / "report.html").read_text()


def test_pixels_that_reach_no_answer_are_alarmed_of(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    plain = PictureInput.features_of
    monkeypatch.setattr(PictureInput, "features_of", lambda self, *picture: plain(self, *picture) * 0)
    with pytest.raises(DoctorError, match="other pixels move no logit"):
        run("blind")
    told = capsys.readouterr()
    assert "the model ignores pixels" in told.err
    assert "seen as 56 x 112 pixels, grid 1 x 8 x 4, 8 tokens" in told.out


def test_pixels_that_leak_into_the_next_document_are_caught(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaking(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        k, v = (t.view(*q.shape[:2], *t.shape[1:]) for t in (k, v))
        return kernel._causal(q, k, v)

    monkeypatch.setattr(kernel, "_per_document", leaking)
    with pytest.raises(DoctorError, match="pixels of one document move the logits of the next"):
        run("leaking")


def test_an_export_proves_vision_weights_and_preprocessing(
    live: Path, seeing: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    probe = probes.load(live)
    assert probe is not None
    assert probe.picture is not None
    words = ["export", f"model_name_or_path={seeing / 'model'}", "lora=True"]
    assert main([*words, f"output_dir={live}"]) == 0
    assert "pixels, ids and positions are made as in training" in capsys.readouterr().out
    assert (live / "export" / "config.json").is_file()
    assert not (live / "export" / proof_file.FILE).exists(), "rows of the training data are not published"

    def broken(name: str, change: Callable[[dict], None]) -> Path:
        folder = tmp_path / name
        shutil.copytree(live, folder, ignore=shutil.ignore_patterns("export", "checkpoint-*"))
        told = json.loads((folder / proof_file.FILE).read_text())
        change(told)
        (folder / proof_file.FILE).write_text(json.dumps(told))
        return folder

    other = broken("template", lambda told: told["rules"].update(use_pic_id=False))
    assert main([*words, f"output_dir={other}"]) == 2
    assert "`template`" in capsys.readouterr().err
    assert not (other / "export").exists()
    other = broken("resize", lambda told: told["rows"][0]["proof"].update(resize="0"))
    assert main([*words, f"output_dir={other}"]) == 0
    assert "from the stage `resize` on" in capsys.readouterr().err


def test_a_server_says_where_pictures_are_made_otherwise_than_in_training(
    live: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = tmp_path / "other"
    shutil.copytree(live, other, ignore=shutil.ignore_patterns("export", "checkpoint-*"))
    told = json.loads((other / proof_file.FILE).read_text())
    told["rows"][0]["proof"]["resize"] = "0"
    (other / proof_file.FILE).write_text(json.dumps(told))
    for folder, expected in ((live, ""), (other, "not made as in training, from the stage `resize` on")):
        cfg = load([str(folder), "device=cpu", "max_model_len=256"], "server")
        capsys.readouterr()
        load_models(cfg, find_models(cfg)).engine.stop()
        said = capsys.readouterr().err
        assert (expected in said, "not made as in training" in said) == (True, bool(expected))


def test_each_stage_of_preprocessing_is_named(live: Path, seeing: Path) -> None:
    tokenizer = load_tokenizer(seeing / "model")
    rules = proof_file.trained_rules(live)
    assert rules is not None
    assert proof_file.check(live, tokenizer, rules) == proof_file.Proved(2)
    for stage, changed in (
        ("size", {"min_pixels": 9408, "video_min_pixels": 9408}),
        ("time stamp", {"render_timestamp": True}),
        ("template", {"use_pic_id": False}),
    ):
        assert proof_file.check(live, tokenizer, replace(rules, **changed)).stage == stage
    assert proof_file.other_sizes(live, {"max_pixels": 784}) == {"max_pixels": (784, rules.max_pixels)}


def test_keys_that_see_otherwise_than_training_are_named(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = proof_file.trained_rules(live)
    assert rules is not None
    proof_file.warn_of_other_rules(live, rules)
    assert not capsys.readouterr().err
    proof_file.warn_of_other_rules(live, replace(rules, max_pixels=3136, frames=replace(rules.frames, fps=1.0)))
    said = capsys.readouterr().err
    assert f"max_pixels is 3136, and was {rules.max_pixels} in training" in said
    assert "video_fps=2.0" in said
