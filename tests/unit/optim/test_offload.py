"""States kept in host memory: the same numbers bit for bit, and less of them on the device."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from erniekit.devices import cuda
from erniekit.devices.apple import AppleDevice
from erniekit.devices.cpu import CpuDevice
from erniekit.optim import offload
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.in_backward import BackwardUpdates
from erniekit.optim.offload import InHost, OnDevice, Streamed, states_home
from support.lazy_device import LazyDevice
from support.optimizer_steps import steps_taken
from support.ranks import Ranks

WIDTH = 6
HOST = CpuDevice("CPU", "cpu", 0)


class Elsewhere(OnDevice):
    """What InHost does between a device and the host, done between two places of the CPU's memory, and counted."""

    def __init__(self, one_by_one: bool) -> None:
        self.one_by_one = one_by_one
        self.here = self.most = self.moved = 0  # elements

    def fetch(self, kept: torch.Tensor, device: torch.device) -> torch.Tensor:
        value = kept.clone()
        self.moved += kept.numel()
        self.here += kept.numel()
        self.most = max(self.most, self.here)
        weakref.finalize(value, self._gone, kept.numel())
        return value

    def _gone(self, count: int) -> None:
        self.here -= count

    def store(self, value: torch.Tensor, kept: torch.Tensor) -> None:
        kept.copy_(value)


def tiny(dtype: torch.dtype, width: int = WIDTH, device: str = "cpu", layers: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device, dtype)


def optimizer_of(model: nn.Module, home: OnDevice | None) -> AdamW:
    return AdamW(make_groups(model.named_parameters(), 3, 0.1), (0.9, 0.95), 1e-8, home=home)


def train(model: nn.Module, optimizer: AdamW, steps: range) -> None:
    first = next(model.parameters())
    for k in steps:
        x = torch.randn(4, model[0].in_features, generator=torch.Generator().manual_seed(k))
        for part in x.to(first.device, first.dtype).split(2):
            model(part).float().pow(2).sum().backward()
        optimizer.clip(optimizer.gradient_norm(), 1.0)
        optimizer.step(1e-2)
        optimizer.zero_grad()


def outcome(model: nn.Module, optimizer: AdamW) -> dict[str, torch.Tensor]:
    states = {**dict(optimizer.state_tensors()), **{f"{n}/master": m for n, m in optimizer.master_tensors()}}
    return {name: t.detach().cpu() for name, t in {**model.state_dict(), **states}.items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_kept_elsewhere_change_no_bit(dtype: torch.dtype, one_by_one: bool) -> None:
    here, there = tiny(dtype), tiny(dtype)
    plain, home = optimizer_of(here, None), Elsewhere(one_by_one)
    train(here, plain, range(5))
    moved = optimizer_of(there, home)
    train(there, moved, range(5))
    each = 2 if dtype == torch.float32 else 3  # moments, and the fp32 copy of a 16-bit weight
    assert home.moved == 5 * each * sum(p.numel() for p in there.parameters()), "they really were elsewhere"
    assert same_bits(outcome(here, plain), outcome(there, moved))
    assert steps_taken(plain) == steps_taken(moved) == 5


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_run_goes_on_bit_for_bit(dtype: torch.dtype, one_by_one: bool) -> None:
    straight = tiny(dtype)
    whole = optimizer_of(straight, None)
    train(straight, whole, range(6))

    first = tiny(dtype)
    before = optimizer_of(first, Elsewhere(one_by_one))
    train(first, before, range(2))
    second = tiny(dtype)
    after = optimizer_of(second, Elsewhere(one_by_one))
    train(second, after, range(7, 9))  # has states of its own, which the restored ones replace
    second.load_state_dict(first.state_dict())
    after.refresh_masters()
    assert after.load(steps_taken(before), dict(before.state_tensors()), dict(before.master_tensors())) == []
    train(second, after, range(2, 6))
    assert same_bits(outcome(straight, whole), outcome(second, after))


def test_one_by_one_has_the_states_of_one_parameter_at_a_time() -> None:
    largest = 3 * WIDTH * WIDTH
    whole, one = Elsewhere(False), Elsewhere(True)
    for home in (whole, one):
        model = tiny(torch.bfloat16)
        train(model, optimizer_of(model, home), range(2))
        assert home.here == 0, "between updates nothing is left"
    assert one.most == largest
    assert whole.most == 3 * largest, "all weights, which are decayed; biases are another group"


def test_states_of_parameters_in_host_memory_are_left_where_they_are() -> None:
    model = tiny(torch.bfloat16)
    home = InHost(HOST, one_by_one=True)
    optimizer = optimizer_of(model, home)
    train(model, optimizer, range(2))
    kept = dict(optimizer.state_tensors())["0.weight/exp_avg"]
    assert home.fetch(kept, torch.device("cpu")) is kept
    reference = tiny(torch.bfloat16)
    plain = optimizer_of(reference, None)
    train(reference, plain, range(2))
    assert same_bits(outcome(reference, plain), outcome(model, optimizer))


def test_either_key_asks_for_host_memory() -> None:
    assert type(states_home(False, False, HOST)) is OnDevice
    for keys, one_by_one in {(True, False): False, (False, True): True, (True, True): True}.items():
        home = states_home(*keys, HOST)
        assert type(home) is InHost
        assert home.one_by_one == one_by_one
        streamed = states_home(*keys, LazyDevice())
        assert isinstance(streamed, Streamed)
        assert streamed.ahead == (1 if one_by_one else 4)


def test_after_a_step_no_gradient_is_left() -> None:
    """What release_grads asks for."""
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny(dtype)
        optimizer = optimizer_of(model, None)
        train(model, optimizer, range(1))
        assert all(p.grad is None for p in model.parameters())
        assert optimizer.gradients() == {}


def test_a_gradient_that_came_past_autograds_hooks_is_summed_in_fp32_too() -> None:
    """Zero-bubble pipelines compute weights' gradients later and add them to `.grad` themselves."""
    model = tiny(torch.bfloat16)
    optimizer = optimizer_of(model, None)
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    want = {name: 2 * grad for name, grad in optimizer.gradients().items()}
    for param, grad in zip(model.parameters(), torch.autograd.grad(model(x).float().sum(), list(model.parameters()))):
        param.grad = grad
    got = optimizer.gradients()
    assert all(p.grad is None for p in model.parameters())
    assert all(g.dtype == torch.float32 for g in got.values())
    assert same_bits(want, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_is_dropped_leaves_no_memory_behind(dtype: torch.dtype) -> None:
    model = tiny(dtype)
    optimizer = optimizer_of(model, InHost(HOST))
    train(model, optimizer, range(1))
    left = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(m) for m in optimizer.masters.values()]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)


class Waited(CpuDevice):
    """Computes at once and takes note of whom it was told to wait for."""

    waited: ClassVar[list[torch.device | None]] = []

    def synchronise(self, handle: torch.device | None = None) -> None:
        self.waited.append(handle)


def test_apples_gpu_is_waited_for_by_a_function_that_takes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    assert not inspect.signature(torch.mps.synchronize).parameters
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append(True))
    home = InHost(AppleDevice("Apple GPU", "mps", 0))
    home._busy.add(torch.device("mps", 0))
    home.settle()
    assert waited == [True]


def test_the_device_is_asked_to_end_its_copies_before_the_host_reads() -> None:
    device = Waited("CPU", "cpu", 0)
    home = InHost(device)
    kept = torch.zeros(3)
    home.store(torch.ones(3), kept)
    home.settle()
    home.settle()
    assert device.waited == [torch.device("cpu")], "once"
    assert home._pinned(100).numel() == 100, "memory that is not pinned, for a device that does not gain by it"


# --- on streams: what a device would do later is done when it is waited for ---


class OnStreams(Streamed):
    """Streamed between two places of the CPU's memory, each copy done when its stream comes to it, and counted."""

    def __init__(self, ahead: int) -> None:
        super().__init__(LazyDevice(), ahead)
        self.most = 0  # states on their way
        self.leaving = self.most_leaving = 0
        self.early = self.fetched = 0

    def fetch(self, kept: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.fetched += 1
        self.early += id(kept) in self._coming
        return super().fetch(kept, device)

    def _brought(self, state: torch.Tensor) -> torch.Tensor:
        here = torch.full_like(state, 77)
        self.device.now.add(lambda: here.copy_(state))
        self.most = max(self.most, len(self._coming) + 1)
        return here

    def _send(self, value: torch.Tensor, kept: torch.Tensor) -> None:
        self.leaving += 1
        self.most_leaving = max(self.most_leaving, self.leaving)
        self.device.now.add(lambda: self._arrive(value, kept))

    def _arrive(self, value: torch.Tensor, kept: torch.Tensor) -> None:
        self.leaving -= 1
        kept.copy_(value)


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_on_streams_are_waited_for_and_change_no_bit(dtype: torch.dtype, ahead: int) -> None:
    here, there = tiny(dtype), tiny(dtype)
    plain, home = optimizer_of(here, None), OnStreams(ahead)
    train(here, plain, range(4))
    moved = optimizer_of(there, home)
    train(there, moved, range(3))
    assert any(stream.work for stream in home.device.streams), "something is still on its way"
    train(there, moved, range(3, 4))
    assert same_bits(outcome(here, plain), outcome(there, moved))
    each = 2 if dtype == torch.float32 else 3
    assert home.most <= each * max(1, ahead), "of few parameters at a time"
    # All but those of each group's first: weights and biases are two groups.
    assert home.early == (home.fetched - 4 * 2 * each if ahead else 0)


@pytest.mark.parametrize(("room", "most"), [(0, 6), (1 << 30, 18)])
def test_the_host_waits_for_states_that_leave_before_it_takes_memory_for_more(
    room: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "LEAVING", room)
    here, there = tiny(torch.bfloat16), tiny(torch.bfloat16)
    plain, home = optimizer_of(here, None), OnStreams(1)
    train(here, plain, range(2))
    moved = optimizer_of(there, home)
    train(there, moved, range(2))
    moved.home.settle()
    assert same_bits(outcome(here, plain), outcome(there, moved))
    assert home.most_leaving == most, "three states each of two parameters, or of all six"


def test_states_on_streams_come_ahead_of_updates_inside_backward_too() -> None:
    here, there = tiny(torch.bfloat16), tiny(torch.bfloat16)
    home = OnStreams(1)
    pairs = [(here, optimizer_of(here, None)), (there, optimizer_of(there, home))]
    for model, optimizer in pairs:
        updates = BackwardUpdates(optimizer, 1.0, per_tensor=True)
        for k in range(4):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k)).bfloat16()
            loss = model(x).float().pow(2).sum()
            updates.begin(1e-2)
            updates.saw_loss(loss)
            loss.backward()
            updates.end()
    assert same_bits(outcome(*pairs[0]), outcome(*pairs[1]))
    assert home.most == 3, "one parameter's at a time"
    assert home.early == home.fetched * 3 // 4, "all but in the first step, which shows the order"


# --- with fully_shard: a rank's states are those of its rows ---


def train_sharded(home: OnDevice | None, device: str) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = tiny(torch.float32, width=5, device=device)  # 5 rows on 2 ranks: 3 and 2
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model, home)
    for k in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(k)).to(device)
        model(x).pow(2).sum().backward()
        optimizer.step(1e-2)
        optimizer.zero_grad()
    weights = {name: p.to_local().detach().cpu().clone() for name, p in model.named_parameters()}
    return weights | dict(optimizer.state_tensors())


def sharded_three_ways() -> list[dict[str, torch.Tensor]]:
    return [train_sharded(home, "cpu") for home in (None, Elsewhere(False), Elsewhere(True))]


@pytest.mark.xdist_group("ranks")
def test_states_of_sharded_parameters_may_be_elsewhere(ranks: Ranks) -> None:
    for plain, whole, one in ranks.run(2, sharded_three_ways):
        assert same_bits(plain, whole)
        assert same_bits(plain, one)
        assert plain["0.weight/exp_avg"].shape == plain["0.weight"].shape
        assert plain["0.weight"].shape[0] in (2, 3)


# --- on a card ---


def memory_of(home: OnDevice | None) -> tuple[dict[str, torch.Tensor], int, int]:
    """What came out; bytes on the card between steps, and the most there were in a step."""
    model = tiny(torch.bfloat16, 1024, "cuda", layers=16)
    optimizer = optimizer_of(model, home)
    train(model, optimizer, range(2))
    optimizer.load(steps_taken(optimizer), dict(optimizer.state_tensors()), dict(optimizer.master_tensors()))
    torch.cuda.synchronize()
    between = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train(model, optimizer, range(2, 5))
    return outcome(model, optimizer), between, torch.cuda.max_memory_allocated()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
def test_on_a_card_the_states_are_in_host_memory_and_the_bits_are_the_same() -> None:
    memory_of(None)  # takes cublas' own memory, for good
    count = 16 * (1024 * 1024 + 1024)
    start = torch.cuda.memory_allocated()
    want, between, most = memory_of(None)
    slack = 4 << 20  # bytes: biases rounded up to 512, and activations
    assert 14 * count <= between - start < 14 * count + slack, "2 bytes a weight, 4 its copy, 8 its moments"
    for one_by_one in (False, True):
        got, between_here, most_here = memory_of(InHost(cuda.make(), one_by_one))
        assert same_bits(want, got)
        assert between_here - start < 2 * count + slack, "the 16-bit weights alone"
        if one_by_one:
            largest = 12 * 1024 * 1024
            assert most_here - start < (2 + 4) * count + largest + slack, "weights, fp32 gradients, one's states"
        assert most_here <= most
    assert most - start > 18 * count


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
def test_on_a_card_the_moments_of_sharded_parameters_are_in_host_memory() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = train_sharded(None, "cuda")
        for one_by_one in (False, True):
            moved = train_sharded(InHost(cuda.make(), one_by_one), "cuda")
            assert moved["0.weight/exp_avg"].is_pinned()
            assert same_bits({name: t.cpu() for name, t in plain.items()}, moved)
    finally:
        dist.destroy_process_group()
