"""`erniekit demo vision`: a tiny vision model, from nothing to right answers about pictures it has not seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.demo import shapes
from erniekit.demo.folder import take_folder
from erniekit.demo.tiny_vision import make_tiny_vision
from erniekit.errors import ErnieKitError
from erniekit.recipes import demo_vision
from erniekit.recipes.demo_proofs import losses


def test_a_few_steps_lower_the_loss_and_it_answers_with_words(tmp_path: Path) -> None:
    root = take_folder(tmp_path / "demo")
    recipe = demo_vision.write_data(root, pictures=64, steps=12)
    make_tiny_vision(root / "model")
    demo_vision.train(recipe, root, 12)
    with demo_vision.asking(recipe, root / "sft") as answer:
        scenes = shapes.scenes(1, seed=2)
        assert isinstance(answer(scenes[0].png(), "colour"), str)
        with pytest.raises(ErnieKitError, match="answers about new pictures"):
            demo_vision.right(root, answer, scenes, at_least=1.01)
    curve = losses(root / "sft")
    assert len(curve) == 12
    assert curve[-1] < 0.8 * curve[0]


@pytest.mark.full
def test_it_answers_95_percent_of_new_questions_and_none_better_than_chance_without_pixels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "vision", "--dir", str(tmp_path / "demo")]) == 0
    said = capsys.readouterr().out
    seen, unseen = (int(re.search(rf"{word} +.*?(\d+)%", said)[1]) for word in ("seen", "blank"))
    assert seen >= 95
    assert 10 <= unseen <= 40
    assert "every proof holds" in said
    assert main(["demo", "vision", "--dirr", "x"]) == 2
