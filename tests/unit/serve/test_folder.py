"""Which folder a command opens: the one typed, the one a recipe trained, or an adapter on its base."""

from __future__ import annotations

import json

from erniekit.config import load as load_config
from erniekit.serve.folder import choose_folder


def test_a_typed_folder_is_opened_itself(talker):
    assert choose_folder(load_config([str(talker)], "chat")) == (str(talker), None)


def test_a_recipe_means_what_it_trained_when_there_is_something(talker, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: {talker}\noutput_dir: {tmp_path / 'out'}\n")
    assert choose_folder(load_config([str(recipe)], "chat")) == (str(talker), None)
    adapter = tmp_path / "out" / "checkpoint-5"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    assert choose_folder(load_config([str(recipe)], "chat")) == (str(adapter), str(talker))


def test_lora_path_puts_an_adapter_on_the_typed_folder(talker, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    cfg = load_config([str(talker), f"lora_path={tmp_path}"], "chat")
    assert choose_folder(cfg) == (str(tmp_path), str(talker))


def test_a_recipe_whose_run_began_with_an_adapter_means_what_it_trained(talker, tmp_path):
    adapter = tmp_path / "out" / "checkpoint-5"
    for folder in (adapter, tmp_path / "began"):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {talker}\noutput_dir: {tmp_path / 'out'}\nlora_path: {tmp_path / 'began'}\n"
    )
    assert choose_folder(load_config([str(recipe)], "chat")) == (str(tmp_path / "began"), str(talker))
    told = {"config": [{"key": "lora_path", "value": [str(tmp_path / "began")]}]}
    (tmp_path / "out" / "run.json").write_text(json.dumps(told))
    assert choose_folder(load_config([str(recipe)], "chat")) == (str(adapter), str(talker))
