"""Pre-training rows of a run: the blend, the loader's batches on any number of ranks, and the ways to name data."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from erniekit.data import cache_versions, pretrain, text_job
from erniekit.data.loader import BatchLoader
from erniekit.data.mmap_files import open_files, write_idx
from erniekit.data.pretrain import BLOCK, Blend, PretrainData, index_online, open_corpora
from erniekit.data.report import BadRowsFile
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.types import IGNORE
from erniekit.errors import ConfigError, DataError

EOS = 9


def corpus(folder, name, documents, seed):
    """Documents of 3 to 30 tokens that begin with their own number and end with eos."""
    random = np.random.RandomState(seed)
    lengths = random.randint(3, 31, documents)
    tokens = random.randint(10, 900, lengths.sum())
    ends = np.cumsum(lengths)
    tokens[ends - 1] = EOS
    tokens[ends - lengths] = 1000 * seed + np.arange(documents)
    prefix = str(folder / name)
    tokens.astype("<u2").tofile(prefix + ".bin")
    with open(prefix + ".idx", "wb") as out:
        write_idx(out, np.dtype("<u2"), lengths, np.arange(documents + 1))
    return open_files(prefix)


@pytest.fixture
def two(tmp_path):
    return [corpus(tmp_path, "web", 90, 1), corpus(tmp_path, "books", 40, 2)]


def data(corpora, weights=None, **options):
    return PretrainData(corpora, weights, **{"max_seq_len": 32, "seed": 11, **options})


def take(loader, steps):
    out = []
    for step in loader:
        out.append(step)
        if len(out) == steps:
            break
    loader.close()
    return out


@pytest.mark.parametrize("weights", [(1, 1), (7, 3), (1, 2, 4), (0.1, 0.2, 0.7), (1000, 1), (1, 123457, 99)])
def test_a_blend_is_never_more_than_a_draw_or_two_off_its_shares(weights):
    shares = [Fraction(str(w)) / sum(Fraction(str(v)) for v in weights) for w in weights]
    blend, counts = Blend(shares), [0] * len(weights)
    for position in range(3 * BLOCK):
        source, draw = blend[position]
        assert draw == counts[source]  # each source in its own order, nothing left out
        counts[source] += 1
        off = [abs(count - float(share) * (position + 1)) for count, share in zip(counts, shares)]
        assert max(off) < 2
    assert blend.before(3 * BLOCK) == counts


def test_a_blend_takes_the_source_that_is_furthest_behind():
    blend = Blend([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)])
    assert [blend[i][0] for i in range(8)] == [0, 1, 2, 0, 0, 1, 2, 0]
    far = Blend([Fraction(1, 3), Fraction(2, 3)])
    assert far[10**12 + 5] == Blend([Fraction(1, 3), Fraction(2, 3)])[10**12 + 5]


def test_without_weights_every_row_comes_once_an_epoch(two):
    rows = data(two)
    assert len(rows) == sum(source.rows for source in rows.sources)
    for epoch in range(2):
        drawn = [rows.stream.blend[epoch * len(rows) + i] for i in range(len(rows))]
        for k, source in enumerate(rows.sources):
            assert sorted(d for s, d in drawn if s == k) == list(range(epoch * source.rows, (epoch + 1) * source.rows))


def test_weights_decide_the_share_of_rows(two):
    rows = data(two, [3, 1])
    sources = [rows.stream[i][0][0] for i in range(400)]
    assert sources.count(0) == 300
    assert any("75.0% of the rows" in line for line in rows.lines())
    alone = data(two, [0, 2])
    assert len(alone.sources) == 1
    assert alone.sources[0].files.prefix.endswith("books")


def test_a_zero_weight_neighbour_changes_no_order(tmp_path, two):
    with_it, without = data(two, [0, 1]), data(two[1:])
    drawn = [[rows.pack(i).samples[0].ids.tolist() for i in range(10)] for rows in (with_it, without)]
    assert drawn[0] != drawn[1]  # the second of two is not the first of one: equal files must not be read in step
    same = data([two[0], two[1]], [0, 5])
    assert [same.pack(i).samples[0].ids.tolist() for i in range(10)] == drawn[0]


def test_in_plain_rows_every_position_predicts_the_next_token_also_across_documents(two):
    rows = data(two)
    (batch,) = next(iter(BatchLoader(rows.stream, rows.sources, 4)))
    assert batch.input_ids.shape == (4, 32)
    assert torch.equal(batch.labels[:, :-1], batch.input_ids[:, 1:])
    assert batch.num_label_tokens == 4 * 32
    assert not batch.packed
    assert (batch.input_ids[:, :-1] == EOS).any()
    assert torch.equal(batch.positions, torch.arange(32).expand(4, 32))


def test_in_masked_rows_documents_are_apart_and_their_end_predicts_nothing(two):
    rows = data(two, masked=True)
    (batch,) = next(iter(BatchLoader(rows.stream, rows.sources, 4)))
    ids, labels = batch.input_ids, batch.labels
    assert batch.packed
    assert ids.shape == (4, 32)
    ends = ids == EOS
    assert (labels[ends] == IGNORE).all()
    assert (labels[~ends] != IGNORE).all()
    inner = ~ends[:, :-1]
    assert torch.equal(labels[:, :-1][inner], ids[:, 1:][inner])
    bounds = set(batch.cu_seqlens.tolist())
    after = torch.flatten(ends).nonzero().flatten() + 1
    assert set(after.tolist()) <= bounds
    assert bounds == set(after.tolist()) | {0, 32, 64, 96, 128}
    assert (batch.positions.flatten()[batch.cu_seqlens[:-1].long()] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_ranks_together_read_the_same_rows_in_the_same_order(two, dp_size, masked):
    rows = data(two, [2, 1], masked=masked)
    steps = 6  # of 8 rows
    ranks = [
        take(BatchLoader(rows.stream, rows.sources, 2, 4 // dp_size, dp_rank=r, dp_size=dp_size), steps)
        for r in range(dp_size)
    ]
    for step in range(steps):
        seen = {}
        for rank in ranks:
            for batch in rank[step]:
                for line, number in enumerate(batch.pack_indices):
                    seen[number] = batch.input_ids[line].tolist()
        assert sorted(seen) == list(range(8 * step, 8 * step + 8))
        for number, ids in seen.items():
            expected = [t for sample in rows.pack(number).samples for t in sample.ids.tolist()]
            assert ids[: len(expected)] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_resumes_at_any_row_even_epochs_later(two, num_workers):
    rows = data(two, [1, 4], masked=True)
    whole = take(BatchLoader(rows.stream, rows.sources, 1, 2), 3 * len(rows) // 2)
    for step in (1, 7, len(rows) // 2, len(rows) + 3):
        fresh = data(two, [1, 4], masked=True)
        loader = BatchLoader(fresh.stream, fresh.sources, 1, 2, start_pack=2 * step, num_workers=num_workers)
        for again, before in zip(take(loader, 3), whole[step : step + 3]):
            for a, b in zip(again, before):
                assert a.pack_indices == b.pack_indices
                assert torch.equal(a.input_ids, b.input_ids)
                assert torch.equal(a.cu_seqlens, b.cu_seqlens)


def test_evaluation_reads_its_own_documents_once_in_order(two):
    train, held = data(two, split="80,20"), data(two, split="80,20", part="eval", shuffle=False, epochs=1)
    batches = [batch for step in BatchLoader(held.stream, held.sources, 3) for batch in step]
    assert sum(batch.num_label_tokens for batch in batches) == sum(s.tokens - 1 for s in held.sources)
    assert len(held.stream) == len(held)
    with pytest.raises(IndexError):
        held.stream[len(held)]
    marks = {t for batch in batches for t in batch.input_ids.flatten().tolist() if t >= 1000}
    assert marks <= {*range(1072, 1090), *range(2032, 2040)}
    seen = {t for i in range(len(train)) for t in train.pack(i).samples[0].ids.tolist() if t >= 1000}
    assert not seen & marks


def test_epochs_and_parts_of_them_are_counted_in_rows(two):
    rows = data(two)
    assert rows.stream.count_packs(1) == len(rows)
    assert rows.stream.count_packs(2.5) == -(-5 * len(rows) // 2)
    with pytest.raises(TypeError):
        len(rows.stream)


def test_a_part_without_text_is_refused_by_name(tmp_path, two):
    with pytest.raises(DataError, match="no row of text for `test`") as caught:
        data(two, split="1,1", part="test")
    assert "split=1,1" in caught.value.where
    tiny = corpus(tmp_path, "tiny", 1, 3)
    assert len(data([two[0], tiny], split="90,10", part="eval").sources) == 1  # another has enough
    with pytest.raises(ConfigError, match=r"2 data sets but 1 weight\b"):
        data(two, [1])
    for weights in ([0, 0], [-1, 2]):
        with pytest.raises(ConfigError, match="cannot be normalised"):
            data(two, weights)


def test_the_fingerprints_tell_other_text_another_split_and_other_weights(tmp_path, two):
    told = data(two).fingerprints()
    assert data(two, seed=3).fingerprints() == told
    assert data(two, [5, 1]).fingerprints() != data(two, [1, 5]).fingerprints() != told
    assert data(two, [5, 1]).fingerprints() == data(two, [10, 2]).fingerprints()
    assert set(data(two[::-1], [1, 5]).fingerprints()) != set(data(two, [5, 1]).fingerprints()), "its place is its seed"
    assert data(two, split="9,1").fingerprints() != told
    assert data([corpus(tmp_path, "other", 90, 5), two[1]]).fingerprints()[0] != told[0]


def test_data_sets_are_named_by_prefix_by_folder_by_weights_and_by_lists(tmp_path, two):
    web, books = (files.prefix for files in two)

    def names(*args):
        corpora, weights = open_corpora(*args)
        return [files.prefix for files in corpora], weights

    assert names(web) == ([web], None)
    assert names(f"0.7 {web} 0.3 {books}.bin") == ([web, books], [0.7, 0.3])
    assert names(f"{web} {books}") == ([web, books], None)
    assert names(str(tmp_path)) == ([books, web], [1.0, 1.0])
    assert names(None, f"{web},{books}", "2,1") == ([web, books], [2.0, 1.0])
    (tmp_path / "list.txt").write_text(f"{books}\n\n{web}\n")
    (tmp_path / "weights.txt").write_text("5\n1\n")
    assert names(None, str(tmp_path / "list.txt"), str(tmp_path / "weights.txt")) == ([books, web], [5.0, 1.0])
    assert names(None, str(tmp_path / "list.txt")) == ([books, web], None)
    for wrong, told in (
        (f"0.7 {web} {books}", "weight and prefix by turns"),
        (f"{web} 0.7 {books} 0.3", "weight and prefix by turns"),
        (f"1 {tmp_path} 1 {web}", "holds 2 data sets"),
        ("", "no pre-training data"),
    ):
        with pytest.raises(ConfigError, match=told):
            open_corpora(wrong)
    with pytest.raises(ConfigError, match="not a number"):
        open_corpora(None, web, "much")
    with pytest.raises(DataError, match=r"none\.bin"):
        open_corpora(str(tmp_path / "none"))


def test_text_is_indexed_into_the_cache_once_and_trained_on_as_if_it_had_been(tmp_path, paddle, monkeypatch):
    tokenizer = load_tokenizer(paddle / "tokenizer")
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"the quiet harbor {i}"} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    listed, options = tmp_path / "out" / "bad_rows.jsonl", {"cache_dir": tmp_path / "cache", "num_proc": 1}
    with pytest.raises(DataError, match="1 of 41 rows"):
        index_online([path], tokenizer, bad_rows=BadRowsFile(listed), **options)
    monkeypatch.setattr(text_job.TextJob, "work", None)  # what follows only reads
    path = path.rename(tmp_path / "b.jsonl")
    (files,), (report,) = index_online([path], tokenizer, bad_rows=BadRowsFile(listed), max_bad_fraction=0.1, **options)
    assert report.from_cache
    assert report.file == str(path)
    assert json.loads(listed.read_text()) == {
        "file": str(path),
        "line": 41,
        "kind": "bad_json",
        "reason": json.loads(listed.read_text())["reason"],
    }
    trained = PretrainData([files], max_seq_len=16, seed=0, vocab_size=tokenizer.vocab_size)
    assert trained.lines()[0].startswith(f"{path}: 40 documents")
    pack = trained.pack(3)
    assert tokenizer.eos_id in pack.samples[0].ids
    assert len(pack.samples[0].ids) == 16


def test_damaged_token_files_in_the_cache_and_those_of_another_version_are_made_again(tmp_path, paddle, monkeypatch):
    tokenizer, path = load_tokenizer(paddle / "tokenizer"), tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"the quiet harbor {i}"}) + "\n" for i in range(40)))
    options = {"cache_dir": tmp_path / "cache", "num_proc": 1}
    (files,), _ = index_online([path], tokenizer, **options)
    want = files.tokens(0, files.num_tokens).tolist()
    for suffix in (".bin", ".idx"):
        damaged = Path(files.prefix + suffix)
        raw = damaged.read_bytes()
        damaged.write_bytes(raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2))
        (again,), (report,) = index_online([path], tokenizer, **options)
        assert not report.from_cache
        assert again.tokens(0, again.num_tokens).tolist() == want
        assert index_online([path], tokenizer, **options)[1][0].from_cache
    monkeypatch.setattr(cache_versions, "DOCUMENTS", cache_versions.DOCUMENTS + 1)
    (other,), (report,) = index_online([path], tokenizer, **options)
    assert not report.from_cache
    assert other.prefix != files.prefix


def test_text_that_changes_after_its_digest_is_not_kept_under_it(tmp_path, paddle, monkeypatch):
    tokenizer, path = load_tokenizer(paddle / "tokenizer"), tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"the quiet harbor {i}"}) + "\n" for i in range(40)))
    real = pretrain.identity_of

    def identity_of(given):
        content = real(given)
        with open(given, "a") as file:
            file.write(json.dumps({"text": "a river"}) + "\n")
        return content

    monkeypatch.setattr(pretrain, "identity_of", identity_of)
    with pytest.raises(DataError, match="changed while it was read"):
        index_online([path], tokenizer, cache_dir=tmp_path / "cache", num_proc=1)
    assert [found.name for found in (tmp_path / "cache").rglob("*") if found.is_file()] == ["text.indexing.lock"]
    monkeypatch.undo()
    ((files,), _) = index_online([path], tokenizer, cache_dir=tmp_path / "cache", num_proc=1)
    assert files.num_documents == 41


def test_text_without_a_usable_row_is_named_by_its_file(tmp_path, paddle):
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    with pytest.raises(DataError, match=r"a\.jsonl"):
        index_online([path], load_tokenizer(paddle / "tokenizer"), cache_dir=tmp_path, num_proc=1)
