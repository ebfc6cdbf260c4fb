"""Where an export may go: an absent or empty folder, or an earlier export as it was written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.checkpoint import writer
from erniekit.checkpoint.writer import publish
from erniekit.errors import ErnieKitError
from erniekit.export.target import QUANTIZE, check_target, one_export
from support.snapshot import snapshot


def an_export(target: Path, text: str = "weights") -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return publish(target.parent, target.name, lambda folder: (folder / "model.safetensors").write_text(text) and None)


def refused(target: Path, root: Path, sources: tuple[Path, ...] = ()) -> str:
    before = snapshot(root)
    with pytest.raises(ErnieKitError) as error:
        check_target(target, sources)
    assert snapshot(root) == before
    return error.value.what


def test_an_absent_an_empty_and_an_unchanged_folder_are_free(tmp_path: Path) -> None:
    check_target(tmp_path / "no", [])
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty", [])
    check_target(an_export(tmp_path / "run" / "export"), [])


def test_a_folder_without_our_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "thesis.tex").write_text("years")
    assert "thesis.tex" in refused(tmp_path / "export", tmp_path)


def test_a_file_added_to_an_export_is_refused(tmp_path: Path) -> None:
    out = an_export(tmp_path / "export")
    (out / "README.md").write_text("mine")
    assert "README.md" in refused(out, tmp_path)


def test_an_edited_export_is_refused(tmp_path: Path) -> None:
    out = an_export(tmp_path / "export")
    (out / "model.safetensors").write_text("weighty")
    assert "changed since" in refused(out, tmp_path)


def test_the_base_of_links_to_files_of_an_export_is_not_replaced_by_what_is_made_from_it(tmp_path: Path) -> None:
    out = an_export(tmp_path / "export")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "model.safetensors").symlink_to(out / "model.safetensors")
    assert "would replace what it is made from" in refused(out, tmp_path, (tmp_path / "links",))
    check_target(an_export(tmp_path / "other"), [tmp_path / "links"])


def test_a_link_and_a_file_are_refused(tmp_path: Path) -> None:
    an_export(tmp_path / "other")
    (tmp_path / "export").symlink_to(tmp_path / "other")
    assert "is a link" in refused(tmp_path / "export", tmp_path)
    (tmp_path / "plain").write_text("notes")
    assert "is not a folder" in refused(tmp_path / "plain", tmp_path)


def test_a_source_inside_the_target_is_refused_through_links_too(tmp_path: Path) -> None:
    out = an_export(tmp_path / "export")
    (tmp_path / "link").symlink_to(out)
    assert "made from" in refused(out, tmp_path, (out,))
    assert "made from" in refused(out, tmp_path, (tmp_path / "link" / "base",))


@pytest.mark.parametrize("name", ["export", "an\nexport"])
def test_an_export_hidden_by_a_kill_between_its_two_renames_comes_back(tmp_path: Path, name: str) -> None:
    """The kill is real: SIGKILL right after the first rename, in a process of its own."""
    an_export(tmp_path / name, "old")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom erniekit.checkpoint import writer\n"
        "plain = writer.FileOps.rename\n"
        "def rename(self, source, target):\n    plain(self, source, target)\n"
        "    if target.name.startswith('.old-'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "writer.FileOps.rename = rename\n"
        "write = lambda folder: (folder / 'model.safetensors').write_text('new') and None\n"
        "writer.publish(Path(sys.argv[1]), sys.argv[2], write)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), name], env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / name).exists(), "the fault hit its window"
    with one_export(tmp_path / name):
        assert (tmp_path / name / "model.safetensors").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == [name], "and nothing half-written is left"


def test_two_exports_to_one_folder_are_not_let_through_together(tmp_path: Path) -> None:
    with (
        one_export(tmp_path / "export"),
        pytest.raises(ErnieKitError, match="another export"),
        one_export(tmp_path / "export"),
    ):
        pass


def test_removing_a_tree_removes_a_link_and_never_what_it_points_at(tmp_path: Path) -> None:
    other = an_export(tmp_path / "other")
    (tmp_path / "checkpoint-8").symlink_to(other)
    inside = tmp_path / "tree"
    inside.mkdir()
    (inside / "link").symlink_to(other)
    (inside / "file-link").symlink_to(other / "model.safetensors")
    before = snapshot(other)
    writer.remove_tree(tmp_path / "checkpoint-8")
    writer.remove_tree(inside)
    assert snapshot(other) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]


@pytest.mark.parametrize("kind", ["tmp", "del", "old"])
def test_the_sweep_of_leftovers_does_not_follow_links(tmp_path: Path, kind: str) -> None:
    other = an_export(tmp_path / "other" / "checkpoint-8")
    run = tmp_path / "run"
    run.mkdir()
    an_export(run / "checkpoint-8")
    (run / f".{kind}-checkpoint-8-123-0123abcd").symlink_to(other)
    before = snapshot(other)
    writer.sweep(run, "checkpoint-*")
    assert snapshot(other) == before
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint-8"]


def test_a_hidden_export_comes_back_over_an_empty_folder_and_by_its_very_name(tmp_path: Path) -> None:
    (tmp_path / "m[1]").mkdir()
    an_export(tmp_path / ".old-m[1]-7-0123abcd")
    an_export(tmp_path / ".tmp-m1-7-0123abcd")
    with one_export(tmp_path / "m[1]"):
        assert (tmp_path / "m[1]" / "model.safetensors").is_file()
    assert (tmp_path / ".tmp-m1-7-0123abcd").is_dir(), "another export's"


def test_a_result_of_another_command_is_refused_and_one_of_the_same_is_announced(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"

    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_text("weights")

    publish(tmp_path, "out", write, info={"base": "m", "quant": "w4a16", "method": "round to nearest"})
    assert "is a result of `erniekit quantize`" in refused(out, tmp_path)
    check_target(out, [], QUANTIZE)
    with one_export(out):
        assert f"{out} holds an earlier result (quant w4a16, of m): it is replaced" in capsys.readouterr().out
