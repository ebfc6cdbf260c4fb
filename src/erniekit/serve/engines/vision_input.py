"""Pictures and videos of a prompt on their way into the engine, and a bounded cache of their features.

Made by serve/vision_prompt.py, used by paged.py (positions, modality) and embedded.py (features). A unit is what the
tower can look at by itself: a picture, or the pair of frames of a video that becomes one. A step computes the units its
tokens show and no others, so that a long video does not delay sequences that decode.
V vision tokens of a prompt, H hidden.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from erniekit.model_contract import picture_tower

PAIR = 2  # frames of a video that become one


@dataclass(frozen=True, eq=False)
class PromptMedium:
    """A picture or video as the tower takes it."""

    key: str  # of its bytes and of every choice made about it
    grid: tuple[int, int, int]  # t, h, w in patches
    tokens: int
    patches: np.ndarray | None = field(default=None, repr=False)  # uint8 [t * h * w, C]; None: `known` has features
    known: tuple[torch.Tensor, ...] = field(default=(), repr=False)  # of each unit, [tokens of it, H]

    @property
    def units(self) -> int:
        return max(1, self.grid[0] // PAIR)

    def unit(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches and grid [1, 3] of one unit."""
        assert self.patches is not None
        t, h, w = self.grid
        frames = min(t, PAIR)
        rows = frames * h * w
        part = self.patches[number * rows : (number + 1) * rows]
        return torch.from_numpy(part), torch.tensor([[frames, h, w]])


@dataclass(frozen=True, eq=False)
class PromptVision:
    """What a prompt with pictures has besides its ids."""

    positions: np.ndarray  # [n, 3]: t, h, w
    modality: np.ndarray  # uint8 [n], 0 is text
    places: np.ndarray  # [V], ascending: the tokens that take features
    next_position: int  # of the first token that is generated, on all three axes
    media: tuple[PromptMedium, ...]

    def positions_in(self, start: int, stop: int) -> np.ndarray:
        """[stop - start, 3], generated tokens included: they go on from next_position."""
        known = len(self.positions)
        ahead = self.next_position + np.arange(max(start, known), stop) - known
        return np.concatenate([self.positions[start:stop], np.repeat(ahead[:, None], 3, 1)])

    def modality_in(self, start: int, stop: int) -> np.ndarray:
        """[stop - start]; what is generated is text."""
        own = self.modality[start:stop]
        return np.concatenate([own, np.zeros(stop - start - len(own), np.uint8)])

    @cached_property
    def bounds(self) -> list[tuple[int, int, PromptMedium, int]]:
        """(first vision token, one past the last, medium, unit) of every unit, in the order of the prompt."""
        out, at = [], 0
        for medium in self.media:
            each = medium.tokens // medium.units
            for unit in range(medium.units):
                out.append((at, at + each, medium, unit))
                at += each
        return out

    def shown(self, start: int, stop: int) -> Iterator[tuple[PromptMedium, int, slice, np.ndarray]]:
        """(medium, unit, rows of its features, their places) that positions [start, stop) show."""
        first, last = (int(n) for n in np.searchsorted(self.places, (start, stop)))
        for begin, end, medium, unit in self.bounds:
            low, high = max(begin, first), min(end, last)
            if low < high:
                yield medium, unit, slice(low - begin, high - begin), self.places[low:high]


class FeatureCache:
    """Features of units in host memory, the least recently used leave first. Used by the engine's thread and by those
    that prepare requests: a picture whose features are here need not be decoded."""

    def __init__(self, most: int) -> None:
        """most: bytes."""
        self.most, self.size, self.misses = most, 0, 0
        self._kept: OrderedDict[tuple[str, str, int], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, model: str, medium: str, unit: int) -> torch.Tensor | None:
        with self._lock:
            found = self._kept.get((model, medium, unit))
            if found is None:
                self.misses += 1
            else:
                self._kept.move_to_end((model, medium, unit))
            return found

    def all(self, model: str, medium: str, units: int) -> tuple[torch.Tensor, ...]:
        """Of a whole medium; nothing where one is missing."""
        with self._lock:
            found = tuple(self._kept.get((model, medium, unit)) for unit in range(units))
        return () if any(one is None for one in found) else found  # type: ignore[return-value]

    def put(self, model: str, medium: str, unit: int, features: torch.Tensor) -> None:
        size = features.numel() * features.element_size()
        with self._lock:
            if size > self.most or (model, medium, unit) in self._kept:
                return
            self._kept[model, medium, unit] = features
            self.size += size
            while self.size > self.most:
                _, old = self._kept.popitem(last=False)
                self.size -= old.numel() * old.element_size()


class FeatureReader:
    """The features of one sequence's prompt, kept until all of it is in the KV cache: a unit may be cut by a chunk."""

    def __init__(self, vision: PromptVision) -> None:
        self.vision = vision
        self._held: dict[tuple[str, int], torch.Tensor] = {}

    def read(
        self, start: int, stop: int, name: str, model: Any, cache: FeatureCache, device: torch.device
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """(features [k, H], places [k]) for positions [start, stop)."""
        for medium, unit, rows, places in self.vision.shown(start, stop):
            yield self._unit(medium, unit, name, model, cache, device)[rows].to(device), places

    def forget(self) -> None:
        self._held.clear()

    def _unit(
        self, medium: PromptMedium, unit: int, name: str, model: Any, cache: FeatureCache, device: torch.device
    ) -> torch.Tensor:
        if medium.known:
            return medium.known[unit]
        key = medium.key, unit
        if key not in self._held:
            found = cache.get(name, medium.key, unit)
            if found is None:
                patches, grid = medium.unit(unit)
                tower = picture_tower(model)
                assert tower is not None, "pictures are read for models that take them"
                found = tower.features_of(patches.to(device), grid).cpu()
                cache.put(name, medium.key, unit, found)
            self._held[key] = found
        return self._held[key]
