"""DoRA and PiSSA against the installed peft: logits, gradients, training steps, files and merges (fp32)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.errors import CheckpointError, ConfigError
from erniekit.export.run import export
from erniekit.lora.adapter import adapter_of, attach, combined, load_adapter
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.inject import inject, lora_state
from erniekit.lora.settings import LoRASettings
from erniekit.lora.start_values import principal, start_from_weights
from support.merged import fold

RANK, STEPS = 4, 3
BASES = {"ernie": "dense_old", "llama": "llama_fused"}
DORA, PISSA = (LoRASettings.resolve(RANK, dora=kind == "dora", pissa=kind == "pissa") for kind in ("dora", "pissa"))
METHODS = {"dora": DORA, "pissa": PISSA}


@pytest.fixture(scope="module")
def bases(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {name: export(paddle / folder, None, root / name) for name, folder in BASES.items()}


def ours(base: Path, settings: LoRASettings) -> nn.Module:
    model = ModelFolder(base).build()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    inject(model, settings, seed=0)
    start_from_weights(model, weights.__getitem__, seed=0, iterations=0)
    return model


def theirs(base: Path, adapter: Path | None = None, **config: Any) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, **config))


def ids_for(model: nn.Module, seed: int) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, answer: Callable[[torch.Tensor], torch.Tensor], steps: int = STEPS) -> list[float]:
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.05)
    losses = []
    for step in range(steps):
        ids = ids_for(model, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(answer(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def by_public(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """peft's trainable tensors under the names our adapters' files have."""
    return {name.replace(".default", "").removesuffix(".weight"): value for name, value in state.items()}


def same(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, atol=tolerance * max(1.0, float(want.detach().abs().max())), rtol=0)


@pytest.mark.parametrize("family", BASES)
def test_dora_trains_as_in_peft_from_the_same_start(bases: dict[str, Path], tmp_path: Path, family: str) -> None:
    model = ours(bases[family], DORA)
    write_adapter(tmp_path / "start", adapter_of(model, DORA), model)
    other = theirs(bases[family], tmp_path / "start")
    ids = ids_for(model, 9)
    plain = ModelFolder(bases[family]).build()
    same(model(ids), plain(ids))  # B is zero and each row has the length it had: the base's answers
    for answer, each in ((model, model), (lambda x: other(x).logits, other)):
        F.cross_entropy(answer(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        assert any(p.grad is not None and bool(p.grad.any()) for p in each.parameters())
    mine, want = gradients(model, DORA), by_public({n: p.grad for n, p in other.named_parameters() if p.requires_grad})
    assert {name.rpartition(".")[2] for name in want} == {"lora_A", "lora_B", "lora_magnitude_vector"}
    for name, grad in want.items():
        same(mine[name], grad)
    assert train(model, model) == pytest.approx(train(other, lambda x: other(x).logits), abs=1e-5)
    with torch.no_grad():
        same(model(ids), other(ids).logits)


def gradients(model: nn.Module, settings: LoRASettings) -> dict[str, torch.Tensor]:
    """Ours by the names of peft's tensors: a gradient is an adapter whose values are gradients."""
    values = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    made = adapter_of(model, settings, values)
    out = {}
    for name, update in made.updates.items():
        prefix = f"base_model.model.{name}."
        out |= {prefix + "lora_A": update.A, prefix + "lora_B": update.B}
        if update.magnitude is not None:
            out[prefix + "lora_magnitude_vector"] = update.magnitude
    return out


@pytest.mark.parametrize("family", BASES)
def test_pissa_trains_as_in_peft_and_its_file_needs_the_original_base_alone(
    bases: dict[str, Path], tmp_path: Path, family: str
) -> None:
    model, other = ours(bases[family], PISSA), theirs(bases[family], init_lora_weights="pissa")
    ids, plain = ids_for(model, 9), ModelFolder(bases[family]).build()
    same(model(ids), plain(ids))
    with torch.no_grad():
        same(other(ids).logits, plain(ids), 1e-4)  # their base is the residual, rounded
    wanted = {name: p.detach().clone() for name, p in by_public(dict(other.named_parameters())).items()}
    for name, update in adapter_of(model, PISSA).updates.items():
        prefix = f"base_model.model.{name}."
        product = wanted[prefix + "lora_B"] @ wanted[prefix + "lora_A"]  # signs of singular vectors are free
        same(update.B[:, :RANK] @ update.A[:RANK], product)
        same(update.B @ update.A, torch.zeros_like(product))
    # One update by plain SGD does not see those signs either: A and B change them together.
    assert train(model, model) == pytest.approx(train(other, lambda x: other(x).logits), abs=2e-5)
    with torch.no_grad():
        same(model(ids), other(ids).logits, 1e-4)
    files = tmp_path / "adapter"
    write_adapter(files, adapter_of(model, PISSA), model)
    loaded = theirs(bases[family], files)
    assert (loaded.peft_config["default"].r, loaded.peft_config["default"].lora_alpha) == (2 * RANK, 4 * RANK)
    with torch.no_grad():
        same(loaded(ids).logits, model(ids))


@pytest.mark.parametrize("method", METHODS)
def test_files_go_to_peft_and_back_and_merge_to_the_same_model(
    bases: dict[str, Path], tmp_path: Path, method: str
) -> None:
    base, settings = bases["ernie"], METHODS[method]
    model, ids = ours(base, settings), torch.arange(3, 15)[None]
    train(model, model)
    write_adapter(tmp_path / "adapter", adapter_of(model, settings, base=str(base)), model)
    with torch.no_grad():
        want = model(ids)
        same(theirs(base, tmp_path / "adapter").merge_and_unload()(ids).logits, want)
        opened = ModelFolder(base).build()
        attach(opened, read_adapter(tmp_path / "adapter", opened))
        same(opened(ids), want)
        same(fold(opened)(ids), want)
        merged = export(base, tmp_path / "adapter", tmp_path / "merged")
        same(ModelFolder(merged).build()(ids), want)
    again = ours(base, settings)  # a resumed run: what was trained, and what it began as
    load_adapter(again, read_adapter(tmp_path / "adapter", again))
    for name, value in lora_state(model).items():
        assert torch.equal(lora_state(again)[name], value), name


def test_a_dora_adapter_of_peft_is_read(bases: dict[str, Path], tmp_path: Path) -> None:
    other = theirs(bases["ernie"], use_dora=True, init_lora_weights="gaussian")
    train(other, lambda x: other(x).logits)
    other.save_pretrained(tmp_path / "theirs")
    model, ids = ModelFolder(bases["ernie"]).build(), torch.arange(3, 15)[None]
    attach(model, read_adapter(tmp_path / "theirs", model))
    with torch.no_grad():
        same(model(ids), other(ids).logits)


def test_what_cannot_be_done_is_refused_by_name(bases: dict[str, Path], tmp_path: Path) -> None:
    model = ours(bases["ernie"], DORA)
    adapter = adapter_of(model, DORA)
    with pytest.raises(CheckpointError, match="cannot be merged together with others"):
        combined([adapter, adapter])
    with pytest.raises(CheckpointError, match="no place for DoRA"):
        write_adapter(tmp_path / "paddle", adapter, model, "paddle")
    plain = ModelFolder(bases["ernie"]).build()
    inject(plain, LoRASettings.resolve(RANK), 0)
    with pytest.raises(CheckpointError, match="the adapter is DoRA, and this run trains plain LoRA"):
        load_adapter(plain, adapter)
    with pytest.raises(ConfigError, match="takes 65 directions of a weight of 64 x 99"):
        principal(torch.randn(64, 99), 65)


def test_a_randomised_decomposition_is_close_to_the_exact_one_and_repeats_itself() -> None:
    torch.manual_seed(0)
    weight = torch.randn(80, 60) @ torch.diag(0.8 ** torch.arange(60.0)) @ torch.randn(60, 60)
    exact, quick, again = (principal(weight, 8, n, "a name") for n in (0, 4, 4))
    best = float((weight - exact[1] @ exact[0]).norm())
    assert float((weight - quick[1] @ quick[0]).norm()) < 1.001 * best
    assert all(torch.equal(a, b) for a, b in zip(quick, again))
