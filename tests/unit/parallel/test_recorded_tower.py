"""Which pictures are replayed, and that each gets its own features. Graphs themselves need a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from erniekit.devices.base import Device
from erniekit.models.config import VisionShape
from erniekit.models.layers.vision import VisionTower
from erniekit.parallel import recorded_tower
from erniekit.parallel.recorded_tower import SEEN, RecordedTower

SHAPE = VisionShape(depth=2, width=16, heads=2, mlp_width=24, patch=2)


@dataclass(frozen=True)
class Recorder(Device):
    """Calls what it would record; as a card does, it reads and writes the tensors of the recording."""

    replays: list[int] = field(default_factory=list)

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        work()

        def replay() -> None:
            self.replays.append(1)
            work()

        return replay


def tower() -> VisionTower:
    torch.manual_seed(0)
    made = VisionTower(SHAPE)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        parameter.requires_grad_(False)
    made.alone = True  # as each picture is computed by itself, so are its products
    return made


def pictures(grids: list[tuple[int, int, int]], seed: int) -> torch.Tensor:
    patches = sum(t * h * w for t, h, w in grids)
    return torch.randint(0, 256, (patches, SHAPE.patch_size), generator=torch.Generator().manual_seed(seed)).byte()


def test_pictures_of_a_size_seen_before_are_replayed_with_the_features_of_the_tower() -> None:
    made, device = tower(), Recorder("recorder", "cpu", 0)
    replayed = RecordedTower(made, device)
    common, rare = (1, 4, 4), (2, 2, 6)
    for step in range(SEEN):
        grids = [common, rare] if step == 0 else [common, common]
        patches = pictures(grids, step)
        assert torch.equal(replayed(patches, grids), made(patches, grids))
    assert list(replayed.recorded) == [common]
    assert len(device.replays) == 3, "of five pictures of this size the first two were launched"


def test_a_tower_that_learns_is_not_replayed() -> None:
    made, device = tower(), Recorder("recorder", "cpu", 0)
    made.ln.weight.requires_grad_()
    replayed = RecordedTower(made, device)
    for _ in range(SEEN + 1):
        features = replayed(pictures([(1, 2, 2)], 0), [(1, 2, 2)])
        assert features.requires_grad
    assert not replayed.recorded


def test_sizes_beyond_the_most_are_launched(monkeypatch) -> None:
    monkeypatch.setattr(recorded_tower, "MOST", 1)
    made, device = tower(), Recorder("recorder", "cpu", 0)
    replayed = RecordedTower(made, device)
    for grid in ((1, 2, 2), (1, 4, 2)):
        for step in range(SEEN + 1):
            patches = pictures([grid], step)
            assert torch.equal(replayed(patches, [grid]), made(patches, [grid]))
    assert list(replayed.recorded) == [(1, 2, 2)]


def test_pictures_of_rare_sizes_are_launched_together() -> None:
    made, device, calls = tower(), Recorder("recorder", "cpu", 0), []
    made.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    replayed = RecordedTower(made, device)
    for _ in range(SEEN):
        replayed(pictures([(1, 2, 2)], 0), [(1, 2, 2)])
    grids = [(1, 4, 2), (1, 2, 2), (2, 2, 2), (1, 2, 4)]
    patches = pictures(grids, 1)
    calls.clear()
    features = replayed(patches, grids)
    assert len(calls) == 2, "one replay, and one call for the three other sizes"
    assert torch.equal(features, made(patches, grids))
