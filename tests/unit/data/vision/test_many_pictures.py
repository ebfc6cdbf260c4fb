"""A thousand pictures go by and the memory stays where it was, in the run and in its decoders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.jsonl import write_jsonl
from support.memory import MEMORY
from support.seen import FOLDER

PROGRAM = """
import json, sys
from pathlib import Path
import psutil
from erniekit.data.loader import BatchLoader
from erniekit.data.media.limits import MediaLimits
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.vision.collate import VisionCollate
from erniekit.data.vision.job import open_vision_source
from erniekit.data.vision.rules import VisionRules, VisionTokens

folder, tokenizer = Path(sys.argv[1]), load_tokenizer(sys.argv[2])
source = open_vision_source(folder / "rows.jsonl", None, tokenizer, VisionRules(), max_seq_len=4096,
                            cache_dir=folder / "cache", num_proc=2)
collate = VisionCollate(VisionTokens.of(tokenizer), MediaLimits(), 2)
order = SampleOrder([len(source)], [1.0], seed=1, shuffle=True)
stream = PackStream(order, [source.lengths], 4096, costs=[source.patches], max_cost=12_000, epochs=1)
loader = BatchLoader(stream, [source], 1, 1, num_workers=2, collate=collate)
pictures, sizes = 0, []
for step in loader:
    pictures += sum(len(batch.vision.grids) for batch in step)
    held = sum(psutil.Process(worker.pid).memory_info().rss for worker in collate.pool.workers if worker.pid)
    sizes.append([pictures, memory("VmRSS") + held])
loader.close()
collate.close()
print(json.dumps({"pictures": pictures, "sizes": sizes, "rows": len(source), "failed": len(collate.failed)}))
"""


@pytest.mark.full
def test_a_thousand_pictures_stream_with_flat_memory(tmp_path: Path) -> None:
    draw = np.random.RandomState(0)
    (tmp_path / "media").mkdir()
    for i in range(20):
        noise = draw.randint(0, 255, (draw.randint(300, 700), draw.randint(300, 700), 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / "media" / f"{i}.jpg", quality=60)
    rows = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": f"media/{i % 20}.jpg"}, {"type": "text", "text": f"{i}?"}],
                },
                {"role": "assistant", "content": "noise."},
            ]
        }
        for i in range(1000)
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    program = [sys.executable, "-c", MEMORY + PROGRAM, str(tmp_path), str(FOLDER / "tokenizer")]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["pictures"], told["rows"], told["failed"]) == (1000, 1000, 0)
    early = max(size for seen, size in told["sizes"] if 100 < seen <= 400)
    late = max(size for seen, size in told["sizes"] if seen > 700)
    assert late - early < 64 << 20, told["sizes"][:: len(told["sizes"]) // 10]
