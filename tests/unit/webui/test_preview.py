"""A look at the data and the doctor, asked of the command line: coloured by label, escaped, and never endless."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from erniekit.webui import preview as previews
from erniekit.webui.forms import FormProblem
from erniekit.webui.pages.data_preview import preview_html
from erniekit.webui.paths import Roots
from erniekit.webui.preview import Preview, PreviewMedium, PreviewPiece, PreviewRow, doctor, preview, run


@pytest.fixture(scope="module")
def roots(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Roots:
    folder = tmp_path_factory.mktemp("data")
    (folder / "tokenizer").symlink_to(paddle / "tokenizer")
    rows = [{"src": [f"<b>q{n}</b>"], "tgt": [f"a{n} & more"], "note": n} for n in range(4)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + "broken\n")
    return Roots([folder, paddle])


def test_rows_come_as_pieces_with_the_trained_ones_marked(roots: Roots) -> None:
    values = {"tokenizer_name": "tokenizer", "train_dataset_path": ["sft.jsonl"], "max_seq_len": 64}
    found = preview(values, roots, start=1, count=4)
    assert found.error == ""
    assert (found.total, found.format, [row.line for row in found.rows]) == (5, "erniekit", [2, 3, 4, 5])
    first = found.rows[0]
    assert "a1" in "".join(p.text for p in first.pieces if p.trained)
    assert "q1" in "".join(p.text for p in first.pieces if not p.trained)
    assert 0 < first.trained < first.tokens
    assert "not JSON" in found.rows[3].problem
    for lang, unused in (("en", "fields not used: note"), ("zh", "未使用的字段：note")):
        html = preview_html(found, 1, lang)
        assert "<b>" not in html
        assert "&lt;" in html
        assert "<mark>" in html
        assert unused in html


def test_what_is_wrong_is_said_and_nothing_is_read_outside_the_roots(roots: Roots) -> None:
    assert "must be given" in preview({}, roots).error
    assert "leads outside" in preview({"train_dataset_path": ["../x.jsonl"]}, roots).error
    assert "leads outside" in preview({"train_dataset_path": ["/etc/passwd"]}, roots, evaluation=False).error
    missing = preview({"train_dataset_path": ["none.jsonl"]}, roots)
    assert "does not exist" in missing.error
    assert missing.rows == ()


def test_text_of_rows_never_becomes_markup() -> None:
    bad = "<script>alert(1)</script>"
    row = PreviewRow(bad, 1, (PreviewPiece(bad, True), PreviewPiece(bad, False), PreviewPiece(bad, True, True)))
    medium = PreviewMedium("picture", bad, 3, (2, 2), thumbnail=bad)
    shown = (
        Preview((row,)), Preview(error=bad), Preview((PreviewRow("f", 1, problem=bad),)),
        Preview((PreviewRow("f", 1, unused=(bad,), media=(medium,)),)),
        Preview(problems=(FormProblem("", bad, bad),)),
    )  # fmt: skip
    for html in (preview_html(found, 0, lang) for found in shown for lang in ("en", "zh")):
        assert "<script" not in html
        assert "&lt;script" in html
    assert '<mark class="rejected">' in row.html


def test_a_look_that_takes_too_long_is_ended_with_all_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    report = run(["data", "preview"], "train_dataset_path: [/dev/zero]\n", timeout=0.05)
    assert report.timed_out
    assert not report.ok
    assert time.monotonic() - began < 30  # the file has no end


def test_the_doctor_refuses_a_recipe_before_it_is_started(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "run", lambda *_: pytest.fail("nothing was to be started"))
    report = doctor("model_name_or_path: m\n", roots)
    assert not report.ok
    assert "train_dataset_path must be given" in report.text


@pytest.mark.full
def test_the_doctor_reports_on_a_real_model(tmp_path: Path) -> None:
    from erniekit.demo.tiny import TRAIN, make_tiny_model

    make_tiny_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_bytes(TRAIN.read_bytes())
    recipe = (
        "model_name_or_path: model\ntrain_dataset_path: [data.jsonl]\ncompute_type: fp32\ndevice: cpu\nmax_steps: 2\n"
    )
    report = doctor(recipe + "max_seq_len: 256\ncache_dir: cache\n", Roots([tmp_path]))
    assert report.ok, report.text
    assert "gradients reach all" in report.text
    assert not (tmp_path / "output").exists()
