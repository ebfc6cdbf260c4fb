"""The token cache: right, parallel, made once, never half."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from erniekit.data import cache_versions, row_workers, sealed, token_cache, tokenise
from erniekit.data.assemble import Assembled, assemble
from erniekit.data.formats import read
from erniekit.data.tokenizer import load_tokenizer
from erniekit.errors import ConfigError, DataError
from erniekit.files.cache_folder import default_cache_dir
from support.jsonl import small_row, write_jsonl
from support.sources import open_source


def folders(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir())


def test_samples_are_the_assembled_rows_in_file_order(tmp_path, opened, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(50)])
    source = opened(path)
    expected = []
    for line, conversation in read(path, "erniekit"):
        made = assemble(conversation, tokenizer, 96)
        assert isinstance(made, Assembled)
        expected.append((line, made.sample))
    assert len(source) == len(expected) == 50
    for i, (line, sample) in enumerate(expected):
        assert source.row(i) == line
        assert source.lengths[i] == len(sample.ids)
        np.testing.assert_array_equal(source.sample(i).ids, sample.ids)
        np.testing.assert_array_equal(source.sample(i).labels, sample.labels)


def test_many_processes_give_the_same_cache_as_one(tmp_path, tokenizer):
    rows = [small_row(i, **({"system": "Be brief."} if i % 9 == 0 else {})) for i in range(4500)]
    rows[100], rows[4400] = "not json", {"src": ["x"]}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    made = [
        open_source(
            path,
            "erniekit",
            tokenizer,
            max_seq_len=96,
            compat=True,
            cache_dir=tmp_path / name,
            num_proc=n,
            max_bad_fraction=1,
        )
        for name, n in (("one", 1), ("two", 2))
    ]
    for name in ("ids.bin", "labels.bin", "offsets.npy", "rows.npy", "forms.npy", "bad_rows.jsonl"):
        one, two = ((source.folder / name).read_bytes() for source in made)
        assert one == two, name
    assert [p.line for p in made[1].report.first_bad] == [101, 4401]
    assert made[1].forms()[9].tolist() == [9, len(made[1]) + 1]
    assert {f.name for f in made[0].folder.iterdir()} == {f.name for f in made[1].folder.iterdir()}


def test_a_second_run_does_no_tokenising(tmp_path, opened, no_tokenising):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(20)])
    first = opened(path)
    no_tokenising()
    again = opened(path)
    assert again.report.from_cache
    assert not first.report.from_cache
    np.testing.assert_array_equal(again.sample(7).ids, first.sample(7).ids)
    assert "(cached)" in again.report.lines()[0]


def test_the_cache_goes_by_content_not_by_name(tmp_path, opened, no_tokenising):
    opened(write_jsonl(tmp_path / "a.jsonl", [small_row(1), "broken"]), "erniekit", max_bad_fraction=1)
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    no_tokenising()
    moved = opened(tmp_path / "b.jsonl", "erniekit", max_bad_fraction=1)
    assert moved.path.endswith("b.jsonl")
    assert moved.report.first_bad[0].file.endswith("b.jsonl")


def test_the_same_bytes_under_a_name_that_makes_them_an_array_of_rows_are_read_anew(tmp_path, opened):
    (tmp_path / "a.json").write_text(text := json.dumps([small_row(1), small_row(2)]))
    assert len(opened(tmp_path / "a.json", "erniekit")) == 2
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"1 of 1 row of .*a\.jsonl cannot be used"):
        opened(tmp_path / "a.jsonl", "erniekit")


@pytest.mark.parametrize(
    "change",
    [
        {"max_seq_len": 64},
        {"overlong": "truncate"},
        {"compat": True},
        {"format": "messages"},
        {"content": 1},
        {"folder": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_decides_the_tokens_decides_the_cache(tmp_path, opened, change, paddle, tokenizer):
    rows = [{"messages": [{"role": "user", "content": "a river"}, {"role": "assistant", "content": "the harbor"}]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    opened(path, "erniekit")
    change = dict(change)
    if change.pop("content", None):
        write_jsonl(path, rows * 2)
    if change.pop("folder", None):
        other = tmp_path / "tokenizer"
        other.mkdir()
        for file in (paddle / "tokenizer").iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        config = json.loads((other / "tokenizer_config.json").read_text())
        config["chat_template"] = config["chat_template"].replace("User: ", "Human: ")
        (other / "tokenizer_config.json").write_text(json.dumps(config))
        open_source(path, "erniekit", load_tokenizer(other), max_seq_len=96, cache_dir=tmp_path / "cache")
    else:
        opened(path, **{"format": "erniekit", **change})
    assert len(folders(tmp_path)) == 2


def test_a_raised_version_makes_another_cache_and_an_edit_of_the_code_does_not(tmp_path, opened, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(1)])
    opened(path)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"# edited" * (self.suffix == ".py"))
    assert opened(path).report.from_cache
    monkeypatch.setattr(cache_versions, "SAMPLES", cache_versions.SAMPLES + 1)
    assert not opened(path).report.from_cache


@pytest.mark.parametrize("content", ["", "\n\n", "broken\nbroken\n"])
def test_a_file_without_a_usable_sample_is_an_error(tmp_path, opened, content):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError):
        opened(path, "erniekit", max_bad_fraction=1)


def test_a_missing_file_an_unknown_format_and_preference_rows_are_said_at_once(tmp_path, opened):
    with pytest.raises(DataError, match="train_dataset_path"):
        opened(tmp_path / "none.jsonl", "erniekit")
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(1)])
    with pytest.raises(ConfigError, match="erniekit"):
        opened(path, "erniekitt")
    pairs = write_jsonl(tmp_path / "p.jsonl", [{"instruction": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(DataError, match="DPO"):
        opened(pairs)


def damage_truncate(folder):
    os.truncate(folder / "ids.bin", 10)


def damage_flip(folder):
    data = bytearray((folder / "labels.bin").read_bytes())
    data[len(data) // 2] ^= 4
    (folder / "labels.bin").write_bytes(data)


def damage_remove(folder):
    (folder / "offsets.npy").unlink()


def damage_report(folder):
    (folder / "report.json").write_text('{"files": {}}')


def test_a_large_cache_file_that_was_zeroed_is_made_anew(tmp_path, opened, monkeypatch):
    """Large is what is above WHOLE; its size alone says nothing."""
    monkeypatch.setattr(sealed, "WHOLE", 100)
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(20)])
    ids = opened(path).folder / "ids.bin"
    ids.write_bytes(bytes(ids.stat().st_size))
    assert not opened(path).report.from_cache


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_remove, damage_report])
def test_a_damaged_cache_is_made_anew(tmp_path, opened, damage):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(20)])
    first = opened(path)
    expected = [first.sample(i).labels.tolist() for i in range(20)]
    damage(first.folder)
    (first.folder / "notes.txt").write_text("theirs")
    again = opened(path)
    (kept,) = first.folder.parent.glob("*.not-ours-*/*")
    assert kept.read_text() == "theirs"
    assert not again.report.from_cache
    assert [again.sample(i).labels.tolist() for i in range(20)] == expected
    assert opened(path).report.from_cache


def run(script, *args, **options):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)], stdout=subprocess.PIPE, text=True, **options
    )


OPEN = """
import sys
import time
from erniekit.data import tokenise
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.token_cache import RowRules, open_source
path, folder, cache = sys.argv[1:4]
PATCH
source = open_source(path, None, load_tokenizer(folder), RowRules(96), cache_dir=cache, num_proc=2)
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(len(source), source.report.from_cache)
"""


def test_a_killed_run_leaves_no_half_cache(tmp_path, opened, paddle):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(20)])
    kill = "import os; tokenise.Writer.finish = lambda self, folder: os.kill(os.getpid(), 9)"
    process = run(OPEN.replace("PATCH", kill), path, paddle / "tokenizer", tmp_path / "cache")
    process.communicate()
    assert process.returncode == -9
    (left,) = folders(tmp_path)
    assert ".tmp-" in left  # it did die inside the write
    assert len(opened(path)) == 20
    assert [name for name in folders(tmp_path) if ".tmp-" in name] == []


def test_two_processes_at_once_share_the_work_of_one(tmp_path, paddle):
    """Scripts without a `__main__` guard, with worker processes, no torch in either."""
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(4500)])
    both = [run(OPEN.replace("PATCH", ""), path, paddle / "tokenizer", tmp_path / "cache") for _ in range(2)]
    told = sorted(process.communicate()[0].strip() for process in both)
    assert told == ["4500 False", "4500 True"]
    assert len(folders(tmp_path)) == 1


def test_without_file_locks_the_first_to_finish_wins(tmp_path, opened, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(20)])
    real, nested = token_cache.tokenise_file, []

    def slow(*args):
        if not nested:
            nested.append(True)
            nested.append(opened(path))  # another process, meanwhile
        return real(*args)

    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(token_cache, "tokenise_file", slow)
    assert len(opened(path)) == len(nested[1]) == 20
    assert len(folders(tmp_path)) == 1


def test_a_worker_that_dies_is_an_error_with_its_exit_code(tmp_path, opened, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(4500)])
    monkeypatch.setattr(row_workers.RowWorker, "BOOT", "import sys; sys.stdin.buffer.read(10); sys.exit(3)")
    with pytest.raises(DataError, match="exit code 3"):
        opened(path, num_proc=2)
    assert folders(tmp_path) == []


def test_a_tokenizer_a_worker_cannot_open_is_said_in_its_own_words(tmp_path, paddle):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(4500)])
    tokenizer = load_tokenizer(paddle / "tokenizer")
    tokenizer.folder = tmp_path  # moved away since
    with pytest.raises(Exception, match="no tokenizer in"):
        open_source(path, None, tokenizer, max_seq_len=96, cache_dir=tmp_path / "cache", num_proc=2)


def test_a_file_that_changes_while_it_is_read_is_not_cached(tmp_path, opened, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(20)])
    real = token_cache.tokenise_file

    def grows(*args):
        made = real(*args)
        with open(path, "a") as file:
            file.write(json.dumps(small_row(99)) + "\n")
        return made

    monkeypatch.setattr(token_cache, "tokenise_file", grows)
    with pytest.raises(DataError, match="changed while it was read"):
        opened(path)
    assert folders(tmp_path) == []


def test_a_file_that_changes_while_its_cache_is_locked_is_not_cached_as_it_was(tmp_path, opened, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(20)])
    real = token_cache.only_one

    def held(folder):  # another process held it until the file had changed
        write_jsonl(path, [small_row(i) for i in range(99)])
        return real(folder)

    monkeypatch.setattr(token_cache, "only_one", held)
    with pytest.raises(DataError, match="changed while it was read"):
        opened(path)
    assert folders(tmp_path) == []
    monkeypatch.undo()
    assert len(opened(path)) == 99


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path, opened):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(1)])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="ERNIEKIT_CACHE"):
        opened(path, cache_dir=tmp_path / "file")


def test_the_cache_lies_where_the_environment_says(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "mine"))
    source = open_source(write_jsonl(tmp_path / "a.jsonl", [small_row(1)]), None, tokenizer, max_seq_len=96)
    assert tmp_path / "mine" in source.folder.parents
    monkeypatch.delenv("ERNIEKIT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == Path(tmp_path / "home" / ".cache" / "erniekit")


def test_rows_our_own_code_failed_on_are_tried_again_by_the_next_run(tmp_path, opened, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(4)])
    with monkeypatch.context() as broken:
        broken.setattr(tokenise, "row_key", lambda read: 1 / 0)
        with pytest.raises(DataError) as caught:
            opened(path)
    assert "a fault of erniekit: ZeroDivisionError" in caught.value.where
    assert "show a bug in erniekit" in caught.value.fix
    with pytest.raises(DataError):  # another rank of the same run
        opened(path)
    later = time.time() + 1
    monkeypatch.setattr(token_cache, "started", lambda: later)
    assert len(opened(path)) == 4
