"""Adapters and merged exports in the hands of others: peft and transformers must compute what we do (fp32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.export.run import export
from erniekit.lora.adapter import adapter_of, attach
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings

TOLERANCE = 1e-5  # relative to the largest logit (about 10): fp32 sums in another order
BASES = {"ernie": "dense_old", "llama": "llama_fused"}


@pytest.fixture(scope="module")
def bases(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The Paddle fixtures as transformers can read them; ERNIE in several shards."""
    root = tmp_path_factory.mktemp("bases")
    return {
        name: export(paddle / folder, None, root / name, max_shard_size=1e-4 if name == "ernie" else 5.0)
        for name, folder in BASES.items()
    }


def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def with_peft(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(theirs(base), adapter).eval()


def ids_for(model: nn.Module, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(seed))


def train_a_little(model: nn.Module, steps: int = 4) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.5)
    for step in range(steps):
        ids = ids_for(model, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE * max(1.0, float(want.abs().max())), rtol=0)


SETTINGS = {
    "all": LoRASettings.resolve(rank=4),
    "rslora": LoRASettings.resolve(rank=4, rslora=True),
    "shared_a": LoRASettings.resolve(rank=4, shared_a=True),
    "some": LoRASettings.resolve(rank=4, alpha=3, targets=["q_proj", "v_proj", "down_proj"]),
    "one_layer": LoRASettings.resolve(rank=4, targets=[r"layers\.1\..*"]),
}


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("case", SETTINGS)
def test_an_adapter_trained_here_gives_the_same_logits_in_peft(
    bases: dict[str, Path], tmp_path: Path, family: str, case: str
) -> None:
    model, settings = ModelFolder(bases[family]).build(), SETTINGS[case]
    before = model(ids_for(model))
    inject(model, settings, seed=1)
    train_a_little(model)
    write_adapter(tmp_path, adapter_of(model, settings, base=str(bases[family])), model)
    with torch.no_grad():
        ours, in_peft = model(ids_for(model)), with_peft(bases[family], tmp_path)(ids_for(model)).logits
    assert (ours - before).abs().max() > 1e-2  # training moved it
    assert_same(in_peft, ours)


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 8},
        {"r": 4, "lora_alpha": 6, "use_rslora": True},
        {"r": 4, "lora_alpha": 8, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.0.mlp.up_proj": 20}},
    ],
)
def test_an_adapter_made_by_peft_gives_the_same_logits_here(
    bases: dict[str, Path], tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "o_proj", "up_proj"]
    torch.manual_seed(0)
    made = get_peft_model(theirs(bases[family]), LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **options))
    for name, param in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    made.save_pretrained(tmp_path / "made")
    model = ModelFolder(bases[family]).build()
    adapter = read_adapter(tmp_path / "made", model)
    attach(model, adapter)
    ids = ids_for(model)
    with torch.no_grad():
        want = made.eval()(ids).logits
        assert_same(model(ids), want)
        # and written again, with its own ranks and scales, peft still reads the same function
        write_adapter(tmp_path / "again", adapter, model)
        assert_same(with_peft(bases[family], tmp_path / "again")(ids).logits, want)


@pytest.mark.parametrize("family", BASES)
def test_a_merged_export_gives_transformers_the_same_logits_and_greedy_tokens(
    bases: dict[str, Path], paddle: Path, tmp_path: Path, family: str
) -> None:
    """Trained on the Paddle folder itself, merged to HF; the reference is the HF copy with the adapter in peft."""
    source = paddle / BASES[family]
    model, settings = ModelFolder(source).build(), LoRASettings.resolve(rank=4)
    inject(model, settings, seed=1)
    train_a_little(model)
    write_adapter(tmp_path / "adapter", adapter_of(model, settings, base=str(source)), model)
    out = export(source, tmp_path / "adapter", tmp_path / "export", max_shard_size=1e-4)
    merged, reference, ids = theirs(out), with_peft(bases[family], tmp_path / "adapter"), ids_for(model)
    greedy = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        assert_same(merged(ids).logits, model(ids))
        assert_same(merged(ids).logits, reference(ids).logits)
        assert torch.equal(merged.generate(ids, **greedy), reference.generate(input_ids=ids, **greedy))


@pytest.mark.parametrize("family", BASES)
def test_paddle_to_hf_to_paddle_is_bit_exact(paddle: Path, bases: dict[str, Path], tmp_path: Path, family: str) -> None:
    out = export(bases[family], None, tmp_path / "back", layout="paddle")
    back, original = (load_file(str(f / "model.safetensors")) for f in (out, paddle / BASES[family]))
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original)
