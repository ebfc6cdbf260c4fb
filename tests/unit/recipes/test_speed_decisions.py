"""Whether layers are compiled and how many are computed again, by device, ranks, data and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from erniekit.config import load
from erniekit.devices.base import Device
from erniekit.devices.cpu import CpuDevice
from erniekit.devices.cuda import CudaDevice
from erniekit.models.config import DecoderConfig, MoEShape, VisionShape
from erniekit.parallel.layout import Layout
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.speed_decisions import for_device, for_lengths, layers_to_recompute

GIB = 1024**3
SMALL = DecoderConfig("ernie_dense", 103424, 1024, 3072, 18, 16, 2, 128, 1e-5, 5e5, "pairs", True, 131072)
MOE = MoEShape(experts=64, choices=6, width=1536, shared_width=3072, start=1, end=27)
LARGE = replace(SMALL, hidden_size=2560, intermediate_size=12288, num_layers=28, num_heads=20, num_kv_heads=4, moe=MOE)
SEEING = replace(LARGE, vision=VisionShape(depth=32, width=1280, heads=16, mlp_width=5120))
ALONE: Any = SimpleNamespace(size=1, layout=Layout())


def card(kind: str = "gpu") -> Device:
    made = CudaDevice if kind == "gpu" else CpuDevice
    return made("H200", "cuda", 139 * GIB, {torch.bfloat16: 989.4e12})


def settled(*words: str, device: Any = None, world: Any = ALONE, model: DecoderConfig = SMALL) -> Any:
    cfg = load(["model_name_or_path=x", "train_dataset_path=y", *words], "train")
    cfg = for_device(cfg, device or card(), world, model)
    if cfg.data.joins_rows:
        return cfg
    tokens = cfg.train.per_device_train_batch_size * cfg.data.max_seq_len
    return for_lengths(cfg, device or card(), world, model, tokens, cfg.train.max_steps)


@pytest.mark.parametrize(
    ("words", "device", "ranks", "want"),
    [
        (["packing=True"], "gpu", 1, False),  # replayed, as layers are written
        (["packing=True"], "cpu", 1, False),
        (["packing=True"], "gpu", 2, False),
        (["packing=True", "cuda_graph=False"], "gpu", 2, True),
        (["packing=True", "max_seq_len=32768"], "gpu", 2, False),  # launched, as layers are written
        (["packing=True", "max_seq_len=32768", "max_steps=10000"], "gpu", 2, True),
        (["packing=True", "max_seq_len=32768", "max_steps=-1"], "gpu", 2, True),  # nobody knows how long
        (["packing=True", "max_seq_len=32768", "fine_tuning=LoRA"], "gpu", 1, True),
        (["packing=True", "max_seq_len=32768", "recompute=True"], "gpu", 1, True),
        (["packing=True", "max_seq_len=32768", "compile=True"], "gpu", 1, True),
        (["packing=True", "max_seq_len=32768", "stage=DPO"], "gpu", 1, False),
        (["packing=True", "max_seq_len=2048", "cuda_graph=False"], "gpu", 1, True),
        (["packing=True", "max_seq_len=2048", "compile=True"], "gpu", 1, True),
        (["packing=True", "max_seq_len=2048", "compute_type=fp8"], "gpu", 1, True),
        (["packing=True", "pp_schedule=zero_bubble", "virtual_pp_degree=2"], "gpu", 2, False),
        (["packing=False"], "gpu", 1, False),
        (["packing=False", "length_buckets=off"], "gpu", 1, False),
        (["packing=False", "compute_type=fp32"], "gpu", 1, False),
        (["packing=False", "stage=DPO"], "gpu", 1, True),
        (["packing=False", "compile=True"], "cpu", 2, True),
        (["packing=True", "compile=False"], "gpu", 1, False),
    ],
)
def test_layers_are_compiled_on_cards_with_rows_of_few_lengths_that_the_host_launches_too_slowly_or_as_told(
    words: list[str], device: str, ranks: int, want: bool
) -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    world = SimpleNamespace(size=ranks, layout=Layout(dp=ranks))
    usual = ["batch_size=1", "max_seq_len=8192", "compute_type=bf16", "fine_tuning=Full", "max_steps=100"]
    kept = [word for word in usual if not any(other.startswith(word.split("=")[0] + "=") for other in words)]
    cfg = settled(*kept, *words, device=card(device), world=world)
    if cfg.data.joins_rows:
        assert cfg.model.compile is None or cfg.given("compile"), "the data has not been read"
        cfg = for_lengths(cfg, card(device), world, SMALL, 8192, 100)
    assert cfg.model.compile is want


@pytest.mark.parametrize(
    ("words", "model", "want"),
    [
        (["max_seq_len=2048"], SMALL, True),
        (["max_seq_len=8192"], SMALL, True),
        (["max_seq_len=16384"], SMALL, False),
        (["max_seq_len=8192", "compile=True"], SMALL, False),  # compiled layers have fewer launches
        (["max_seq_len=8192", "fine_tuning=LoRA"], LARGE, True),
        (["max_seq_len=32768", "fine_tuning=LoRA"], LARGE, False),
        (["max_seq_len=8192", "fine_tuning=LoRA", "stage=VL-SFT"], SEEING, True),
        (["max_seq_len=2048"], replace(LARGE, mtp_layers=1), False),
        (["max_seq_len=2048"], replace(LARGE, moe=replace(MOE, width=1532)), False),
        (["max_seq_len=2048", "cuda_graph=True", "use_recompute_moe=True"], LARGE, False),
        (["max_seq_len=2048", "use_recompute_moe=True"], SMALL, True),
        (["max_seq_len=2048", "recompute=True"], SMALL, False),
        (["max_seq_len=2048", "compile=False"], SMALL, False),
        (["max_seq_len=2048", "compile=False", "cuda_graph=True"], SMALL, True),
        (["max_seq_len=2048", "compile=False", "cuda_graph=True"], LARGE, True),
        (["max_seq_len=2048", "cuda_graph=False"], SMALL, False),
        (["max_seq_len=8192", "cuda_graph=True"], SMALL, True),
        (["max_seq_len=2048", "cuda_graph=True"], LARGE, True),
        (["max_seq_len=2048", "cuda_graph=True", "recompute=True"], LARGE, False),
    ],
)
def test_layers_are_replayed_as_graphs_where_a_step_is_shorter_than_its_launches_or_as_told(
    words: list[str], model: DecoderConfig, want: bool
) -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    cfg = settled("compute_type=bf16", "packing=True", "batch_size=1", *words, model=model)
    assert cfg.model.cuda_graph is want
    if "cuda_graph=True" in words and not want:
        assert any("computed again" in str(note) for note in cfg.notes), "a wish that is not granted is told"


@pytest.mark.parametrize(
    ("words", "model", "reason"),
    [
        (["stage=VL-SFT"], SEEING, "two banks of experts"),
        (["compute_type=fp32"], SMALL, "not compute_type: fp32"),
    ],
)
def test_layers_with_steps_that_are_no_kernels_are_replayed_only_when_compiled(
    words: list[str], model: DecoderConfig, reason: str
) -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    asked = ["packing=True", "compile=False", "cuda_graph=True", *([] if "fp32" in words[0] else ["compute_type=bf16"])]
    cfg = settled(*asked, *words, model=model)
    assert cfg.model.cuda_graph is False
    assert any(reason in str(note) for note in cfg.notes)


@pytest.mark.parametrize(
    ("words", "device", "want"),
    [
        (["packing=False"], "gpu", ("on",)),
        (["packing=False", "stage=DPO"], "gpu", ("on",)),
        (["packing=False"], "cpu", ("off",)),
        (["packing=False", "compile=False"], "gpu", ("off",)),
        (["packing=False", "compile=False", "cuda_graph=True"], "gpu", ("on",)),
        (["packing=False", "compile=True"], "cpu", ("on",)),
        (["packing=False", "length_buckets=on"], "cpu", ("on",)),
        (["packing=False", "length_buckets=512,2048"], "cpu", ("512", "2048")),
        (["packing=False", "length_buckets=off"], "gpu", ("off",)),
        (["packing=False", "compat=erniekit"], "gpu", ("off",)),
        (["packing=True", "length_buckets=on"], "gpu", ("off",)),
        (["stage=PT"], "gpu", ("off",)),
    ],
)
def test_rows_of_many_lengths_are_joined_where_layers_are_compiled_or_as_told(
    words: list[str], device: str, want: tuple[str, ...]
) -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    cfg = settled("compute_type=bf16", *words, device=card(device))
    assert cfg.data.length_buckets == want
    assert cfg.data.joins_rows is (want != ("off",))


def test_what_cannot_be_joined_says_why() -> None:
    limited = replace(LARGE, moe=replace(MOE, capacity=(1.5, 1.5, 1.5)))
    pipeline = SimpleNamespace(size=2, layout=Layout(pp=2))
    cases: list[tuple[str, dict[str, Any], list[str]]] = [
        ("moe_capacity", dict(model=limited), []),
        ("pp_runner: torch", dict(world=pipeline), ["pp_runner=torch"]),
    ]
    for why, given, words in cases:
        cfg = settled("packing=False", "length_buckets=on", *words, **given)
        assert cfg.data.length_buckets == ("off",)
        (note,) = [str(note) for note in cfg.notes if note.key == "length_buckets" and not note.quiet]
        assert why in note


def test_layers_are_compiled_where_the_speed_of_the_card_or_of_ranks_that_share_them_is_not_known() -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    words = ["compute_type=bf16", "batch_size=1", "packing=True", "max_seq_len=32768", "fine_tuning=Full"]
    words += ["max_steps=100"]
    sharing: Any = SimpleNamespace(size=2, layout=Layout(fsdp=2))
    unknown = settled(*words, device=replace(card(), peak_flops={}))
    shared = settled(*words, world=sharing)
    assert (settled(*words).model.compile, unknown.model.compile, shared.model.compile) == (False, True, True)


def test_long_runs_of_packs_with_room_are_not_compiled_as_those_would_be_padded() -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    words = ["compute_type=bf16", "batch_size=1", "packing=True", "max_seq_len=32768", "fine_tuning=Full"]
    cfg = for_device(load(["model_name_or_path=x", "train_dataset_path=y", *words], "train"), card(), ALONE, SMALL)
    for tokens, want in ((32768, True), (32700, True), (32200, False)):
        found = for_lengths(cfg, card(), ALONE, SMALL, tokens, 100_000)
        assert (found.model.compile, found.model.cuda_graph) == (want, False)
    assert any("98.3% full" in str(note) for note in found.notes)
    joined = settled(*words, "packing=False")
    assert joined.data.joins_rows, "and padded to their own lengths, compiled or not"
    assert for_lengths(joined, card(), ALONE, SMALL, 32200, 100_000).model.compile is True


def test_graphs_of_joined_rows_are_decided_by_how_long_those_are() -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    cfg = settled("compute_type=bf16", "packing=False", "batch_size=1", "max_seq_len=8192", "fine_tuning=Full")
    assert cfg.model.cuda_graph is None, "the data has not been read"
    short, long = (for_lengths(cfg, card(), ALONE, SMALL, tokens, 100) for tokens in (8192, 16384))
    assert (short.model.cuda_graph, long.model.cuda_graph) == (True, False)
    assert (short.model.compile, long.model.compile) == (False, False)


@pytest.mark.parametrize(
    ("model", "steps", "want"),
    [(SMALL, 100_000, False), (LARGE, 100, False), (LARGE, 100_000, True), (LARGE, -1, True)],
)
def test_replayed_layers_with_experts_are_compiled_for_long_runs_only(
    model: DecoderConfig, steps: int, want: bool
) -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    words = ["compute_type=bf16", "batch_size=1", "max_seq_len=2048", "fine_tuning=LoRA", f"max_steps={steps}"]
    packed = settled(*words, "packing=True", model=model)
    joined = for_lengths(settled(*words, "packing=False", model=model), card(), ALONE, model, 2048, steps)
    for cfg in (packed, joined):
        assert cfg.model.cuda_graph is True
        assert cfg.model.compile is want


def test_layers_with_experts_are_compiled_where_recording_them_has_no_room() -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    words = ["compute_type=bf16", "batch_size=1", "packing=True", "max_seq_len=8192", "fine_tuning=LoRA", "max_steps=9"]
    for memory, want in ((139, False), (80, True)):
        cfg = settled(*words, model=LARGE, device=replace(card(), total_memory=memory * GIB))
        assert (cfg.model.cuda_graph, cfg.model.compile) == (True, want)


@pytest.mark.parametrize(
    ("words", "model", "want"),
    [
        ([], SMALL, (False, False)),  # filled up to max_seq_len only where that was asked for
        ([], SEEING, (False, False)),
        (["cuda_graph=True"], SMALL, (False, True)),
        (["cuda_graph=True", "compute_type=fp8"], SMALL, (True, True)),  # its steps are replayed only when compiled
        (["cuda_graph=True"], SEEING, (True, True)),
        (["cuda_graph=True"], LARGE, (True, True)),
        (["compile=True"], SMALL, (True, True)),
        (["compat=erniekit"], SMALL, (False, True)),  # which fills all of them up
    ],
)
def test_rows_of_many_lengths_are_replayed_only_where_they_are_filled_up(
    words: list[str], model: DecoderConfig, want: tuple[bool, bool]
) -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    usual = ["batch_size=1", "max_seq_len=2048", "packing=False", "length_buckets=off"]
    kept = [] if any(word.startswith("compute_type") for word in words) else ["compute_type=bf16"]
    cfg = settled(*usual, *kept, *words, model=model)
    assert (cfg.model.compile, cfg.model.cuda_graph) == want


def test_a_policys_short_passes_are_replayed_and_those_with_experts_on_request() -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    usual = ["batch_size=1", "packing=True", "compute_type=bf16", "max_steps=100"]
    for model, length, words, want in (
        (SMALL, 2048, ["stage=DPO"], (False, True)),
        (SMALL, 2048, ["stage=DPO", "fine_tuning=LoRA"], (False, True)),
        (SMALL, 8192, ["stage=DPO"], (True, False)),  # compiled ones do not wait for the host, and are faster
        (SMALL, 8192, ["stage=DPO", "cuda_graph=True"], (False, True)),
        (SMALL, 16384, ["stage=DPO", "fine_tuning=Full"], (False, False)),  # nor those as they are written
        (SMALL, 2048, ["stage=KTO"], (True, False)),
        (LARGE, 2048, ["stage=DPO", "fine_tuning=LoRA"], (True, False)),
        (LARGE, 2048, ["stage=DPO", "fine_tuning=LoRA", "cuda_graph=True"], (False, True)),
    ):
        cfg = settled(*usual, f"max_seq_len={length}", *words, model=model)
        assert (cfg.model.compile, cfg.model.cuda_graph) == want, (length, words)


WISHES = [
    ("stage=SFT", "stage=PT", "stage=DPO"),
    ("packing=True", "packing=False", "packing=False length_buckets=off"),
    ("", "compile=True", "compile=False"),
    ("", "cuda_graph=True", "cuda_graph=False"),
    ("compute_type=bf16", "compute_type=fp8", "compute_type=fp32"),
]


@pytest.mark.parametrize("model", [SMALL, LARGE, SEEING], ids=["dense", "experts", "seeing"])
def test_every_wish_is_followed_or_told_and_nothing_is_replayed_that_cannot_be(model: DecoderConfig) -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    for words in product(*WISHES):
        cfg = settled("batch_size=1", "max_seq_len=2048", *" ".join(words).split(), model=model)
        if cfg.data.joins_rows:
            cfg = for_lengths(cfg, card(), ALONE, model, 2048, 100)
        compiled, replayed = cfg.model.compile, cfg.model.cuda_graph
        assert None not in (compiled, replayed), words
        as_written = "compute_type=bf16" in words and model is not SEEING
        assert not replayed or compiled or as_written, words
        assert f"compile={not compiled}" not in words, words
        if f"cuda_graph={not replayed}" in words:
            assert any(note.key == "cuda_graph" and not note.quiet for note in cfg.notes), words


def test_without_data_rows_that_would_be_joined_have_their_full_length() -> None:
    """As benchmarks and rehearsals have them: layers are compiled or replayed as in a run."""
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    folder: Any = SimpleNamespace(config=SMALL)
    for length, want in ((2048, (False, True)), (16384, (True, False))):
        cfg = settled("compute_type=bf16", "packing=False", "batch_size=1", f"max_seq_len={length}")
        model = RunPlan(cfg, card(), ALONE, folder, None, 0).at_full_length().config.model
        assert (model.compile, model.cuda_graph) == want


def test_as_few_layers_are_computed_again_as_memory_asks_for() -> None:
    long = ("recompute=True", "recompute_granularity=auto", "max_seq_len=131072", "packing=True")
    roomy, tight = settled(*long), settled(*long, "memory_limit=40")
    assert roomy.memory.recompute_granularity == tight.memory.recompute_granularity == "full"
    assert len(roomy.memory.no_recompute_layers) == 18, "all fits"
    assert 0 < len(tight.memory.no_recompute_layers) < 18
    assert any("of 18 layers" in str(note) for note in tight.notes)


def test_a_limit_below_the_weights_is_told_with_their_size_and_the_least_that_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = ("recompute=True", "recompute_granularity=auto", "max_seq_len=131072", "packing=True")
    settled(*long, "memory_limit=0.001")
    told = capsys.readouterr().err
    assert "memory_limit: 0.001 (GiB) is too low: weights alone take 0.67 GiB of a rank" in told
    least = told.partition("the least that works is memory_limit: ")[2].partition(",")[0]
    settled(*long, f"memory_limit={least}")
    assert "too low" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("axes", "want"),
    [
        (dict(dp=2), None),
        (dict(tp=2), "ranks exchange tensors inside the layers"),
        (dict(cp=2), "ranks exchange tensors inside the layers"),
        (dict(fsdp=2), "ranks exchange tensors inside the layers"),
        (dict(pp=2), "a pipeline has several micro-batches under way, of which a graph holds one"),
    ],
)
def test_graphs_are_replayed_where_no_collective_is_inside_the_layers(axes: dict[str, int], want: str | None) -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    world = SimpleNamespace(size=2, layout=Layout(**axes))
    cfg = settled("compute_type=bf16", "packing=True", "batch_size=1", "max_seq_len=2048", world=world)
    assert cfg.model.cuda_graph is (want is None)
    (note,) = [note for note in cfg.notes if note.key == "cuda_graph"]
    assert want is None or note.reason == want


def test_less_memory_never_means_fewer_layers_computed_again() -> None:
    counts = [layers_to_recompute(LARGE, 32768, limit * GIB, 0.025, 2048) for limit in (60, 80, 100, 120, 400)]
    assert counts == [28, 20, 12, 4, 0]
    for state, known in ((12, [16, 14, 12, 6, 0]), (8, [15, 14, 12, 6, 0])):
        assert [
            layers_to_recompute(SMALL, 131072, gib * GIB, 1.0, 2048, state) for gib in (24, 32, 40, 64, 100)
        ] == known


def test_a_packed_base_leaves_room_for_more_layers() -> None:
    counts = [
        layers_to_recompute(LARGE, 32768, 60 * GIB, 0.025, 2048, base=base) for base in ("bf16", "int8", "wint4/8")
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[2]
