"""On one NVIDIA card: AdamW with states in few bytes against its definition, and states in host memory on streams."""

from __future__ import annotations

import pytest
import torch

from erniekit.devices import pick
from erniekit.kernels import moments8
from erniekit.kernels.adamw import FusedAdamW, reference
from erniekit.kernels.adamw_slot import Rates, Slot
from erniekit.kernels.exact_master import join, split
from erniekit.kernels.position_noise import TensorPart, draws, salt_of
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.in_backward import BackwardUpdates
from erniekit.optim.offload import OnDevice, states_home
from erniekit.optim.storage import Storage

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

RATES = Rates(1e-3, (0.9, 0.95), 1e-8, 0.1)
SHAPES = ((3, 64), (300, 2560), (64, 1000), (5, 4096))


def slots(masters: str) -> list[Slot]:
    out = []
    for k, shape in enumerate(SHAPES):
        random = torch.Generator("cuda").manual_seed(k)
        start = torch.randn(shape, device="cuda", generator=random)
        root = torch.randn(shape, device="cuda", generator=random).exp() * 1e-4
        place, step = TensorPart(salt_of(1, str(k))), torch.full((), float(k), device="cuda")
        m = torch.randn(shape, device="cuda", generator=random) * root
        *codes, scales = moments8.encode(m, root.square(), draws(place, step, *shape, 1), place.block)
        weight, remainder = split(start)
        grad = (torch.randn(shape, device="cuda", generator=random) * root).bfloat16()
        rest = remainder if masters == "exact16" else None
        out.append(Slot(grad, None, codes[0], codes[1], step, weight, rest, scales, place))
    return out


@pytest.mark.parametrize("masters", ["exact16", "none"])
def test_an_update_is_its_definition(masters: str) -> None:
    got, want = slots(masters), slots(masters)
    scale, good = torch.tensor(0.37, device="cuda"), torch.ones((), device="cuda")
    FusedAdamW().update("", got, RATES, scale, good)
    reference(want, RATES, scale, good)
    for a, b in zip(got, want):
        assert a.weight is not None
        assert b.weight is not None
        if a.remainder is not None and b.remainder is not None:
            torch.testing.assert_close(join(a.weight, a.remainder), join(b.weight, b.remainder), rtol=1e-5, atol=1e-6)
        # fp32 rounded in another order decides few draws; each is off by one step then
        for x, y in ((a.weight, b.weight), (a.average, b.average), (a.square, b.square)):
            assert float((x == y).float().mean()) > 0.98
        for x, y in zip(a.scales or (), b.scales or ()):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def trained(home: OnDevice | None, inside: bool) -> tuple[dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to("cuda", torch.bfloat16)
    groups = make_groups(model.named_parameters(), 8, 0.1)
    optimizer = AdamW(groups, (0.9, 0.95), 1e-8, home=home, storage=Storage("8bit", "exact16"))
    updates = BackwardUpdates(optimizer, 1.0, per_tensor=True) if inside else None
    for k in range(4):
        if k == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(k)).to("cuda", torch.bfloat16)
        loss = model(x).float().pow(2).mean()
        if updates is not None:
            updates.begin(1e-3)
            updates.saw_loss(loss)
        loss.backward()
        if updates is not None:
            updates.end()
        else:
            optimizer.step(1e-3)
            optimizer.zero_grad()
    states = dict(optimizer.state_tensors()) | {f"{n}/@": t for n, t in optimizer.master_tensors()}
    named = {**dict(model.named_parameters()), **states}
    return {n: t.detach().cpu() for n, t in named.items()}, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("inside", [False, True])
def test_states_that_come_on_streams_are_the_same_bits_and_take_less(inside: bool) -> None:
    want, most = trained(None, inside)
    for one_by_one in (False, True):
        got, here = trained(states_home(True, one_by_one, pick("gpu")), inside)
        assert all(torch.equal(got[name], want[name]) for name in want)
        assert here < most


def test_updates_in_backward_hold_the_gradients_of_few_weights() -> None:
    kept, let_go = trained(None, False)[1], trained(None, True)[1]
    assert kept - let_go > 5 * 2 * 1024 * 1024, "of eight weights' gradients two or so are left"
