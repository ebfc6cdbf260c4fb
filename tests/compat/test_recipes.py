"""The 98 recorded ERNIEKit recipes, its web page's templates and every key it knew resolve to a run here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from erniekit.config import load, not_yet_supported, refuse_not_yet_supported
from erniekit.config.convert import convert
from erniekit.config.flat import DEFAULTS, KEYS, canonical, is_known
from erniekit.config.ignored_keys import IGNORED_KEYS

DATA = Path(__file__).parents[1] / "data" / "recipes"
RECORDED = json.loads((DATA / "erniekit-recipes.json").read_text())
RECIPES: dict[str, dict] = RECORDED["recipes"]
TEMPLATES = {
    name: values
    for name, values in RECORDED["_meta"]["webui_templates"].items()
    if "/execute/" in name and "load_param" not in name
}
MODELS = ("ERNIE-4.5-0.3B", "ERNIE-4.5-21B-A3B", "ERNIE-4.5-300B-A47B")
# Of these every training recipe runs in this version; the others are refused by name until their part is there.
TRAINED = [name for name in RECIPES if name.startswith(tuple(f"examples/configs/{model}/" for model in MODELS))]
# Left out of the shipped recipes although they are declared: the bar shows on a terminal only.
LEFT_OUT = {"disable_tqdm"}
# Left out of the 0.3B ones besides: without effect on one device, or better left to us.
LEFT_OUT_OF_SMALL = LEFT_OUT | {
    "disable_ckpt_quant", "offload_optim", "pipeline_parallel_config", "scale_loss", "sharding",
    "tensor_parallel_config", "unified_checkpoint_config",
}  # fmt: skip
# Of the recipes of other devices and of pictures besides: words that all do nothing, and two switches that rules turn.
LEFT_OUT_ELSEWHERE = {
    "pipeline_parallel_config", "scale_loss", "serialize_output", "sharding_parallel_config", "tensor_parallel_config",
}  # fmt: skip


def left_out(name: str) -> set[str]:
    small = LEFT_OUT_OF_SMALL if "0.3B" in name else LEFT_OUT
    return small if name in TRAINED else small | LEFT_OUT_ELSEWHERE


def keys(values: dict) -> dict:
    """A recorded recipe with its shorthand for the two AMP lists written out."""
    common = RECORDED["_meta"]["_common_amp"] if values.get("_common_amp") else {}
    return {**{k: v for k, v in values.items() if k != "_common_amp"}, **common}


def command_of(name: str) -> str:
    stem = Path(name).stem
    return next((c for c in ("eval", "export", "chat") if c in stem), "train")


def resolve(folder: Path, name: str, values: dict):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(keys(values), sort_keys=False))
    return load([str(path)], command_of(name))


def test_all_98_recorded_recipes_resolve_with_their_values(tmp_path):
    assert len(RECIPES) == 98
    for name, values in RECIPES.items():
        cfg = resolve(tmp_path, name, values)
        ignored = {item.key for item in cfg.ignored}
        derived = {n.key for n in cfg.notes if n.changes}
        for key, value in keys(values).items():
            if key in ignored:
                continue
            assert cfg.origin(key) != "default", (name, key)
            if key not in derived and isinstance(value, (int, float)) and not isinstance(cfg[key], tuple):
                assert cfg[key] == value, (name, key)


def test_the_web_pages_templates_resolve(tmp_path):
    assert len(TEMPLATES) == 7
    for name, values in TEMPLATES.items():
        resolve(tmp_path, name, values)


def test_no_recipe_needs_a_later_version_whatever_its_device(tmp_path):
    trained: list[str] = []
    for name, values in RECIPES.items():
        cfg = resolve(tmp_path, name, values)
        if cfg.command == "train":
            refuse_not_yet_supported(cfg)
            trained.append(name)
    kinds = {tuple(name.split("/")[2:4]) for name in trained}
    assert kinds >= {(model, kind) for model in MODELS for kind in ("sft", "dpo")} | {("ERNIE-4.5-21B-A3B", "fc")}
    for name in TRAINED:
        assert command_of(name) != "train" or name in trained, name


def test_a_layout_alone_stops_no_recipe(tmp_path):
    """Tensor and pipeline degrees, sharding and their words as recorded, on a dense model."""
    spread = 0
    for name, values in RECIPES.items():
        if command_of(name) != "train" or values["stage"] != "SFT" or values.get("compute_type", "bf16") != "bf16":
            continue
        cfg = resolve(tmp_path, name, {**values, "model_name_or_path": "a-dense-model", "device": "gpu"})
        refuse_not_yet_supported(cfg)
        spread += cfg.parallel.tensor_parallel_degree * cfg.parallel.pipeline_parallel_degree > 1
        words = cfg.parallel.pipeline_parallel_config
        told = {item.name for item in cfg.ignored if item.key == "pipeline_parallel_config"}
        assert told == set(words), name
    assert spread == 21


def test_every_key_erniekit_knew_is_accepted():
    names = [line for line in (DATA / "erniekit-keys.txt").read_text().split("\n") if line and line[0] != "#"]
    assert len(names) > 370
    assert [name for name in names if not is_known(name)] == []


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_hold_the_recorded_values(root, name, tmp_path):
    ours = load([str(root / name)], command_of(name))
    theirs = resolve(tmp_path, name, RECIPES[name])
    differ = {key for key in KEYS if ours[key] != theirs[key]}
    assert differ <= left_out(name)
    assert all(item.key in KEYS for item in ours.ignored)  # words of a layout, no key
    asked = {item.what for item in not_yet_supported(ours) if item.stops}
    assert asked == {item.what for item in not_yet_supported(theirs) if item.stops}
    assert not (asked and name in TRAINED)


def test_shipped_recipes_are_the_recorded_ones_and_say_once_where_they_differ(root):
    shipped = {str(p.relative_to(root)) for p in (root / "examples/configs").rglob("*.yaml")}
    assert set(RECIPES) <= shipped
    for name in RECIPES:
        text = (root / name).read_text().splitlines()
        comments = [i for i, line in enumerate(text) if "#" in line]
        assert comments == list(range(len(comments))), name  # one comment, at the top
        entries = yaml.safe_load("\n".join(text))
        given = {canonical(k) for k in entries} - {"base"}
        reset = {
            k for k in given if convert(KEYS[k], entries.get(k), name) == KEYS[k].default
        }  # what its base gives and it does not
        assert given - reset <= set(RECIPES[name]) - set(IGNORED_KEYS), name


def test_most_shipped_recipes_say_only_how_they_differ_from_another(root):
    """Nothing is written twice: a recipe with a base repeats no value of it."""
    thin = 0
    for name in RECIPES:
        entries = yaml.safe_load((root / name).read_text())
        if "base" not in entries:
            continue
        thin += 1
        base = load([str((root / name).parent / entries.pop("base"))], command_of(name))
        ours = load([str(root / name)], command_of(name))
        assert [key for key in entries if ours[key] == base[key]] == [], name
    assert thin == 77


def test_every_yaml_under_examples_resolves(root):
    for path in (root / "examples").rglob("*.yaml"):
        load([str(path)], command_of(path.name))


def test_the_resolved_lora_recipe_equals_its_golden_dump(root, monkeypatch):
    monkeypatch.chdir(root)
    cfg = load(["examples/configs/ERNIE-4.5-0.3B/sft/run_sft_lora_8k.yaml"])
    stored = cfg.to_dict()
    at_default = {k: list(v) if isinstance(v, tuple) else v for k, v in DEFAULTS.items()}
    now = {
        "values": {k: v for k, v in stored["values"].items() if v != at_default[k]},
        "origins": stored["origins"],
        "notes": [str(n) for n in cfg.notes],
    }
    assert now == json.loads((DATA / "golden_sft_lora_8k.json").read_text())


def test_the_recipes_of_models_that_see_are_at_erniekits_paths_with_data_that_is_there(root, monkeypatch):
    monkeypatch.chdir(root)
    names = [name for name in RECIPES if "-VL-" in name]
    assert sorted(map(command_of, names)) == ["chat", "export", "export", *["train"] * 11]
    for name in names:
        cfg = load([name], command_of(name))
        refuse_not_yet_supported(cfg)
        for path in cfg.data.train_dataset_path or ():
            assert Path(path).is_file(), (name, path)
