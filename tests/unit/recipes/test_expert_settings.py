"""What the keys of experts and further-token layers make of a model, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig, load
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from erniekit.recipes import expert_layers, expert_settings
from erniekit.recipes.build import build
from erniekit.recipes.built import Built
from erniekit.recipes.optimiser import make_optimizer
from erniekit.recipes.run_plan import plan_run
from erniekit.recipes.stage import TrainingStage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, the second with 8 experts, and one that predicts a further token; the bias is not zero."""
    made = make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe")
    from safetensors.torch import load_file, save_file

    tensors = load_file(str(made / "model.safetensors"))
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    tensors[name] = torch.linspace(-0.3, 0.3, 8)[None]
    save_file(tensors, str(made / "model.safetensors"), metadata={"format": "pt"})
    return made


def config(*words: str) -> RunConfig:
    return load(["compute_type=fp32", "device=cpu", "fine_tuning=Full", *words])


def built_with(folder: Path, *words: str) -> Built:
    return build(plan_run(config(f"model_name_or_path={folder}", *words), one_process=True), TrainingStage())


def routers(built: Built) -> list[Any]:
    return [block.router for _, block in expert_layers.blocks(built.engine.parts)]


def test_layers_that_predict_further_tokens_rest_unless_asked_for(folder: Path) -> None:
    resting, trained = built_with(folder), built_with(folder, "num_nextn_predict_layers=1")
    assert (resting.mtp_tokens, trained.mtp_tokens) == (0, 1)
    assert not any(p.requires_grad for n, p in resting.parameters() if n.startswith("mtp."))
    assert all(p.requires_grad for n, p in trained.parameters() if n.startswith("mtp."))
    assert trained.engine.model.mtp_weight == 0.3
    assert set(resting.saved_names()) == set(trained.saved_names()), "and are saved in either case"


def test_a_weight_of_zero_lets_them_rest(folder: Path) -> None:
    assert built_with(folder, "num_nextn_predict_layers=1", "multi_token_pred_lambda=0").mtp_tokens == 0


@pytest.mark.parametrize("asked", [2, 3])
def test_more_of_them_than_the_model_has_is_refused(folder: Path, asked: int) -> None:
    with pytest.raises(ConfigError) as e:
        built_with(folder, f"num_nextn_predict_layers={asked}")
    assert "this model has 1" in e.value.what
    assert "set it to 1" in e.value.fix


def test_a_dense_model_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        built_with(make_tiny_model(tmp_path), "num_nextn_predict_layers=1")
    assert "this model has no layers" in e.value.what


def test_from_nothing_there_are_as_many_as_asked_for(folder: Path) -> None:
    assert built_with(folder, "continue_training=False", "num_nextn_predict_layers=2").mtp_tokens == 2
    assert built_with(folder, "continue_training=False").mtp_tokens == 1, "and those of config.json are trained"
    without = built_with(folder, "continue_training=False", "num_nextn_predict_layers=0")
    assert not [n for n in without.saved_names() if n.startswith("mtp.")]


def test_preference_training_does_not_train_them(folder: Path) -> None:
    with pytest.raises(ConfigError, match="scores answers"):
        expert_settings.as_built(ModelFolder(folder), config("stage=DPO", "num_nextn_predict_layers=1"))


def test_aux_free_off_is_said_aloud_and_the_bias_is_kept_but_not_looked_at(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    usual, off = built_with(folder), built_with(folder, "moe_use_aux_free=False")
    assert "ignores the bias" in capsys.readouterr().out
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    (a,), (b,) = routers(usual), routers(off)
    assert torch.equal(a.bias, b.bias)
    assert not torch.equal(a(x).ids, b(x).ids)
    assert torch.equal(b(x).ids, b(x).probs.topk(2).indices)
    tensors = dict(off.parameters())
    off.write_weights(tmp_path, {name: tensors[name].detach() for name in off.saved_names()})
    assert json.loads((tmp_path / "config.json").read_text())["moe_use_aux_free"] is False
    again = ModelFolder(tmp_path).build()
    assert torch.equal(again.layers[1].mlp.router.bias, a.bias)
    assert not again.layers[1].mlp.router.biased, "what trained is what is served"


def test_aux_free_off_under_compat_leaves_no_bias_at_all(folder: Path, tmp_path: Path) -> None:
    off = built_with(folder, "moe_use_aux_free=False", "compat=erniekit")
    assert [r.bias for r in routers(off)] == [None]
    tensors = dict(off.parameters())
    off.write_weights(tmp_path, {name: tensors[name].detach() for name in off.saved_names()})
    assert not [n for n in ModelFolder(tmp_path).files if "correction_bias" in n]


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ((), 0.0),
        (("moe_use_aux_free_update_coef=0.002",), 0.002),
        (("stage=PT",), 0.001),
        (("stage=PT", "compat=erniekit"), 0.001),
        (("moe_use_aux_free_update_coef=0.002", "compat=erniekit"), 0.0),
        (("stage=PT", "fine_tuning=LoRA"), 0.0),
    ],
)
def test_the_bias_moves_in_pre_training_and_where_asked_to_but_never_under_adapters(
    folder: Path, words: tuple[str, ...], step: float
) -> None:
    assert expert_settings.bias_step(config(*words), ModelFolder(folder).config) == step


def test_a_bias_that_is_not_looked_at_does_not_move(folder: Path) -> None:
    model = ModelFolder(folder)
    cfg = config("stage=PT", "moe_use_aux_free=False")
    changed, _ = expert_settings.as_built(model, cfg)
    assert expert_settings.bias_step(cfg, changed.config) == 0.0
    assert expert_settings.bias_step(config("stage=PT"), model.config), "the opened folder is as it was"


def test_the_router_learns_at_its_own_rate(folder: Path) -> None:
    cfg = config("moe_gate_lr_ratio=0.25", f"model_name_or_path={folder}")
    groups = make_optimizer(cfg, built_with(folder)).groups
    scales = {name: g.lr_scale for g in groups for name in g.names}
    assert {n for n, s in scales.items() if s == 0.25} == {"layers.1.mlp.router.weight"}
    assert set(scales.values()) == {0.25, 1.0}


def test_experts_take_no_more_tokens_than_they_may(folder: Path) -> None:
    (router,) = routers(built_with(folder, "expert_max_capacity=5"))
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    routing = router(x)
    load = torch.bincount(routing.ids.flatten(), minlength=9)
    assert int(load[:8].max()) == 5
    assert int(load[8]) > 0, "the others are dropped"
    kept = routing.ids < 8
    assert torch.allclose(routing.weights.sum(-1)[kept.any(-1)], torch.ones(int(kept.any(-1).sum())))


def test_recompute_of_experts_and_further_layers_changes_no_gradient(folder: Path) -> None:
    from erniekit.data.collate import with_future
    from erniekit.recipes.doctor import two_documents

    batch = with_future(two_documents(torch.arange(3, 35)[None], 16), 1)
    batch.labels[:, :-1] = batch.input_ids[:, 1:]
    batch = with_future(batch, 1)
    grads = []
    for words in ((), ("use_recompute_moe=True", "use_recompute_mtp=True"), ("recompute=True", "use_recompute_moe=1")):
        built = built_with(folder, "num_nextn_predict_layers=1", *words)
        built.engine.forward_backward([batch], [32.0])
        grads.append({n: p.grad for n, p in built.parameters() if p.grad is not None})
    assert any(n.startswith("mtp.") for n in grads[0])
    for other in grads[1:]:
        assert all(torch.allclose(other[n], grads[0][n], atol=1e-7) for n in grads[0])
