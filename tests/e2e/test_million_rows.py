"""A file of 1,000,000 rows: flat memory, tokenised once, and a first batch at once from then on.

Every commit reads 20,000 of them; `make test-full` all.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.memory import MEMORY

LIMIT = 1.5 * 2**30  # bytes, the process and its workers together

# A process of its own, so that its peak is not that of the test suite.
SCRIPT = """
import json, resource, sys, time
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data import token_cache
path, folder, cache, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
told = {}
if steps:
    from erniekit.data.loader import BatchLoader  # torch; it has its own budget
    token_cache.tokenise_file = None  # a warm start must not get there
began = time.monotonic()
rules = token_cache.RowRules(512)
source = token_cache.open_source(path, None, load_tokenizer(folder), rules, cache_dir=cache, num_proc=2)
told |= {"samples": len(source), "cached": source.report.from_cache, "opened_s": time.monotonic() - began}
if steps:
    stream = PackStream(SampleOrder([len(source)], seed=23), [source.lengths], 512)
    loader = BatchLoader(stream, [source], 4, 2, num_workers=2)
    trained = 0
    for number, step in enumerate(loader):
        told.setdefault("first_batch_s", time.monotonic() - began)
        trained += sum(batch.num_label_tokens for batch in step)
        if number + 1 == steps:
            break
    loader.close()
    told["trained"] = trained
    began = time.monotonic()
    last = stream.count_packs(1) - 1
    told |= {"packs": last + 1, "in_last": len(stream[last]), "skipped_s": time.monotonic() - began}
workers = resource.getrusage(resource.RUSAGE_CHILDREN)
told["peak_bytes"] = memory() + 2048 * workers.ru_maxrss  # KiB, maxrss: the larger of the two
told["cpu_s"] = time.process_time() + workers.ru_utime + workers.ru_stime
print(json.dumps(told))
"""


def run(*args):
    done = subprocess.run([sys.executable, "-c", MEMORY + SCRIPT, *map(str, args)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=[8_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def rows(request):
    return request.param


@pytest.fixture(scope="module")
def million(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("million") / "rows.jsonl"
    with open(path, "w") as file:
        for i in range(rows):
            file.write(f'{{"src": ["{i}"], "tgt": ["no {i % 977}"]}}\n')
    return path


@pytest.mark.full
def test_a_million_rows_are_tokenised_once_in_flat_memory_and_start_at_once_after(million, rows, paddle):
    cache = million.parent / "cache"
    cold = run(million, paddle / "tokenizer", cache, 0)
    assert (cold["samples"], cold["cached"]) == (rows, False)
    assert cold["peak_bytes"] < LIMIT  # 0.16 GiB measured
    assert cold["cpu_s"] / 2 < 150 * rows / 1e6 + 10  # seconds on two cores that nothing else wants; 95 measured

    warm = run(million, paddle / "tokenizer", cache, 200)
    assert (warm["samples"], warm["cached"]) == (rows, True)
    assert warm["first_batch_s"] < 15  # 0.4 s measured: the file's digest, then one window of packs
    assert warm["peak_bytes"] < LIMIT  # 0.25 GiB measured, torch included
    assert warm["trained"] > 0
    assert warm["in_last"] > 0
    assert warm["skipped_s"] < 15  # seconds of a loaded machine; 0.6 measured
