"""`erniekit data index`: what a person types, reads, and gets when a word is wrong; and the text we ship for it."""

from __future__ import annotations

import importlib.util
import json

import pytest

from erniekit.cli.main import main
from erniekit.data.mmap_files import open_files


@pytest.fixture
def typed(tmp_path, paddle, monkeypatch):
    """The command in a folder that has a.jsonl, with a tokenizer."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"the quiet harbor {i}"} for i in range(2000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    return lambda *words: main(["data", "index", "--model_name_or_path", str(paddle / "tokenizer"), *words])


def test_it_ends_with_where_the_result_is_its_size_and_the_next_command(typed, capsys):
    assert typed("a.jsonl", "--output", "out/a") == 0
    shown = capsys.readouterr()
    files = open_files("out/a")
    assert shown.out.startswith("out/a.bin and out/a.idx: 2,000 documents, ")
    assert "k tokens (uint16)" in shown.out.splitlines()[0]
    assert "tokens a document: min" in shown.out
    assert shown.out.splitlines()[-1].startswith("next: erniekit train --stage PT")
    assert "--input_dir out/a " in shown.out
    assert "1 of 2,001 rows is left out; out/a_bad_rows.jsonl names each" in shown.err
    assert files.num_documents == 2000
    assert typed("a.jsonl", "--output", "out/a") == 0
    assert "it was there already" in capsys.readouterr().out


def test_every_option_reaches_the_files(typed, tmp_path, paddle):
    (tmp_path / "b.jsonl").write_text('{"body": "a river"}\n')
    options = ["--json_key", "body", "--append_eos", "False", "--dtype", "int64", "--num_proc", "1"]
    assert typed("b.jsonl", "--output", "b", "--format", "npy", *options) == 0
    files = open_files("b")
    assert files.dtype == "int64"
    assert typed("b.jsonl", "--output", "c", "--append_eos", "--json_key", "body") == 0
    assert open_files("c").num_tokens == files.num_tokens + 1
    assert typed("b.jsonl", "--output", "d", "--format", "arrow") == 2


def test_mistakes_are_one_message_and_exit_code_two(typed, capsys):
    for words, told in (
        (["none.jsonl", "--output", "x"], "none.jsonl does not exist"),
        (["a.jsonl", "--output", "x", "--max_bad_fraction", "0"], "1 of 2,001 rows of a.jsonl cannot be used"),
        (["a.jsonl", "--output", "x", "--append_eos", "perhaps"], "True or False"),
        (["a.jsonl", "--output", "y", "--dtype", "int8"], "int8 holds tokens up to 127"),
    ):
        assert typed(*words) == 2, words
        shown = capsys.readouterr().err
        assert told in shown
        assert "Traceback" not in shown


def test_its_help_is_its_own_and_data_still_looks_into_files(capsys, root):
    with pytest.raises(SystemExit) as left:
        main(["data", "index", "--help"])
    assert left.value.code == 0
    assert "--append_eos" in capsys.readouterr().out
    assert main(["data", "--help"]) == 0
    assert "erniekit data index FILE" in capsys.readouterr().out
    assert main(["data", str(root / "examples" / "data" / "sft-eval.jsonl")]) == 0
    assert "10 rows" in capsys.readouterr().out


def test_the_shipped_text_is_what_its_script_makes_small_and_never_twice_the_same(root):
    folder = root / "examples" / "data"
    spec = importlib.util.spec_from_file_location("make_pretrain", folder / "make_pretrain.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    texts = []
    for path, text in make.files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python examples/data/make_pretrain.py"
        texts += [json.loads(line)["text"] for line in text.splitlines()]
    assert len(set(texts)) == len(texts) == make.TRAIN + make.EVAL
    assert sum(path.stat().st_size for path in make.files()) < 300_000
    assert sum("一" <= c <= "鿿" for text in texts for c in text) > 2000
