"""Every command that writes or deletes, on folders with somebody's files and links in them: no foreign byte changes.

A command may refuse (exit code 2) or do its work (0); what it may never do is change what it did not write.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from erniekit.checkpoint.writer import publish
from erniekit.cli.main import main
from erniekit.export.target import check_target
from erniekit.files import RECORD, NotOurs
from support.snapshot import changed, snapshot

# Names a run, an export or an index writes or deletes, planted as a user's files.
FILES = (
    "run.json", "metrics.jsonl", "report.html", "config.json", "model.safetensors", "other.safetensors",
    "model.safetensors.index.json", "tokenizer.model", "train_results.json", "all_results.json", "eval_results.json",
    "trainer_state.json", "bad_rows.jsonl", "bad_eval_rows.jsonl", "adapter_config.json", "adapter_model.safetensors",
    "notes.txt", ".hidden", "bench.json", "A1.json", "words.bin", "words.idx.json", "words_bad_rows.jsonl",
)  # fmt: skip
# The same as links into somebody's tree.
LINKS = (
    "checkpoint-2", "checkpoint-3", ".tmp-checkpoint-2-77-0123abcd", ".del-checkpoint-2-77-0123abcd",
    ".old-checkpoint-9-77-0123abcd", "export", "split_export", ".tmp-export-77-0123abcd", "words.indexing",
    ".new-model.safetensors", ".run.json.part", ".new-config.json", "data", "logs", "sft", "lora",
)  # fmt: skip


class Ground:
    """A folder with planted files, and a tree elsewhere that its links point into."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.elsewhere = root, root / "work", root / "elsewhere"
        self.planted: dict[str, str] = {}
        for name in ("model", "empty"):
            (self.elsewhere / name).mkdir(parents=True)
        weights = b"another run's weights"
        publish(self.elsewhere, "checkpoint-2", lambda tmp: (tmp / "model.safetensors").write_bytes(weights) and None)
        (self.elsewhere / "model" / "config.json").write_text('{"mine": true}')
        self.folder.mkdir()

    def plant(self, *names: str) -> None:
        for name in names:
            path = self.folder / name
            if path.exists() or path.is_symlink():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if name in LINKS:
                path.symlink_to(self.elsewhere / "checkpoint-2")
            else:
                path.write_bytes(f"somebody's {name}".encode())
        (self.folder / "locked").mkdir(exist_ok=True)
        (self.folder / "locked" / "file").write_text("mine")
        (self.folder / "locked").chmod(0o500)

    def remember(self, *ours: str) -> None:
        """All that is here now but what an earlier command of ours wrote."""
        self.planted = {n: s for n, s in snapshot(self.root).items() if n not in ours}

    def check(self, links_may_go: bool = False) -> None:
        gone = changed(self.planted, snapshot(self.root))
        if links_may_go:  # a link in the place of a checkpoint of ours is unlinked by rotation; its target stays
            gone = [name for name in gone if not self.planted[name].startswith("link")]
        assert gone == []


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    made = Ground(tmp_path / "ground")
    yield made
    (made.folder / "locked").chmod(0o700) if (made.folder / "locked").exists() else None


@pytest.fixture
def words(tiny_model: Path, rows: Path) -> list[str]:
    return [
        f"model_name_or_path={tiny_model}", f"train_dataset_path={rows}", "max_seq_len=96", "max_steps=4",
        "save_steps=1", "save_total_limit=2", "report_to=none", "device=cpu", "doctor=off", "compute_type=fp32",
    ]  # fmt: skip


def test_training_into_a_folder_of_somebody_s_files(ground: Ground, words: list[str]) -> None:
    ground.plant(*FILES, *LINKS)
    ground.remember()
    for extra in ([], ["overwrite_output_dir=True"], ["fine_tuning=Full"]):
        assert main(["train", *words, f"output_dir={ground.folder}", *extra]) == 2
        ground.check()
    assert main(["doctor", *words, f"output_dir={ground.folder}"]) == 2
    ground.check()


@pytest.mark.parametrize("tuning", ["Full", "LoRA"])
def test_training_on_in_a_run_that_holds_somebody_s_files(ground: Ground, words: list[str], tuning: str) -> None:
    """Files under names the run never writes stay; under its names they stop it; links go, their targets stay."""
    command = ["train", *words, f"output_dir={ground.folder}", f"fine_tuning={tuning}"]
    assert main([*command, "max_steps=1"]) == 0
    ours = set(snapshot(ground.root))
    older = [name for name in LINKS if name not in ("checkpoint-2", "checkpoint-3", ".old-checkpoint-9-77-0123abcd")]
    ground.plant("notes.txt", "other.safetensors", ".hidden", *older)
    (ground.folder / "checkpoint-0").symlink_to(ground.elsewhere / "checkpoint-2")
    ground.remember(*ours)
    assert main([*command, "override_resume=True"]) == 0
    ground.check(links_may_go=True)
    assert not (ground.folder / "checkpoint-0").is_symlink(), "rotated: the link is gone"
    assert (ground.folder / "other.safetensors").is_file()
    assert (ground.elsewhere / "checkpoint-2" / "model.safetensors").read_bytes() == b"another run's weights"


def test_a_run_started_anew_keeps_what_is_not_its_own(ground: Ground, words: list[str]) -> None:
    command = ["train", *words, f"output_dir={ground.folder}", "fine_tuning=Full"]
    assert main([*command, "max_steps=1"]) == 0
    ours = set(snapshot(ground.root))
    ground.plant("notes.txt", "other.safetensors", "checkpoint-2", "checkpoint-3")
    ground.remember(*ours)
    assert main([*command, "overwrite_output_dir=True"]) == 0
    ground.check(links_may_go=True)


@pytest.mark.parametrize("name", ["model-mine.safetensors", "eval_results.json", "generation_config.json"])
def test_a_file_put_into_a_run_under_one_of_its_names_stops_the_next_command(
    ground: Ground, words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", *words, f"output_dir={ground.folder}", "fine_tuning=LoRA"]
    assert main([*command, "max_steps=1"]) == 0
    (ground.folder / name).write_text("mine")
    ground.remember()
    assert main([*command, "override_resume=True"]) == 2
    assert name in capsys.readouterr().err
    ground.check()


def test_a_mistyped_command_on_a_finished_run_changes_nothing_in_it(
    ground: Ground, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ground.folder / "run"
    command = ["train", *words, f"output_dir={out}", "fine_tuning=LoRA"]
    assert main(command) == 0
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    ground.remember()
    for wrong in ("learning_rate=0.5", "train_dataset_path=nope.jsonl", "lora_rank=3", "resume_from_checkpoint=nope"):
        assert main([*command, wrong]) == 2, wrong
        assert "Traceback" not in capsys.readouterr().err
        ground.check()


def test_an_output_dir_that_is_a_file_is_refused_in_three_lines(
    ground: Ground, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ground.plant("notes.txt")
    ground.remember()
    for command in ("train", "doctor"):
        assert main([command, *words, f"output_dir={ground.folder / 'notes.txt'}"]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 3
    ground.check()


@pytest.mark.parametrize("through", ["itself", "a link", "a folder inside"])
def test_the_base_model_is_never_the_output(
    ground: Ground, words: list[str], tiny_model: Path, through: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ground.folder / "model"
    shutil.copytree(tiny_model, model)
    (ground.folder / "link").symlink_to(model)
    output = {"itself": model, "a link": ground.folder / "link", "a folder inside": model / "out"}[through]
    ground.remember()
    assert main(["train", *words, f"model_name_or_path={model}", f"output_dir={output}"]) == 2
    told = capsys.readouterr().err
    assert "model_name_or_path" in told
    assert "Traceback" not in told
    ground.check()


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


def test_the_cache_keeps_what_lies_beside_it(ground: Ground, words: list[str]) -> None:
    cache = ground.folder / "cache"
    cache.mkdir()
    (cache / "notes.txt").write_text("mine")
    (cache / "link").symlink_to(ground.elsewhere)
    ground.remember()
    command = ["train", *words, f"cache_dir={cache}", "max_steps=1"]
    assert main([*command, f"output_dir={ground.folder / 'one'}"]) == 0
    assert main([*command, f"output_dir={ground.folder / 'two'}"]) == 0
    ground.check()


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


def test_every_planted_name_was_really_there(ground: Ground) -> None:
    ground.plant(*FILES, *LINKS)
    ground.remember()
    assert {f"work/{name}" for name in (*FILES, *LINKS)} <= set(ground.planted)
    (ground.folder / "notes.txt").write_text("changed")
    with pytest.raises(AssertionError):
        ground.check()
    assert RECORD not in FILES


def test_the_commands_to_type_next_work_with_blanks_in_the_paths(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "my runs" / "it's one"
    assert main(["train", *words, f"output_dir={out}", "fine_tuning=Full", "max_steps=1"]) == 0
    told = capsys.readouterr().out
    split = shlex.split(next(line for line in told.splitlines() if "erniekit split" in line))
    assert main(split[1:]) == 0
    assert (out / "split_export" / "config.json").is_file()


def test_rotation_keeps_a_checkpoint_that_somebody_put_files_into(ground: Ground, words: list[str]) -> None:
    command = ["train", *words, f"output_dir={ground.folder}", "fine_tuning=Full"]
    assert main([*command, "max_steps=2"]) == 0
    (ground.folder / "checkpoint-1" / "notes.txt").write_text("mine")
    other = ground.folder / "checkpoint-0"
    other.mkdir()
    (other / "MANIFEST.json").write_text('{"other": "tool"}')
    (other / "weights.bin").write_text("another program's")
    ground.remember(*(name for name in snapshot(ground.root) if "checkpoint-2" in name or "/checkpoint-" not in name))
    assert main([*command, "override_resume=True", "max_steps=6"]) == 0
    ground.check()
    assert not (ground.folder / "checkpoint-2").exists(), "those that are whole and ours are rotated"


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


def test_a_folder_s_old_model_is_not_taken_for_that_of_the_run_that_replaces_it(
    ground: Ground, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = ground.folder / "run"
    command = ["train", *words, f"output_dir={out}", "fine_tuning=Full"]
    assert main(command) == 0
    old = (out / "model.safetensors").read_bytes()
    assert main([*command, "overwrite_output_dir=True", "learning_rate=0.01"]) == 0
    new = (out / "model.safetensors").read_bytes()
    assert new != old
    story = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**story, "status": "running"}))  # as a kill before the end leaves it
    (out / "model.safetensors").write_bytes(old)
    assert main(["split", f"output_dir={out}"]) == 0
    assert "the newest checkpoint is taken" in capsys.readouterr().err
    assert (out / "split_export" / "model.safetensors").read_bytes() == new


def test_results_that_a_user_edited_are_not_replaced(ground: Ground, words: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "rows.jsonl"
    rows = next(w for w in words if w.startswith("train_dataset_path=")).partition("=")[2]
    broken.write_text(Path(rows).read_text() + "no json\n")
    command = [*words, f"train_dataset_path={broken}", "max_bad_fraction=0.9", "max_steps=1"]
    assert main(["train", *command, f"output_dir={ground.folder}"]) == 0
    (ground.folder / "bad_rows.jsonl").write_text("corrected by hand")
    (ground.folder / "report.html").write_text("with my notes")
    ground.remember()
    assert main(["train", *command, f"output_dir={ground.folder}"]) == 2
    ground.check()


def test_a_tilde_in_the_output_is_the_home_folder(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words, "doctor=on", "output_dir=~/my run", "max_steps=1"]) == 0
    assert (tmp_path / "home" / "my run" / "run.json").is_file()
    assert not (tmp_path / "~").exists()


def test_a_missing_model_leaves_no_folder_behind(words: list[str], tmp_path: Path) -> None:
    command = [*words, f"model_name_or_path={tmp_path / 'none'}", f"output_dir={tmp_path / 'out'}"]
    for word in ("train", "doctor"):
        assert main([word, *command]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_is_not_given_records_of_settings_it_was_not_trained_with(
    ground: Ground, words: list[str]
) -> None:
    command = ["train", *words, f"output_dir={ground.folder}", "max_steps=1"]
    assert main(command) == 0
    ground.remember()
    assert main([*command, "learning_rate=0.007", "override_resume=True"]) == 2
    ground.check()
