"""LoRA over 8- and 4-bit frozen weights through `erniekit train`: dense and MoE, one and two ranks, SFT and DPO."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import erniekit
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.demo.tiny import TRAIN, make_tiny_model, make_tokenizer
from erniekit.export.run import export
from erniekit.lora.adapter_files import read_adapter
from erniekit.lora.merge import row_updates
from support.merged import merged_tensor
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

TP = dict(tensor_parallel_degree=2)
EP = dict(sharding="stage1", sharding_parallel_degree=2, moe_group="data", gradient_accumulation_steps=1)
STAGE3 = dict(sharding="stage3", sharding_parallel_degree=2, gradient_accumulation_steps=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(folder / name, family=name) for name in ("ernie4_5", "ernie4_5_moe")}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))


def train(model: str, rows: str, output: str, keys: dict[str, Any]) -> tuple[int, str, int, int]:
    """On a rank: the command; how many packed weights have just the bytes that the whole weight's packing has there,
    and how many wait in host memory."""
    from erniekit.cli.main import main
    from erniekit.recipes import training

    values = dict(
        model_name_or_path=model, train_dataset_path=rows, output_dir=output, stage="SFT", fine_tuning="LoRA",
        lora_rank=4, learning_rate=5e-3, max_seq_len=96, max_steps=4, save_steps=4, gradient_accumulation_steps=2,
        report_to="none", device="cpu", doctor="off",
    )  # fmt: skip
    built: list[Any] = []
    usual = training.build
    training.build = lambda *args: built.append(usual(*args)) or built[-1]  # type: ignore[attr-defined,func-returns-value]
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            code = main(["train", *(f"{key}={value}" for key, value in {**values, **keys}.items())])
    finally:
        training.build = usual  # type: ignore[attr-defined]
    return (code, said.getvalue(), *(same_bytes(built[0]) if built else (0, 0)))


def same_bytes(built: Any) -> tuple[int, int]:
    from erniekit.kernels.stored import kind_named
    from erniekit.parallel.sharding_table import plain

    whole, count, away = ModelFolder(built.folder.path).build().state_dict(), 0, 0
    for part in built.engine.parts:
        for gathered in (m for m in part.modules() if hasattr(m, "unshard")):
            gathered.unshard()
        for name, module in part.named_modules():
            if not getattr(module, "is_packed", False):
                continue
            weight, mine = f"{plain(f'{name}.')}weight", module.stored()
            if mine.data.is_meta:
                away += 1
                continue
            packed = kind_named(mine.kind).pack(whole[weight].to(built.dtype))
            width = whole[weight].shape[1]
            for box in built.sharding.boxes(weight, built.world.rank):
                (rows, columns), (there, _) = box.global_slices, box.local_slices
                for all_, held in zip(packed[:3], mine[:3], strict=True):
                    if all_ is None:
                        continue
                    each = all_.shape[1] / width  # tensors for columns, groups of columns or rows
                    cut = slice(int(columns.start * each), int(columns.stop * each)) if all_.shape[1] > 1 else slice(1)
                    assert torch.equal(all_[rows, cut], held[there]), weight
            count += 1
    return count, away


def curve(output: Path) -> list[float]:
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def run(ranks: Ranks, count: int, *args: Any) -> tuple[list[float], str, int]:
    model, rows, output, keys = args
    answers = ranks.run(count, train, str(model), str(rows), str(output), keys)
    for code, said, *_ in answers:
        assert code == 0, said
    return curve(output), answers[0][1], answers[-1][2]


# A group of int4-group and nf4 has 64 columns, the experts' down products 32; cut in two they have no 32 either.
@pytest.mark.parametrize(
    ("base", "packed", "layouts"),
    [
        ("wint4/8", 8, (TP, EP, STAGE3)),
        *(pytest.param(base, 10, (TP, EP), marks=pytest.mark.full) for base in ("int8", "int4")),
        pytest.param("mxfp4", 10, (EP,), marks=pytest.mark.full),
        *(pytest.param(base, 8, (TP, EP), marks=pytest.mark.full) for base in ("int4-group", "nf4")),
    ],
)
def test_a_packed_base_has_the_same_bytes_and_learns_the_same_on_two_ranks(
    base: str,
    packed: int,
    layouts: tuple[dict[str, Any], ...],
    models: dict[str, Path],
    rows: Path,
    tmp_path: Path,
    ranks: Ranks,
) -> None:
    moe, keys = models["ernie4_5_moe"], {"compute_type": "fp32", "frozen_base": base}
    one, said, whole = run(ranks, 1, moe, rows, tmp_path / "one", keys)
    assert whole == packed
    assert ("stay as they are" in said) is (base in ("int4-group", "nf4"))
    for number, layout in enumerate(layouts):
        two, _, same = run(ranks, 2, moe, rows, tmp_path / str(number), {**keys, **layout})
        assert same == packed
        assert two == pytest.approx(one, abs=1e-5)


def test_compute_type_trains_a_dense_model_says_what_it_implies_and_merges_into_the_weights_as_stored(
    models: dict[str, Path], rows: Path, tmp_path: Path, ranks: Ranks
) -> None:
    dense = models["ernie4_5"]
    losses, said, packed = run(ranks, 1, dense, rows, tmp_path / "out", {"compute_type": "wint4/8"})
    assert losses[-1] < losses[0]
    assert packed == 8
    flat = " ".join(said.split())
    assert (
        "frozen_base: bf16 -> wint4/8 (compute_type is wint4/8; int4: routed experts, where there are any; int8:"
        in flat
    )
    assert "compute_type: wint4/8 -> fp32 (bf16 is slow on a CPU" in flat
    merged = ModelFolder(export(dense, tmp_path / "out", tmp_path / "merged")).build().state_dict()
    base = ModelFolder(dense).build()
    updates = row_updates(base, read_adapter(tmp_path / "out", base))
    for name, weight in base.state_dict().items():
        assert torch.equal(merged[name], merged_tensor(weight, updates[name]) if name in updates else weight), name


def test_a_base_cut_over_ranks_is_saved_resumed_and_merged(
    models: dict[str, Path], rows: Path, tmp_path: Path, ranks: Ranks
) -> None:
    moe, keys = models["ernie4_5_moe"], {"compute_type": "fp32", "frozen_base": "wint4/8", "save_steps": 2, **STAGE3}
    whole, _, _ = run(ranks, 2, moe, rows, tmp_path / "out", {**keys, "save_total_limit": -1})
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "out" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    keys |= {"resume_from_checkpoint": tmp_path / "again" / "checkpoint-2"}
    assert run(ranks, 2, moe, rows, tmp_path / "resumed", keys)[0][-2:] == whole[-2:]
    merged = ModelFolder(export(moe, tmp_path / "resumed", tmp_path / "merged")).build().state_dict()
    base = ModelFolder(moe).build()
    updates = row_updates(base, read_adapter(tmp_path / "out", base))
    assert len(updates) == 10
    for name, weight in base.state_dict().items():
        assert torch.equal(merged[name], merged_tensor(weight, updates[name]) if name in updates else weight), name


@pytest.mark.parametrize(("count", "layout"), [(1, {}), pytest.param(2, TP, marks=pytest.mark.full)])
def test_layers_in_host_memory_learn_the_same(
    count: int, layout: dict[str, Any], models: dict[str, Path], rows: Path, tmp_path: Path, ranks: Ranks
) -> None:
    keys = {"compute_type": "fp32", "frozen_base": "wint4/8", "recompute": True, **layout}
    arguments = ranks, count, models["ernie4_5_moe"], rows
    want, _, packed = run(*arguments, tmp_path / "device", keys)
    got, _, on_device = run(*arguments, tmp_path / "host", {**keys, "frozen_layers_in_host": 1})
    assert got == want
    assert 0 < on_device < packed, "one layer's weights are elsewhere"


@pytest.mark.full
@pytest.mark.parametrize("products", ["bf16", "fp8"])
def test_preferences_are_learnt_over_the_mix_as_their_reference(
    products: str, models: dict[str, Path], tmp_path: Path, ranks: Ranks
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    made = [
        {"src": [f"Say {word}."], "tgt": [], "response": [word, word[::-1]], "sort": [1, 0]}
        for word in ("river", "stone", "lamp", "green", "quiet", "window")
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in made))
    for name, count, layout in (("one", 1, {}), ("two", 2, TP)):
        keys = {"compute_type": "wint4/8", "frozen_products": products, "stage": "DPO", "max_prompt_len": 48, **layout}
        found, _, packed = run(ranks, count, models["ernie4_5_moe"], pairs, tmp_path / name, keys)
        assert packed == 8
        assert found[0] == pytest.approx(0.6931, abs=1e-4), "without adapters policy and reference are one"
        assert found[-1] < found[0]


OUTLIER = 5  # a channel that is eight times as large in the weights that read it, and an eighth in the norm before
TIMES = 8


def with_outliers(trained: Path, folder: Path) -> Path:
    """The same function of its input, with a column of large weights as trained models have them: what the norm divides
    the next product multiplies."""
    found = ModelFolder(trained)
    state = found.build().state_dict()
    for name, weight in state.items():
        if name.startswith("layers.") and name.endswith(("attn_norm.weight", "mlp_norm.weight")):
            weight[OUTLIER] /= TIMES
        elif name.startswith("layers.") and name.endswith(("qkv.weight", "gate_up.weight", "router.weight")):
            weight[:, OUTLIER] *= TIMES
    folder.mkdir()
    write_model(folder, found.config, state.__getitem__, layout="hf")
    make_tokenizer(folder)
    return folder


@pytest.mark.full
def test_the_first_loss_over_packed_weights_of_a_trained_model_is_near_that_over_its_own(
    models: dict[str, Path], tmp_path: Path
) -> None:
    keys = dict(
        train_dataset_path=TRAIN, compute_type="fp32", max_seq_len=512, packing=True, report_to="none", device="cpu",
        doctor="off", dataset_num_proc=1, save_strategy="no",
    )  # fmt: skip
    trained = tmp_path / "trained"
    full = dict(fine_tuning="Full", max_steps=60, learning_rate=3e-3)
    erniekit.run("train", model_name_or_path=models["ernie4_5_moe"], output_dir=trained, **full, **keys)
    assert curve(trained)[-1] < 0.3 * curve(trained)[0], "there is something that rounding can spoil"

    def first_loss(model: Path, base: str) -> float:
        output = tmp_path / f"{model.name} {base.replace('/', '-')}"
        lora = dict(fine_tuning="LoRA", max_steps=1, gradient_accumulation_steps=4, frozen_base=base)
        erniekit.run("train", model_name_or_path=model, output_dir=output, **lora, **keys)
        return curve(output)[0]

    usual = first_loss(trained, "bf16")
    assert first_loss(trained, "wint4/8") == pytest.approx(usual, abs=0.02)
    large = with_outliers(trained, tmp_path / "outliers")
    assert first_loss(large, "bf16") == pytest.approx(usual, abs=1e-4), "the same model"
    gaps = {base: first_loss(large, base) - usual for base in ("wint4/8", "int4", "mxfp4")}
    assert abs(gaps["wint4/8"]) < 0.02
    assert 0 < gaps["mxfp4"] < gaps["int4"] / 2
