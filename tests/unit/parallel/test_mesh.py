"""One rank by itself: a world without process groups."""

from __future__ import annotations

from erniekit.parallel.mesh import World


def test_alone_every_decision_is_its_own_value() -> None:
    world = World()
    assert world.is_main
    assert (world.max(3), world.gather("x"), world.broadcast("y")) == (3, ["x"], "y")
    assert world.control is None
