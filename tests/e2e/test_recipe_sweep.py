"""Every shipped recipe: it resolves, is planned on the cluster its guide names, and rehearses. What does not train is
checked for what it does: it loads for its own command and needs nothing that this version lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.config import load, refuse_not_yet_supported
from support.shipped import ALL, RECORDED, ROOT, cheap, cluster_of, command_of

TRAINED = [name for name in ALL if command_of(name) == "train"]
OTHERS = [name for name in ALL if command_of(name) != "train"]
CONFIGS = "examples/configs"
OFTEN = (f"{CONFIGS}/ERNIE-4.5-0.3B/sft/run_sft_lora_8k.yaml",)
# By our account these need more than ERNIEKit's guides say, or as in FP8 another way to keep gradients.
LARGER = {
    f"{CONFIGS}/{name}.yaml"
    for name in (
        "ERNIE-4.5-300B-A47B/sft/run_sft_fp8_8k",
        "ERNIE-4.5-300B-A47B/sft/run_sft_fp8_32k",
        "ERNIE-4.5-VL-28B-A3B/sft/run_sft_lora_128k",
        "ERNIE-4.5-VL-424B-A47B/sft/run_sft_lora_32k",
        "ERNIE-4.5-VL-424B-A47B/sft/run_sft_wint8mix_lora_32k",
        "ERNIE-4.5-VL-424B-A47B/sft/run_sft_wint8mix_lora_128k",
    )
}


def often(names: list[str]) -> list[object]:
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_there_are_98_of_erniekit_and_those_of_pre_training() -> None:
    assert len(RECORDED) == 98
    assert len(ALL) == len({*ALL}) == 98 + len(list((ROOT / "examples/pre-training").rglob("*.yaml")))


def test_all_resolve_and_need_no_later_version() -> None:
    for name in ALL:
        cfg = load([name], command_of(name))
        refuse_not_yet_supported(cfg)
        assert cfg.model.model_name_or_path, name


def test_what_does_not_train_says_what_it_works_on() -> None:
    kinds = dict.fromkeys(map(command_of, OTHERS), 0)
    for name in OTHERS:
        command = command_of(name)
        kinds[command] += 1
        cfg = load([name], command)
        if command == "export":
            assert cfg.train.output_dir, name
        elif command == "eval":
            assert cfg.data.eval_dataset_path, name
            assert all(Path(path).is_file() for path in cfg.data.eval_dataset_path), name
        else:
            served = load([name], "server")  # the server takes the chat's recipe
            refuse_not_yet_supported(served, "server")
            assert served.serve.max_model_len > 0, name
            assert served.serve.port > 0, name
    assert set(kinds) == {"chat", "export", "eval"}
    assert len(TRAINED) + sum(kinds.values()) == len(ALL)


@pytest.mark.parametrize("name", often(TRAINED))
def test_it_is_planned_on_the_cluster_of_its_guide(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", name, "--cluster", cluster_of(name, load([name]))])
    said = capsys.readouterr()
    assert code == (2 if name in LARGER else 0), said
    if code:
        assert "no layout of this run fits" in said.err
        assert said.err.rstrip().rpartition("fix:")[2].strip()
    else:
        assert "tokens/s" in said.out


# Recipes that chat, evaluate or export have a model, a layout and a device, too: a step of theirs is tried.
@pytest.mark.parametrize("name", often(ALL))
def test_it_rehearses(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", *cheap(name, tmp_path)]) == 0
    assert "all ranks' calls match, and none waits for ever" in capsys.readouterr().out
