"""ERNIE with experts against transformers and against numbers recorded from ERNIEKit on Paddle, and its weights through
every layout and back. float32 throughout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.export.run import export
from erniekit.models import MODELS
from erniekit.models.layers.router import Router, Routing
from support.recorded_training import full_curve, gradients, mean_loss, norms

# fp32 sums in another order: these logits reach about 5, one ulp there is 5e-7, and a few dozen of them add up.
TOLERANCE = 1e-5
PADDLE_LOGITS = {"atol": 1e-4, "rtol": 0.0}  # the recording's own advice
PADDLE_LOSS = NORM = 1e-4

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 24,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
CASES: dict[str, dict[str, Any]] = {
    "dense_first": {},
    "no_shared": {"moe_num_shared_experts": 0},
    "all_sparse_untied": {"moe_layer_start_index": 0, "tie_word_embeddings": False},
    "one_in_two_top_5": {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_k": 5},
}


def ids_of(batch: int, length: int) -> torch.Tensor:
    # Id 0 stays out: transformers' padding_idx stops its lookup gradient, ours trains it as ERNIEKit does.
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(3))


def transformers_model(**changes: Any) -> Any:
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    config = Ernie4_5_MoeConfig(**{**TINY, **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = Ernie4_5_MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            scale = 0.05 if "correction" in name else 0.3 if name.endswith("gate.weight") else 0.12
            param.copy_(1 + 0.1 * noise if "norm" in name else scale * noise)
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, Any]:
    theirs = transformers_model(**CASES[request.param])
    path = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(path)
    return ModelFolder(path), theirs


def routings(model: nn.Module, ids: torch.Tensor) -> list[Routing]:
    """What each router answered on the way to the logits."""
    seen: list[Routing] = []
    hooks = [
        m.register_forward_hook(lambda _, __, out: seen.append(out)) for m in model.modules() if isinstance(m, Router)
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return seen


def test_logits_and_every_gradient_equal_transformers(pair: tuple[ModelFolder, Any]) -> None:
    folder, theirs = pair
    ours, ids = folder.build(torch.float32), ids_of(2, 23)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(23) < 3, -100)
    theirs.zero_grad()
    logits = ours(ids), theirs(ids, use_cache=False).logits
    assert logits[1].abs().max() > 1
    torch.testing.assert_close(*logits, atol=TOLERANCE, rtol=TOLERANCE)
    for each in logits:
        F.cross_entropy(each.flatten(0, 1), labels.flatten()).backward()
    want = {name: p.grad for name, p in theirs.named_parameters() if "correction" not in name}
    params, seen = dict(ours.named_parameters()), set()
    for entry in folder.spec.names(folder.config, "hf_fused"):  # transformers holds its experts fused
        if entry.ours.endswith("router.bias"):
            assert params[entry.ours].grad is None  # moved by the balance update alone
            continue
        for name, grad in zip(entry.theirs, entry.write(params[entry.ours].grad)):
            assert want[name].abs().max() > 0, name
            torch.testing.assert_close(grad, want[name], atol=TOLERANCE, rtol=TOLERANCE, msg=lambda m, n=name: n + m)
            seen.add(name)
    assert seen == want.keys()


def test_router_outputs_equal_transformers(pair: tuple[ModelFolder, Any]) -> None:
    folder, theirs = pair
    ids, expected = ids_of(2, 23), []
    hooks = [
        module.register_forward_hook(lambda _, __, out: expected.append(out))
        for name, module in theirs.named_modules()
        if name.endswith(".mlp.gate")
    ]
    with torch.no_grad():
        theirs(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    got = routings(folder.build(), ids)
    assert len(got) == len(expected) == sum(folder.config.sparse(i) for i in range(3))
    for mine, (logits, weights, chosen) in zip(got, expected):
        torch.testing.assert_close(mine.logits, logits, atol=TOLERANCE, rtol=0)
        assert torch.equal(mine.ids, chosen)
        torch.testing.assert_close(mine.weights, weights, atol=TOLERANCE, rtol=0)


def test_16_bit_logits_stay_within_rounding_of_transformers_and_the_router_stays_fp32(tmp_path: Path) -> None:
    """top-k of all experts: no choice that rounding could tip, so that only rounding is compared."""
    theirs = transformers_model(moe_k=8)
    theirs.save_pretrained(tmp_path)
    ids = ids_of(2, 11)
    with torch.no_grad():
        exact = theirs(ids, use_cache=False).logits
        ours = ModelFolder(tmp_path).build(torch.bfloat16)
        assert {n for n, p in ours.named_parameters() if p.dtype == torch.float32} == {
            f"layers.{i}.mlp.router.{leaf}" for i in (1, 2) for leaf in ("weight", "bias")
        }
        mine = ours(ids).float()
        rounded = theirs.to(torch.bfloat16)(ids, use_cache=False).logits.float()
    assert (mine - exact).norm() <= 1.5 * (rounded - exact).norm()


# --- recorded from Paddle ---


@pytest.fixture(scope="module")
def moe(paddle: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((paddle / "moe.json").read_text()), load_file(paddle / "moe.safetensors")


@pytest.mark.parametrize("layout", ["moe_old", "moe_new"])
def test_logits_equal_paddles_from_both_layouts(paddle: Path, moe: tuple, layout: str) -> None:
    numbers, folder = moe[1], ModelFolder(paddle / layout)
    assert folder.layout == {"moe_old": "paddle", "moe_new": "hf"}[layout]
    torch.testing.assert_close(folder.build()(numbers["input_ids"]), numbers["logits"], **PADDLE_LOGITS)


@pytest.mark.parametrize("restart", [False, True], ids=["running_positions", "restarting_positions"])
def test_packed_logits_equal_paddles(paddle: Path, moe: tuple, restart: bool) -> None:
    numbers = moe[1]
    lengths = numbers["packed.lengths"]
    bounds = F.pad(lengths.cumsum(0), (1, 0)).int()
    positions = torch.cat([torch.arange(int(n)) for n in lengths])[None] if restart else None
    model = ModelFolder(paddle / "moe_old").build()
    logits = model(numbers["input_ids"][:1], positions, bounds, int(lengths.max()))
    expected = numbers["packed.logits_restarting_positions" if restart else "packed.logits"]
    torch.testing.assert_close(logits, expected, **PADDLE_LOGITS)


def test_router_outputs_equal_paddles(paddle: Path, moe: tuple) -> None:
    record, numbers = moe
    got = routings(ModelFolder(paddle / "moe_old").build(), numbers["input_ids"])
    for layer, routing, facts in zip((1, 2, 3), got, record["router"], strict=True):
        torch.testing.assert_close(routing.probs, numbers[f"router.{layer}.prob"], atol=TOLERANCE, rtol=0)
        # Paddle lists a token's choices in its own order.
        mine, mine_at = routing.ids.sort(-1)
        want, want_at = numbers[f"router.{layer}.topk_ids"].long().sort(-1)
        assert torch.equal(mine, want)
        weights = numbers[f"router.{layer}.weights"].gather(1, want_at)
        torch.testing.assert_close(routing.weights.gather(1, mine_at), weights, atol=TOLERANCE, rtol=0)
        assert torch.bincount(routing.ids.flatten(), minlength=8).tolist() == facts["load"]
        without_bias = routing.probs.topk(2, dim=-1).indices.sort(-1).values
        assert int((without_bias != mine).any(-1).sum()) == facts["tokens_whose_choice_the_bias_changes"]


@pytest.mark.parametrize("layout", ["moe_old", "moe_new"])
def test_loss_and_gradient_norms_equal_paddles_under_every_name(paddle: Path, moe: tuple, layout: str) -> None:
    record, numbers = moe
    folder = ModelFolder(paddle / layout)
    model = folder.build()
    loss = mean_loss(model, numbers["input_ids"], numbers["labels_shifted"])
    loss.backward()
    assert loss.item() == pytest.approx(record["ce_loss"], abs=PADDLE_LOSS)
    grads = gradients(model)
    total = torch.stack([g.double().norm() for g in grads.values()]).norm()
    assert float(total) == pytest.approx(record["grad_norm_total"], rel=NORM)
    for world, key in (("paddle", "grad_norms_fused_names"), ("hf", "grad_norms_hf_names")):
        assert norms(folder.spec.names(folder.config, world), grads) == pytest.approx(record[key], rel=NORM)


def test_gradients_equal_paddles_element_by_element(paddle: Path, moe: tuple) -> None:
    numbers, folder = moe[1], ModelFolder(paddle / "moe_old")
    model = folder.build()
    mean_loss(model, numbers["input_ids"], numbers["labels_shifted"]).backward()
    grads = gradients(model)
    single = [e for e in folder.entries() if not e.copy_of and len(e.theirs) == 1 and e.ours in grads]
    ours = {e.theirs[0]: e.write(grads[e.ours])[0] for e in single}
    stored = {key.removeprefix("grad."): value for key, value in numbers.items() if key.startswith("grad.")}
    assert len(stored) == 13
    for name, expected in stored.items():
        torch.testing.assert_close(ours[name], expected, atol=TOLERANCE, rtol=1e-4)


def test_twenty_full_steps_follow_paddles_curve(paddle: Path, moe: tuple) -> None:
    """Without router losses, which tests/unit/losses adds."""
    record, numbers = moe
    run, folder = record["full_finetune"], ModelFolder(paddle / "moe_old")
    model = folder.build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, grad_norms = full_curve(model, run, numbers)
    assert losses == pytest.approx(run["loss"], abs=PADDLE_LOSS)
    assert grad_norms == pytest.approx(run["grad_norm_before_clip"], rel=NORM)
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    changes = norms(folder.spec.names(folder.config, "hf"), moved)
    changes = {name: value for name, value in changes.items() if "correction" not in name}
    expected = {n: v for n, v in run["final_param_change_norm_hf_names"].items() if "correction" not in n}
    assert changes == pytest.approx(expected, rel=NORM)
    with torch.no_grad():
        logits = model(numbers["input_ids"][:1])
    # Logits reach 11 now, and twenty steps of AdamW have grown the differences: the losses agree to 5e-6.
    torch.testing.assert_close(logits, numbers["logits_after_training"], atol=3e-4, rtol=0)


# --- layouts ---


def same_files(a: Path, b: Path) -> None:
    left, right = ({k: t for f in path.glob("model*.safetensors") for k, t in load_file(f).items()} for path in (a, b))
    assert left.keys() == right.keys()
    assert all(left[k].dtype == right[k].dtype and torch.equal(left[k], right[k]) for k in left)


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A per-expert Hugging Face folder with two layers that predict further tokens; no weight is trivial."""
    raw = {"model_type": "ernie4_5_moe", **TINY, "num_nextn_predict_layers": 2, "tie_word_embeddings": True}
    spec = MODELS.get("ernie4_5_moe")
    model = spec.build(spec.read_config(raw, "hf", False, "config.json"))
    generator = torch.Generator().manual_seed(5)
    state = {n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in model.state_dict().items()}
    folder = tmp_path_factory.mktemp("mtp") / "hf"
    write_model(folder, model.config, state.__getitem__)
    return folder


def test_hf_to_fused_to_paddle_and_back_keeps_every_bit_and_the_mtp_layers(with_mtp: Path, tmp_path: Path) -> None:
    fused = export(with_mtp, None, tmp_path / "fused", layout="hf_fused", max_shard_size=1e-4)
    in_paddle = export(fused, None, tmp_path / "paddle", layout="paddle")
    back = export(in_paddle, None, tmp_path / "back", layout="hf")
    same_files(with_mtp, back)
    layouts = {"hf": with_mtp, "hf_fused": fused, "paddle": in_paddle}
    for layout, folder in layouts.items():
        opened = ModelFolder(folder)
        assert (opened.layout, opened.config.mtp_layers) == (layout, 2)
        assert any("mtp_block.1." in name for name in opened.files)
        assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2
    stored = load_file(in_paddle / "model.safetensors")
    assert stored["ernie.mtp_linear_proj.0.weight"].shape == (128, 64)
    assert stored["ernie.layers.1.mlp.experts.7.up_gate_proj.weight"].shape == (64, 48)
    same_files(fused, export(back, None, tmp_path / "again", layout="hf_fused", max_shard_size=1e-4))


def test_paddles_two_layouts_hold_the_same_weights(paddle: Path, tmp_path: Path) -> None:
    same_files(export(paddle / "moe_old", None, tmp_path / "hf"), paddle / "moe_new")
    same_files(export(paddle / "moe_new", None, tmp_path / "old", layout="paddle"), paddle / "moe_old")


@pytest.mark.parametrize("layout", ["hf", "hf_fused"])
def test_transformers_reads_both_of_our_layouts(with_mtp: Path, tmp_path: Path, layout: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = with_mtp if layout == "hf" else export(with_mtp, None, tmp_path / "fused", layout=layout)
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    ids = ids_of(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(ModelFolder(folder).build()(ids), theirs(ids).logits, atol=TOLERANCE, rtol=0)


def test_a_folder_that_lost_its_mtp_layers_is_read_as_it_is_and_says_so_when_written(
    with_mtp: Path, tmp_path: Path
) -> None:
    """transformers drops the layers and keeps their number in config.json."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(with_mtp, dtype=torch.float32).save_pretrained(tmp_path / "lost")
    assert json.loads((tmp_path / "lost" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    folder, ids = ModelFolder(tmp_path / "lost"), ids_of(1, 9)
    assert folder.config.mtp_layers == 0
    with torch.no_grad():
        assert torch.equal(folder.build()(ids), ModelFolder(with_mtp).build()(ids))
    out = export(tmp_path / "lost", None, tmp_path / "out", layout="paddle")
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_folder_without_correction_bias_routes_without_one(paddle: Path, tmp_path: Path) -> None:
    """ERNIEKit with moe_use_aux_free off leaves no bias behind."""
    source = ModelFolder(paddle / "moe_new")
    state = source.build().state_dict()
    plain = source.spec.settle(source.config, [n for n in source.files if "correction" not in n])
    write_model(tmp_path / "out", plain, state.__getitem__)
    folder = ModelFolder(tmp_path / "out")
    assert folder.config.moe is not None
    assert not folder.config.moe.bias
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["moe_use_aux_free"]
    chosen = routings(folder.build(), ids_of(1, 20))[0]
    assert torch.equal(chosen.ids, chosen.probs.topk(2, dim=-1).indices)
