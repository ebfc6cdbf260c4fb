"""Every other command that writes or deletes, on folders with somebody's files in them: no foreign byte changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.export.target import check_target
from erniekit.files import NotOurs
from support.foreign_files import Ground
from support.snapshot import changed, snapshot


@pytest.fixture
def adapter(ground: Ground, words: list[str]) -> Path:
    out = ground.folder / "run"
    assert main(["train", *words, f"output_dir={out}", "fine_tuning=LoRA", "max_steps=1"]) == 0
    return out


@pytest.mark.parametrize("there", ["folder", "link", "file", "added to", "edited"])
def test_export_leaves_what_it_did_not_write(ground: Ground, adapter: Path, tiny_model: Path, there: str) -> None:
    command = ["export", f"output_dir={adapter}", f"model_name_or_path={tiny_model}"]
    target = adapter / "export"
    if there == "folder":
        target.mkdir()
        (target / "mine.safetensors").write_text("mine")
    elif there == "link":
        target.symlink_to(ground.elsewhere / "model")
    elif there == "file":
        target.write_text("notes")
    else:
        assert main(command) == 0
        (target / ("README.md" if there == "added to" else "config.json")).write_text("mine")
    ground.remember()
    assert main(command) == 2
    ground.check()


def test_export_over_an_unchanged_export_works_and_leaves_the_rest(
    ground: Ground, adapter: Path, tiny_model: Path
) -> None:
    command = ["export", f"output_dir={adapter}", f"model_name_or_path={tiny_model}"]
    assert main(command) == 0
    (adapter / "notes.txt").write_text("mine")
    ground.remember("work/run/export/MANIFEST.json")
    assert main(command) == 0
    ground.check()


def test_split_with_its_source_inside_the_target_keeps_the_source(ground: Ground, tiny_model: Path) -> None:
    base = ground.folder / "split_export"
    shutil.copytree(tiny_model, base)
    ground.remember()
    assert main(["split", f"output_dir={ground.folder}", f"model_name_or_path={base}"]) == 2
    ground.check()


def test_split_leaves_an_existing_folder_alone(ground: Ground, tiny_model: Path) -> None:
    ground.plant("split_export/thesis.tex")
    ground.remember()
    assert main(["split", f"output_dir={ground.folder}", f"model_name_or_path={tiny_model}"]) == 2
    ground.check()


def test_data_index_replaces_nothing(ground: Ground, tiny_model: Path) -> None:
    text = ground.folder / "text.jsonl"
    text.write_text(json.dumps({"text": "hello world"}) + "\n")
    command = ["data", "index", str(text), "--model_name_or_path", str(tiny_model), "--num_proc", "1"]
    for name in ("words.bin", "words_bad_rows.jsonl", "words.idx.json", "words_ids.npy", "words.indexing"):
        form = "npy" if name.endswith(".npy") else "bin"
        ground.plant(name)
        ground.remember()
        assert main([*command, "--output", str(ground.folder / "words"), "--format", form]) == 2, name
        ground.check()
        (ground.folder / name).unlink()
    (ground.folder / "words.indexing").mkdir()
    (ground.folder / "words.indexing" / "tokens").write_text("mine")
    ground.remember()
    assert main([*command, "--output", str(ground.folder / "words")]) == 2
    ground.check()
    shutil.rmtree(ground.folder / "words.indexing")
    ground.remember()
    assert main([*command, "--output", str(ground.folder / "words")]) == 0
    ground.check()


def test_an_evaluation_replaces_only_its_own_results(ground: Ground, tiny_model: Path, rows: Path) -> None:
    command = ["eval", f"model_name_or_path={tiny_model}", f"eval_dataset_path={rows}", "max_seq_len=96", "device=cpu"]
    ground.plant("eval_results.json", "all_results.json", "notes.txt", "bad_eval_rows.jsonl")
    ground.remember()
    assert main([*command, f"output_dir={ground.folder}"]) == 2
    ground.check()
    other = ground.root / "results"
    assert main([*command, f"output_dir={other}"]) == 0
    assert main([*command, f"output_dir={other}"]) == 0, "its own are replaced"


def test_bench_replaces_only_its_own_results(ground: Ground) -> None:
    ground.plant("bench.json", "A1.json")
    ground.remember()
    assert main(["bench", "--tiny", "--only", "A1", "--peers", "none", "--output_dir", str(ground.folder)]) == 2
    ground.check()


def test_a_demo_replaces_only_a_demo(ground: Ground) -> None:
    """The rule alone: whole demos run in tests/e2e/newcomer."""
    from erniekit.demo.folder import seal, take_folder

    root = take_folder(ground.folder / "demo")
    (root / "my-run").mkdir()
    (root / "my-run" / "weights").write_text("mine")
    (root / "data" / "mine.jsonl").write_text("{}")
    ground.remember()
    assert main(["demo", "--dir", str(root)]) == 2, "killed half-way, and somebody's file in it"
    ground.check()
    (root / "data" / "mine.jsonl").unlink()
    seal(root)
    (root / "lora").symlink_to(ground.elsewhere)
    ground.remember()
    assert main(["demo", "--dir", str(root)]) == 2, "finished, and somebody's link in it"
    ground.check()
    (root / "lora").unlink()
    ground.remember("work/demo/.made-by-erniekit-demo")
    assert take_folder(root) == root
    assert (root / "my-run" / "weights").read_text() == "mine"


def test_a_web_job_is_deleted_without_what_is_not_its_own(ground: Ground) -> None:
    from erniekit.webui.jobs import JobError, Jobs
    from erniekit.webui.paths import Roots

    class Child:
        pid = 0

        def wait(self) -> int:
            return 0

    jobs = Jobs(ground.folder / "webui", Roots([ground.root]), launch=lambda argv, log, folder: Child())
    (ground.folder / "data.jsonl").write_text("{}\n")
    recipe = f"model_name_or_path: {ground.elsewhere / 'model'}\ntrain_dataset_path: {ground.folder / 'data.jsonl'}\n"
    job = jobs.start("train", recipe)
    while jobs.get(job.id).is_running:
        pass
    mine = Path(job.folder) / "output" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    ground.remember()
    with pytest.raises(JobError, match=r"notes\.txt"):
        jobs.delete(job.id)
    ground.check()
    mine.unlink()
    jobs.delete(job.id)
    assert not Path(job.folder).exists()


def test_an_export_never_replaces_a_checkpoint(ground: Ground, adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    base = f"model_name_or_path={tiny_model}"
    shutil.copytree(adapter, full)
    ground.remember()
    before = snapshot(full)
    main(["export", base, f"lora_path={adapter}", f"output_dir={full / 'checkpoint-1'}"])
    assert changed(before, snapshot(full)) == []
    shutil.rmtree(full / "checkpoint-1" / "export", ignore_errors=True)
    with pytest.raises(NotOurs, match="is a checkpoint"):
        check_target(full / "checkpoint-1", [])
    ground.check()
