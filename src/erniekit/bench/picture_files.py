"""Steps whose pictures lie in files and are decoded ahead of them by processes, as a run's are: what V1-input measures.

Called by ours.py; real.py needs the pictures alone. They are made here: smooth colours and some noise, of a
photograph's size in JPEG.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np

from erniekit.bench.data import PictureIds, pictured_row, sides
from erniekit.bench.workloads import Rows
from erniekit.data.loader import BatchLoader
from erniekit.data.media.decode import Medium
from erniekit.data.media.limits import MediaLimits
from erniekit.data.media.place import MediaPlace
from erniekit.data.pack import Members
from erniekit.data.types import Batch, Sample, SampleMedia
from erniekit.data.vision.collate import VisionCollate
from erniekit.data.vision.rules import VisionTokens

STORED = 8 / 7  # of the side that the model sees: every picture is scaled, as almost all are
QUALITY = 90
AHEAD = 2  # threads that make batches, as of dataloader_num_workers


class _Endless:
    """Pack n is row n, document after document."""

    epochs: int | None = None

    def __init__(self, documents: int) -> None:
        self.documents = documents

    def __getitem__(self, number: int, /) -> Members:
        first = number * self.documents
        return [(0, first + k) for k in range(self.documents)]

    def __len__(self) -> int:
        raise TypeError("it has no end")


class _Samples:
    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def sample(self, index: int) -> Sample:
        return self.samples[index % len(self.samples)]


class PictureFiles:
    """An endless list of steps. different: rows that are made; later ones show the same files again."""

    def __init__(
        self, rows: Rows, vocab: int, ids: PictureIds, folder: Path, processes: int, seed: int = 0, different: int = 4
    ) -> None:
        high, wide = sides(rows.picture)
        rng, names = np.random.default_rng(seed), count()
        samples = []
        for _ in range(different):
            for sample, positions, modality in pictured_row(rows, vocab, rng, ids):
                path = folder / f"{next(names)}.jpg"
                _draw(path, rows.picture, rng)
                grid = (1, 2 * high, 2 * wide)
                medium = Medium((MediaPlace(str(path)),), grid, patch=ids.patch, origin=f"{path}:0")
                media = SampleMedia(modality, positions.astype(np.int32), np.array([grid], np.int32), (medium,))
                samples.append(Sample(sample.ids, sample.labels, media=media))
        tokens = VisionTokens(ids.place, ids.start, ids.end, ids.start, ids.end)
        self.collate = VisionCollate(tokens, MediaLimits(), processes)
        self.loader = BatchLoader(
            _Endless(rows.pictures), [_Samples(samples)], rows.count, num_workers=AHEAD, pad_to=rows.length,
            collate=self.collate,
        )  # fmt: skip
        self.steps: Iterator[list[Batch]] = iter(self.loader)

    def close(self) -> None:
        self.steps.close()  # type: ignore[attr-defined]  # a generator: it stops its threads
        self.loader.close()
        self.collate.close()


def draw_pictures(folder: Path, count: int, tokens: int, seed: int = 0) -> list[Path]:
    """Files that a model sees as so many tokens each, no two alike; on all cores, as hundreds take a minute on one."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}.jpg" for number in range(count)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda n: _draw(paths[n], tokens, np.random.default_rng([seed, n])), range(count)))
    return paths


def _draw(path: Path, tokens: int, rng: np.random.Generator) -> None:
    from PIL import Image

    high, wide = (round(28 * side * STORED) for side in sides(tokens))
    rows, columns = np.linspace(0, 4, high)[:, None, None], np.linspace(0, 4, wide)[None, :, None]
    waves = 110 + 70 * np.sin(rows * rng.uniform(1, 3, 3) + columns * rng.uniform(1, 3, 3))
    noise = rng.integers(0, 40, (high, wide, 1))
    Image.fromarray(np.clip(waves + noise, 0, 255).astype(np.uint8)).save(path, quality=QUALITY)
