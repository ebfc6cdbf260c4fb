"""What training leaves behind is served as it is: an adapter by name, unmerged; a run's newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from erniekit.cli.main import main
from support.serving import Live

pytestmark = pytest.mark.xdist_group("server")

WORDS = ("max_model_len=128", "block_size=8", "temperature=0")
PROMPTS = ["hello", "who are you?", "你好", "tell me more about it"]


@dataclass(frozen=True)
class Said:
    text: str
    tokens: list[str]
    logprobs: list[float] = field(compare=False)


def ask(server: Live, model: str) -> list[Said]:
    """Every prompt's greedy answer, asked at once."""

    def one(prompt: str) -> Said:
        answer = server.chat(prompt, model=model, max_tokens=16, logprobs=True).json()["choices"][0]
        told = answer["logprobs"]["content"]
        return Said(answer["message"]["content"], [t["token"] for t in told], [t["logprob"] for t in told])

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, PROMPTS))


def test_a_trained_adapter_served_by_name_says_what_the_merged_model_says(
    train: Callable, tiny_model: Path, tmp_path: Path
):
    train(tmp_path / "style", fine_tuning="LoRA", learning_rate=5e-2, lora_rank=4)
    train(tmp_path / "facts", fine_tuning="LoRA", learning_rate=5e-2, lora_rank=8, seed=7, max_steps=3)
    for name in ("style", "facts"):
        assert main(["export", str(tmp_path / name), "--model_name_or_path", str(tiny_model)]) == 0
    server = Live(tiny_model, *WORDS, "served_model_name=base", f"lora_modules=style={tmp_path}/style,{tmp_path}/facts")
    try:
        cards = {model.id: model.parent for model in server.client().models.list().data}
        assert cards == {"base": None, "style": "base", "facts": "base"}
        with ThreadPoolExecutor(3) as pool:
            said = dict(zip(cards, pool.map(lambda name: ask(server, name), cards)))
    finally:
        server.close()
    texts = {tuple(answer.text for answer in answers) for answers in said.values()}
    assert len(texts) == 3, "the adapters change nothing"
    assert sum(len(answer.tokens) for answer in said["style"]) > 16, "too few tokens to compare"
    for name in ("style", "facts"):
        merged = Live(tmp_path / name / "export", *WORDS)
        try:
            for one, other in zip(ask(merged, name), said[name]):
                assert one == other
                # Two tokens may be spelled alike, but hardly be as likely too; fp32, W + BA against W and BA apart.
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        finally:
            merged.close()


def test_the_output_folder_of_a_run_gives_its_newest_checkpoint_and_a_recipe_what_it_trained(
    train: Callable, tiny_model: Path, tmp_path: Path
):
    train(tmp_path / "run", max_steps=4, save_steps=2, learning_rate=5e-2)
    for file in (tmp_path / "run").glob("model*.safetensors"):
        file.unlink()  # as after a run that was killed: there are checkpoints only
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: {tiny_model}\noutput_dir: {tmp_path}/run\n")
    newest = tmp_path / "run" / "checkpoint-4"
    assert newest.is_dir()
    said = []
    for place in (newest, tmp_path / "run", recipe):
        server = Live(place, *WORDS)
        try:
            (card,) = server.client().models.list().data
            assert (card.id, card.root) == ("run", str(newest))
            said.append(ask(server, "run"))
        finally:
            server.close()
    assert said[0] == said[1] == said[2]
