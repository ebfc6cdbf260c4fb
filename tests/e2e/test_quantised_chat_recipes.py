"""ERNIEKit's chat recipes ask for `quantization: wint4`: each packs a tiny model of its kind and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.demo.tiny import make_tiny_model
from support.seeing import seeing_folder

# Recipe -> the family of the tiny model, and the kinds of weights that are left of the mix there.
RECIPES = {
    "0.3B": ("ernie4_5", "int8"),
    "21B-A3B": ("ernie4_5_moe", "int4 and int8"),
    "300B-A47B": ("ernie4_5_moe", "int4 and int8"),
    "VL-28B-A3B": ("", "int4 and int8"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "21B-A3B" else pytest.mark.full) for name in RECIPES]
)
def test_a_recipe_packs_its_model_and_answers(
    name: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, kinds = RECIPES[name]
    model = make_tiny_model(tmp_path / "model", family=family) if family else seeing_folder(tmp_path / "model")
    recipe = root / f"examples/configs/ERNIE-4.5-{name}/run_chat.yaml"
    words = ["max_model_len=256", "max_new_tokens=8", "temperature=0", "device=cpu"]
    assert main(["chat", str(recipe), str(model), *words, "--prompt", "Who are you?"]) == 0
    told = capsys.readouterr()
    assert f"packed as wint4/8 when read: {kinds}, the rest as stored" in told.err + told.out
    assert told.out.strip()
