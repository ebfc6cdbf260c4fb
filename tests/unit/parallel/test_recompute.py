"""Recompute changes when things are computed and where inputs wait, never a number."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from erniekit.devices import cuda
from erniekit.devices.cpu import CpuDevice
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig
from erniekit.parallel.recompute import IN_FLIGHT, HostInputs, apply_recompute
from support.lazy_device import LazyDevice, LazyEvent

LAYERS = 4
HOST = CpuDevice("CPU", "cpu", 0)


class Counted(HostInputs):
    """Keeps copies elsewhere in the CPU's memory, and counts."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.packed = self.unpacked = 0
        self.shapes: set[tuple[int, ...]] = set()

    def pack(self, tensor: torch.Tensor) -> Any:
        self.packed += 1
        self.shapes.add(tuple(tensor.shape))
        return (tensor.detach().clone(),)

    def unpack(self, packed: Any) -> torch.Tensor:
        self.unpacked += 1
        return packed[0]


def model_of(hidden: int = 32, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    config = DecoderConfig(
        family="llama", vocab_size=61, hidden_size=hidden, intermediate_size=2 * hidden, num_layers=LAYERS, num_heads=4,
        num_kv_heads=2, head_dim=hidden // 4, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="halves",
        max_positions=4096, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MODELS.get("llama").build(config)
    return model.to(device, dtype).train()


def gradients(model: nn.Module, length: int = 24) -> list[torch.Tensor]:
    first = next(model.parameters())
    for k in range(2):
        ids = torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(k)).to(first.device)
        model(ids, labels=ids).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def count_calls(module: nn.Module, method: str) -> list[int]:
    plain, calls = getattr(module, method), [0]

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return plain(*args)

    setattr(module, method, counted)
    return calls


@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn", "selective"])
def test_recompute_gives_the_same_gradients_bit_for_bit(granularity: str) -> None:
    want, model = gradients(model_of()), model_of()
    inner = [layer.attn.inner for layer in model.layers]
    calls = [count_calls(module, "forward") for module in inner]
    assert apply_recompute(model, granularity, skip_layers=[1]) == LAYERS - 1
    got = gradients(model)
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert [c[0] for c in calls] == [4, 2, 4, 4], "twice a micro-batch, but for the layer that was skipped"


def test_inputs_kept_elsewhere_give_the_same_gradients_bit_for_bit() -> None:
    want, model, kept = gradients(model_of()), model_of(), Counted()
    apply_recompute(model, "full", skip_layers=[0], inputs=kept)
    got = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert kept.packed == kept.unpacked == 2 * (LAYERS - 1), "one tensor a layer, for each of two micro-batches"
    assert kept.shapes == {(1, 24, 32)}, "hidden states only; what layers share stays"


def test_nothing_is_kept_without_gradients() -> None:
    model, kept = model_of(), Counted()
    want = model_of().eval()(torch.arange(9)[None])
    apply_recompute(model, "full", inputs=kept)
    with torch.no_grad():
        assert torch.equal(model.eval()(torch.arange(9)[None]), want)
    assert kept.packed == 0


def test_inputs_in_host_memory_are_left_where_they_are() -> None:
    want, model, kept = gradients(model_of()), model_of(), HostInputs(HOST)
    apply_recompute(model, "full", inputs=kept)
    assert all(torch.equal(a, b) for a, b in zip(want, gradients(model)))
    tensor = torch.ones(3)
    assert kept.unpack(kept.pack(tensor)) is tensor


class Chip(LazyDevice):
    """With streams and events of its own, which torch.accelerator does not know."""

    pins_memory: ClassVar[bool] = False


def test_copies_go_over_the_streams_and_events_of_the_device() -> None:
    waited: list[LazyEvent] = []

    class Noted(HostInputs):
        def unpack(self, packed: Any) -> torch.Tensor:
            assert len(self._leaving) <= IN_FLIGHT
            result = super().unpack(packed)
            waited.append(packed[-1])
            return result

    want, model, kept = gradients(model_of()), model_of(), Noted(Chip())
    apply_recompute(model, "full", inputs=kept)
    assert all(torch.equal(a, b) for a, b in zip(want, gradients(model)))
    assert len(waited) >= 2 * LAYERS
    assert all(event.happened for event in waited), "nothing is read before its copy has ended"
    tensor = torch.ones(3)
    copy, _, _ = kept.pack(tensor)
    assert copy.data_ptr() != tensor.data_ptr()


# --- on a card ---


def on_the_card(inputs: HostInputs | None, recompute: bool = True) -> tuple[list[torch.Tensor], int]:
    """Gradients, and the bytes that forward left on the card."""
    model = model_of(256, "cuda", torch.bfloat16)
    if recompute:
        apply_recompute(model, "full", inputs=inputs)
    ids = torch.randint(0, 61, (1, 4096), generator=torch.Generator().manual_seed(1)).to("cuda")
    before = torch.cuda.memory_allocated()
    hidden = model.run_layers(model.embed(ids), model.context(torch.arange(4096, device="cuda")[None]))
    held = torch.cuda.memory_allocated() - before
    hidden.float().pow(2).sum().backward()
    return [p.grad for p in model.layers.parameters()], held


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
def test_on_a_card_inputs_wait_in_host_memory_and_the_bits_are_the_same() -> None:
    torch.use_deterministic_algorithms(True)  # attention's backward otherwise sums in no fixed order
    try:
        on_the_card(None)  # cublas' own memory
        want, all_inputs = on_the_card(None)
        got, held = on_the_card(HostInputs(cuda.make()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    one = 4096 * 256 * 2  # bytes of a layer's input
    # The last two copies may still be leaving, and the last of all layers' outputs is our own.
    assert all_inputs - held == (LAYERS - 2) * one, f"{all_inputs} with the inputs, {held} without"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
def test_on_a_card_inputs_may_wait_in_host_memory_under_compile() -> None:
    want = gradients(model_of(256, "cuda"))
    model = model_of(256, "cuda")
    apply_recompute(model, "full", inputs=HostInputs(cuda.make()))
    for layer in model.layers:
        layer.compile()
    for a, b in zip(want, gradients(model)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(a.abs().max()))  # fused kernels round otherwise
