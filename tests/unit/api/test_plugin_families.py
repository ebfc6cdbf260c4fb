"""A family of an installed package: the one that docs/adding-a-model.md prints, and mistakes in one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import erniekit
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.cli.main import main
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from erniekit.lora.projections import projections
from erniekit.models.layers.linear import Linear
from support.installed import install

from .conftest import KEYS, ROWS

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-model.md"


def printed(language: str) -> str:
    """The first block of a language on the page."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def gelu(site: Path, tmp_path: Path) -> Path:
    """The page's family installed by the entry point that the page prints, and a model of it."""
    named, value = re.findall(r'^(\w+) = "my_package\.model:(\w+)"$', printed("toml"), re.MULTILINE)[0]
    install(site, "gelu-kit", {"models": f"{named} = gelu_model:{value}"}, gelu_model=printed("python"))
    return model_of(named, tmp_path)


def model_of(name: str, place: Path) -> Path:
    model = make_tiny_model(place / name, family="llama")
    told = json.loads((model / "config.json").read_text())
    changed = {**told, "model_type": name, "hidden_act": "gelu_pytorch_tanh"}
    (model / "config.json").write_text(json.dumps(changed))
    return model


def recipe_of(place: Path, tuning: str) -> Path:
    """One step on the page's rows."""
    rows, recipe = place / "rows.jsonl", place / "recipe.json"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    keys = {**KEYS, "train_dataset_path": rows, "train_dataset_type": "messages", "max_steps": 1, "stage": "SFT"}
    recipe.write_text(json.dumps({**keys, "fine_tuning": tuning}, default=str))
    return recipe


def install_with_targets(site: Path, place: Path, targets: str) -> Path:
    """The page's family with other lora_targets, and a model of it."""
    odd = printed("python").replace("build=GeluLlama,", f"build=GeluLlama, lora_targets={targets},")
    install(site, "gelu-kit", {"models": "gelu_llama = gelu_model:SPEC"}, gelu_model=odd)
    return model_of("gelu_llama", place)


def test_the_family_that_the_page_prints_trains_exports_and_chats(gelu: Path, tmp_path: Path) -> None:
    run = erniekit.train(
        data=ROWS, model_name_or_path=gelu, output_dir=tmp_path / "run", max_steps=2, fine_tuning="LoRA", **KEYS
    )
    exported = run.export()
    whole = erniekit.load(exported)
    assert type(whole.module.layers[0].mlp).__name__ == "GatedGelu"
    assert json.loads((exported / "config.json").read_text())["hidden_act"] == "gelu_pytorch_tanh"
    assert whole.chat("What is 3?", max_new_tokens=2, temperature=0) is not None


def test_the_family_that_the_page_prints_refuses_another_activation(
    gelu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads((gelu / "config.json").read_text())
    (gelu / "config.json").write_text(json.dumps({**told, "hidden_act": "relu"}))
    assert main(["chat", str(gelu)]) == 2
    assert "hidden_act to 'relu'" in capsys.readouterr().err


def test_a_family_whose_names_are_wrong_trains_nothing_and_writes_nothing(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = recipe_of(tmp_path, "Full"), tmp_path / "run"
    names = {
        "lost": "[e for e in llama.names(c, layout) if e.ours != 'norm.weight']",
        "moved": "[replace(e, theirs=('model.end.weight',)) if e.ours == 'norm.weight' else e"
        " for e in llama.names(c, layout)]",
    }
    for name, entries in names.items():
        code = printed("python").replace("gelu_llama", name)
        code = code.replace("build=GeluLlama,", f"build=GeluLlama, names=lambda c, layout: {entries},")
        install(site, f"{name}-kit", {"models": f"{name} = {name}_model:SPEC"}, **{f"{name}_model": code})
        model_of(name, tmp_path)

    def said_of(name: str, *more: str) -> str:
        assert main(["train", str(recipe), f"model_name_or_path={tmp_path / name}", f"output_dir={out}", *more]) == 2
        assert not list(out.glob("**/*.safetensors"))
        return capsys.readouterr().err

    for more in ("continue_training=true", "continue_training=false"):
        said = said_of("lost", more)
        assert "weights of a lost model have no name in its files, so that training them would lose them: norm" in said
        assert "where: lost_model, `names` of family lost" in said
    said = said_of("moved")
    assert "1 missing tensor for a moved model: model.end.weight" in said
    assert "or `names` of moved (moved-kit 1.0) does not fit such folders" in said


def test_targets_of_lora_that_a_family_has_not_are_named_and_a_weight_in_unnamed_parts_is_refused(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = install_with_targets(site, tmp_path, "('q_proj', 'gate')")
    folder = ModelFolder(str(model))
    assert {p.short_name for p in projections(folder.meta())} == {"q_proj"}
    assert "lora_targets of family gelu_llama: the model has no gate that LoRA could adapt" in capsys.readouterr().err
    meta = folder.meta()
    hidden = folder.config.hidden_size
    with torch.device("meta"):
        meta.layers[1].attn.qkv = Linear(hidden, meta.layers[1].attn.qkv.out_features, bias=False)
    said = r"layers.1.attn.qkv.weight is stored as 3 tensors and its module holds 1 projection"
    with pytest.raises(ConfigError, match=said):
        projections(meta)


def test_a_family_without_a_projection_for_lora_is_refused_before_a_step(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = install_with_targets(site, tmp_path, "('gate',)")
    recipe = recipe_of(tmp_path, "LoRA")
    assert main(["train", str(recipe), f"model_name_or_path={model}", f"output_dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert "LoRA would adapt nothing: a model of family gelu_llama has none of its lora_targets, gate" in error
    assert "`lora_targets` of family gelu_llama" in error
