"""Indexing text: the right tokens, the same bytes however it is run or interrupted, and every bad row named."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

from erniekit.data import index, text_job
from erniekit.data.index import index_text
from erniekit.data.mmap_files import open_files
from erniekit.data.text_job import TextJob
from erniekit.errors import ConfigError, DataError
from support.memory import MEMORY

WORDS = ["river", "lantern", "copper", "the quiet harbor", "河边的灯很亮", "1234", "<|end_of_sentence|>", "</s>"]


@pytest.fixture
def job(tokenizer):
    return TextJob(tokenizer, dtype="uint16")


def text_of(i):
    return " ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 3 + i % 9)) + f" {i}"


def write(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r, ensure_ascii=False)) + "\n" for r in rows))
    return path


def documents(prefix):
    files = open_files(str(prefix))
    every, ends = files.tokens(0, files.num_tokens), np.cumsum(files.lengths(0, files.num_documents))
    return [document.tolist() for document in np.split(every, ends)[:-1]]


def test_a_document_is_its_tokens_and_eos_and_text_that_looks_like_eos_is_text(tmp_path, job, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"text": text_of(i)} for i in range(60)])
    made = index_text([path], tmp_path / "out" / "a", job)
    got = documents(tmp_path / "out" / "a")
    assert got == [[*tokenizer.encode_text(text_of(i)), tokenizer.eos_id] for i in range(60)]
    assert all(document.count(tokenizer.eos_id) == 1 for document in got)
    assert (made.report.samples, made.report.tokens) == (60, sum(map(len, got)))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a.bin", "a.idx", "a.idx.json"]


def test_eos_can_be_left_out_and_a_list_of_texts_is_one_document(tmp_path, tokenizer):
    rows = [{"body": ["a river", "the harbor"]}, {"body": "copper"}]
    path = write(tmp_path / "a.jsonl", rows)
    index_text([path], tmp_path / "a", TextJob(tokenizer, "body", False, "int32"))
    encoded = [tokenizer.encode_text(t) for t in ("a river", "the harbor", "copper")]
    assert documents(tmp_path / "a") == [encoded[0] + encoded[1], encoded[2]]
    files = open_files(str(tmp_path / "a"))
    assert files.sizes.tolist() == [len(e) for e in encoded]
    assert files.docs.tolist() == [0, 2, 3]
    index_text([path], tmp_path / "b", TextJob(tokenizer, "body", True, "int32"))
    assert documents(tmp_path / "b")[0] == [*encoded[0], *encoded[1], tokenizer.eos_id]


def test_every_kind_of_file_gives_the_same_tokens(tmp_path, job):
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    texts = [text_of(i) for i in range(40)]
    rows = [{"text": t} for t in texts]
    plain = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    index_text([plain], tmp_path / "reference", job)
    expected = (tmp_path / "reference.bin").read_bytes()
    for name in ("a.txt", "a.json", "a.parquet", "a.jsonl.gz", "a.txt.gz"):
        index_text([tmp_path / name], tmp_path / "other" / name, job)
        assert (tmp_path / "other" / f"{name}.bin").read_bytes() == expected, name
    index_text([tmp_path / "a.txt", plain], tmp_path / "both", job)
    assert (tmp_path / "both.bin").read_bytes() == expected * 2


def test_the_numpy_pair_holds_the_same(tmp_path, job):
    path = write(tmp_path / "a.jsonl", [{"text": text_of(i)} for i in range(50)])
    index_text([path], tmp_path / "a", job)
    index_text([path], tmp_path / "b", job, format="npy")
    assert documents(tmp_path / "a") == documents(tmp_path / "b")
    assert np.load(tmp_path / "b_ids.npy").tobytes() == (tmp_path / "a.bin").read_bytes()


def test_many_processes_give_the_same_bytes_as_one(tmp_path, job, monkeypatch):
    rows = [{"text": text_of(i)} for i in range(300)]
    rows[100], rows[299] = "not json", {"other": 1}
    path = write(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr(index, "CHUNK_ROWS", 40)
    monkeypatch.setattr(index, "CHUNK_BYTES", 1000)
    for name, count in (("one", 1), ("two", 2)):
        index_text([path], tmp_path / name, job, num_proc=count, max_bad_fraction=1)
    for suffix in (".bin", ".idx", "_bad_rows.jsonl"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_bad_rows_are_all_listed_with_file_line_and_reason(tmp_path, job):
    bad = ["{", {"src": "x"}, {"text": ""}, {"text": 3}, [1], {"text": ["a", " "]}, {"text": "\ud800"}]
    rows = [*bad, {"text": "a river"}]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(json.dumps(r).encode() + b"\n" if r != "{" else b"{\n" for r in rows) + b"\xff\n")
    made = index_text([path], tmp_path / "a", job, max_bad_fraction=1)
    told = [json.loads(line) for line in (tmp_path / "a_bad_rows.jsonl").read_text().splitlines()]
    assert [t["line"] for t in told] == [1, 2, 3, 4, 5, 6, 7, 9]
    kinds = ["bad_json", "missing_field", "empty_text", "wrong_type", "not_an_object", "empty_text", "bad_unicode"]
    assert [t["kind"] for t in told] == [*kinds, "bad_utf8"]
    assert {t["file"] for t in told} == {str(path)}
    assert len(made.report.first_bad) == 8
    assert documents(tmp_path / "a") == [[*job.tokenizer.encode_text("a river"), job.tokenizer.eos_id]]


def test_too_many_bad_rows_stop_before_the_result_and_raising_the_limit_costs_nothing(tmp_path, job, monkeypatch):
    path = write(tmp_path / "a.jsonl", [{"text": "river"}, "broken", {"text": "harbor"}])
    with pytest.raises(DataError, match="1 of 3 rows") as caught:
        index_text([path], tmp_path / "a", job)
    assert f"{path}:2" in caught.value.where
    assert not (tmp_path / "a.idx").exists()
    monkeypatch.setattr(text_job.TextJob, "work", None)  # nothing is tokenised again
    assert index_text([path], tmp_path / "a", job, max_bad_fraction=0.5).report.samples == 2


def test_a_wrong_key_is_said_after_some_rows_not_after_all(tmp_path, job, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"content": text_of(i)} for i in range(5000)])
    with pytest.raises(DataError, match="none of the first 2,000 rows") as caught:
        index_text([path], tmp_path / "a", job)
    assert "--json_key" in caught.value.fix
    assert "the row has content" in caught.value.where
    assert index_text([path], tmp_path / "a", TextJob(tokenizer, "content", True, "uint16")).report.samples == 5000


def test_the_same_command_again_only_says_so_and_another_does_not_overwrite(tmp_path, job, tokenizer, monkeypatch):
    path = write(tmp_path / "a.jsonl", [{"text": "river"}])
    assert index_text([path], tmp_path / "a", job).fresh
    with pytest.raises(DataError, match="other settings"):
        index_text([path], tmp_path / "a", TextJob(tokenizer, append_eos=False, dtype="uint16"))
    monkeypatch.setattr(text_job.TextJob, "work", None)
    again = index_text([path], tmp_path / "a", job)
    assert not again.fresh
    assert again.report.samples == 1


def test_text_edited_with_its_size_and_date_kept_is_other_text(tmp_path, job):
    path = write(tmp_path / "a.jsonl", [{"text": "river"}])
    before = path.stat()
    index_text([path], tmp_path / "a", job)
    write(path, [{"text": "rover"}])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(DataError, match="made from other text"):
        index_text([path], tmp_path / "a", job)


def test_files_of_a_version_that_kept_no_digest_of_the_text_are_still_used(tmp_path, job, monkeypatch):
    path = write(tmp_path / "a.jsonl", [{"text": "river"}])
    index_text([path], tmp_path / "a", job)
    kept = tmp_path / "a.idx.json"
    stored = json.loads(kept.read_text())
    assert stored["plan"].pop("content")
    kept.write_text(json.dumps(stored))
    monkeypatch.setattr(text_job.TextJob, "work", None)
    assert not index_text([path], tmp_path / "a", job).fresh


@pytest.mark.parametrize("change", ["grows", "another under its name"])
def test_text_that_changes_while_it_is_indexed_is_refused_and_nothing_is_kept(tmp_path, job, monkeypatch, change):
    path = write(tmp_path / "a.jsonl", [{"text": text_of(i)} for i in range(200)])
    other = write(tmp_path / "b.jsonl", [{"text": text_of(i + 1)} for i in range(200)])
    monkeypatch.setattr(index, "CHUNK_ROWS", 20)
    real, chunks = text_job.TextJob.work, []

    def work(self, rows):
        chunks.append(rows)
        if len(chunks) == 5 and change == "grows":
            with open(path, "a") as file:
                file.write(json.dumps({"text": "river"}) + "\n")
        elif len(chunks) == 5:
            state = path.stat()
            os.replace(other, path)
            os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        return real(self, rows)

    monkeypatch.setattr(text_job.TextJob, "work", work)
    with pytest.raises(DataError, match="changed while it was read"):
        index_text([path], tmp_path / "out" / "a", job, commit_bytes=1)
    assert len(chunks) == 5  # said at the first commit after the change
    assert [left.name for left in (tmp_path / "out").iterdir()] == ["a.indexing.lock"]
    assert index_text([path], tmp_path / "out" / "a", job).fresh
    assert "a.indexing.lock" not in os.listdir(tmp_path / "out")


def test_a_dtype_that_cannot_hold_the_vocabulary_and_files_that_are_not_there_are_refused(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"text": "river"}])
    with pytest.raises(ConfigError, match="uint8 holds tokens up to 255"):
        index_text([path], tmp_path / "a", TextJob(tokenizer, dtype="uint8"))
    for given in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(DataError, match=r"does not exist|is a folder"):
            index_text([given], tmp_path / "a", TextJob(tokenizer))
    assert not (tmp_path / "a.indexing").exists()


CHILD = """
import os, sys, time
from erniekit.data import index
from erniekit.data.text_job import TextJob
from erniekit.data.tokenizer import load_tokenizer
index.CHUNK_ROWS = 20
if pause := float(os.environ.get("PAUSE", "0")):
    index._IndexRun._keep = lambda run, real=index._IndexRun._keep: (real(run), time.sleep(pause))
text, output, folder, format = sys.argv[1:]
job = TextJob(load_tokenizer(folder), dtype="uint16")
index.index_text([text, text + ".gz"], output, job, format=format, max_bad_fraction=1, commit_bytes=1)
"""


@pytest.mark.parametrize(("format", "kills"), [("npy", 1), pytest.param("bin", 2, marks=pytest.mark.full)])
def test_a_killed_run_goes_on_and_gives_the_bytes_of_an_undisturbed_one(tmp_path, paddle, job, format, kills):
    rows = [{"text": text_of(i)} if i % 50 else "broken" for i in range(2000)]
    path = write(tmp_path / "a.jsonl", rows)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    whole = tmp_path / "whole"
    index_text([path, packed], whole, job, format=format, max_bad_fraction=1)

    work, places = tmp_path / "killed.indexing", []
    arguments = [sys.executable, "-c", CHILD, path, tmp_path / "killed", paddle / "tokenizer", format]
    for _ in range(kills):
        # It pauses after each of its 200 commits: it cannot end while this process gets no time to kill it.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PAUSE": "0.1"}
        child = subprocess.Popen(list(map(str, arguments)), env=env)
        end = time.monotonic() + 60
        while True:  # until it has committed more than it found
            assert child.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < end
            place = committed(work)
            if place and (not places or place > places[-1]):
                break
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        places.append(committed(work))
        assert not json.loads((work / "state.json").read_text())["finished"]
        assert not list(tmp_path.glob("killed*id*"))
    assert sorted(places) == places
    assert places[-1] < [1, len(gzip.decompress(packed.read_bytes())), len(rows)]  # the end of the second file
    index_text([path, packed], tmp_path / "killed", job, format=format, max_bad_fraction=1)
    suffixes = {"bin": (".bin", ".idx"), "npy": ("_ids.npy", "_idx.npz")}[format]
    for suffix in (*suffixes, "_bad_rows.jsonl"):
        assert (tmp_path / f"killed{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes(), suffix
    assert not work.exists()


def committed(work):
    try:
        return json.loads((work / "state.json").read_text())["place"]
    except FileNotFoundError:
        return None


def test_a_kill_between_the_last_renames_is_mended_by_the_next_run(tmp_path, job, monkeypatch):
    path = write(tmp_path / "a.jsonl", [{"text": text_of(i)} for i in range(30)])
    index_text([path], tmp_path / "whole", job)
    real = os.replace

    def killed(source, target):
        if str(target).endswith(".idx"):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(index.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        index_text([path], tmp_path / "a", job)
    assert (tmp_path / "a.bin").exists()
    assert not (tmp_path / "a.idx").exists()
    monkeypatch.undo()
    monkeypatch.setattr(text_job.TextJob, "work", None)
    index_text([path], tmp_path / "a", job)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert not (tmp_path / "a.indexing").exists()


def test_two_at_once_make_one_and_leave_nothing_behind(tmp_path, job, paddle):
    path = write(tmp_path / "a.jsonl", [{"text": text_of(i)} for i in range(600)])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b""))
    arguments = [sys.executable, "-c", CHILD, path, tmp_path / "out" / "a", paddle / "tokenizer", "bin"]
    both = [subprocess.Popen(list(map(str, arguments))) for _ in range(2)]
    assert [child.wait() for child in both] == [0, 0]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a.bin", "a.idx", "a.idx.json"]
    index_text([path], tmp_path / "b", job)
    assert (tmp_path / "out" / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_where_files_cannot_be_locked_each_run_has_its_own_folder(tmp_path, job, monkeypatch):
    @contextmanager
    def unlocked(folder):
        yield False

    path = write(tmp_path / "a.jsonl", [{"text": text_of(i)} for i in range(60)])
    (tmp_path / "a.indexing").mkdir()
    (tmp_path / "a.indexing" / "state.json").write_text('{"plan": "of another process at work"}')
    monkeypatch.setattr(index, "only_one", unlocked)
    assert index_text([path], tmp_path / "a", job).report.samples == 60
    assert [p.name for p in tmp_path.glob("a.indexing*")] == ["a.indexing"]


def test_an_unfinished_run_of_other_text_is_not_gone_on_with(tmp_path, job, monkeypatch):
    def interrupted(run):
        raise KeyboardInterrupt

    path = write(tmp_path / "a.jsonl", [{"text": "river"}])
    with monkeypatch.context() as patch:
        patch.setattr(index._IndexRun, "_close_index", interrupted)
        with pytest.raises(KeyboardInterrupt):
            index_text([path], tmp_path / "a", job)
    write(path, [{"text": "another"}, {"text": "text"}])
    with pytest.raises(DataError, match="unfinished run") as caught:
        index_text([path], tmp_path / "a", job)
    assert caught.value.where == str(tmp_path / "a.indexing")


def test_indexing_keeps_a_pace_that_a_loaded_machine_still_reaches(tmp_path, root, job):
    path = tmp_path / "a.jsonl"
    path.write_bytes((root / "examples" / "data" / "pretrain.jsonl").read_bytes() * 4)
    began = time.monotonic()
    made = index_text([path], tmp_path / "a", job)
    rate = path.stat().st_size / 2**20 / (time.monotonic() - began)
    print(f"indexing: {rate:.1f} MiB/s of text in one process, {made.report.tokens:,} tokens")
    assert made.report.samples == 4 * 620
    assert rate > 0.1  # 3 on a free core


@pytest.mark.full
def test_a_gibibyte_is_indexed_in_flat_memory(tmp_path, root, paddle):
    """In a process of its own, so that its memory is its own."""
    path = tmp_path / "a.jsonl"
    once = (root / "examples" / "data" / "pretrain.jsonl").read_bytes() * 16
    with open(path, "wb") as out:
        while out.tell() < 2**30:
            out.write(once)
    code = (
        f"import sys, time\n{MEMORY}\n"
        "from erniekit.cli.main import main\n"
        "began = time.monotonic()\n"
        "text, model, output = sys.argv[1:]\n"
        "assert main(['data', 'index', text, '--model_name_or_path', model, '--output', output]) == 0\n"
        "print(time.monotonic() - began, memory())"
    )
    command = [sys.executable, "-c", code, str(path), str(paddle / "tokenizer"), str(tmp_path / "a")]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    seconds, peak = float(told[-2]), int(told[-1]) / 2**20
    print(f"indexing: {path.stat().st_size / 2**20 / seconds:.1f} MiB/s of text, {peak:.0f} MiB at most")
    assert peak < 400  # 60 while it reads; the lengths of 2.4 million documents when it closes
    assert open_files(str(tmp_path / "a")).num_documents == 620 * (path.stat().st_size // (len(once) // 16))
