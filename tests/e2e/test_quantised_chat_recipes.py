"""ERNIEKit's chat recipes ask for `quantization: wint4`: each packs a tiny model of its kind and answers."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from erniekit.config import load
from erniekit.demo.tiny import make_tiny_model
from erniekit.serve.chat import answer_prompt, connect, request_fields
from erniekit.serve.chat_session import ChatSession
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
def test_a_recipe_packs_its_model_and_answers(name: str, root: Path, tmp_path: Path) -> None:
    family, kinds = RECIPES[name]
    model = make_tiny_model(tmp_path / "model", family=family) if family else seeing_folder(tmp_path / "model")
    recipe = root / f"examples/configs/ERNIE-4.5-{name}/run_chat.yaml"
    words = ["max_model_len=256", "max_new_tokens=8", "temperature=0", "device=cpu"]
    cfg = load([str(recipe), str(model), *words], "chat")
    said = io.StringIO()
    with connect(cfg, io.StringIO()) as (client, about):
        assert f"packed as wint4/8 when read: {kinds}" in about
        assert answer_prompt(ChatSession(client, request_fields(cfg)), "Who are you?", said, io.StringIO()) == 0
    assert said.getvalue().strip()
