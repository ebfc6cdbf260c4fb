"""What the page stores is readable by its owner alone, and shown without the secrets of addresses."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from erniekit.errors import ConfigError
from erniekit.files import RECORD
from erniekit.webui.job_log import TAIL_BYTES, read_log
from erniekit.webui.jobs import Jobs
from erniekit.webui.paths import Roots
from erniekit.webui.private_files import append, create, private_folder, public_value, replace_text
from erniekit.webui.problems import problem_text
from erniekit.webui.run_names import RunNames
from erniekit.webui.uploads import DATA, RECIPES, keep
from unit.webui.conftest import RECIPE, Stand, until

SECRET = "fd3a5c0signed"
SIGNED = f"https://anna:{SECRET}@data.example/rows.jsonl?part=1&X-Amz-Signature={SECRET}"


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """As on a machine whose users share a group."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def test_folders_and_files_of_the_page_are_closed_to_other_accounts(
    room: Path, stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = room / "webui"
    home.mkdir(mode=0o775)  # as an earlier version left it

    def launch(argv: list[str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
        append(log).close()  # as start_process creates it
        return stand(argv, log, folder)

    jobs = Jobs(home, Roots([room]), launch)
    stand.program = "print('step 1')"
    for recipe in ("train", RECIPE), ("server", "model_name_or_path: model\nport: 0\n"):
        until(jobs, jobs.start(*recipe).id, lambda job: not job.is_running)
    RunNames(home).rename("output/a", "older rate")
    sent = tmp_path / "sent"
    sent.mkdir()
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(sent))
    for name, kind in (("rows.jsonl", DATA), ("mine.yaml", RECIPES)):
        (sent / name).write_text(f"train_dataset_path: {SIGNED}\n")
        keep(str(sent / name), kind, home)
    stored = [home, *home.rglob("*")]
    names = {path.name for path in stored}
    assert {"recipe.yaml", "command.txt", "log.txt", "job.json", "server.key", "names.json", "rows.jsonl"} <= names
    loose = {path.name for path in stored if path.stat().st_mode & 0o077}
    assert loose <= {RECORD}, "it lists names, and lies in a closed folder"


def test_the_log_of_a_started_process_is_private(room: Path) -> None:
    jobs = Jobs(room / "webui", Roots([room]))
    job = jobs.start("train", RECIPE)
    jobs.stop(job.id, force=True)
    until(jobs, job.id, lambda job: not job.is_running)
    assert job.log.stat().st_mode & 0o777 == 0o600


def test_a_file_is_created_and_replaced_whole_and_never_through_a_link(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "home")
    replace_text(folder / "a", "first")
    replace_text(folder / "a", "second")
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert (folder / "a").read_text() == "second"
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        create(folder / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_secrets_of_addresses_are_not_shown_in_values_logs_and_problems(tmp_path: Path) -> None:
    shown = public_value({"columns": {"a": SIGNED}, "files": [SIGNED, ("rows.jsonl", 3)]})
    assert SECRET not in str(shown)
    assert shown["files"][1] == ["rows.jsonl", 3]
    log = tmp_path / "log.txt"
    log.write_text(f"reading {SIGNED}\n")
    assert read_log(log).text == "reading https://***@data.example/rows.jsonl?part=1&***\n"
    for lang in ("en", "zh"):
        text = problem_text("", f"cannot read {SIGNED}", f"check {SIGNED}", lang)
        assert SECRET not in f"{text}", lang


def test_the_end_of_a_log_does_not_begin_inside_an_address(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(f"reading {SIGNED}\n" + "x" * (TAIL_BYTES - 20) + "\nend")
    assert SECRET not in read_log(log).text
    assert read_log(log).text.endswith("\nend")


@pytest.mark.parametrize("key", ["train_dataset_path", "model_name_or_path", "output_dir", "cache_dir", "input_dir"])
def test_an_address_is_refused_as_a_path_and_no_folder_is_called_like_it(jobs: Jobs, key: str) -> None:
    with pytest.raises(ConfigError, match="is an address: https://") as raised:
        jobs.start("train", yaml.safe_dump({**yaml.safe_load(RECIPE), key: SIGNED}))
    assert SECRET not in str(raised.value)
    assert not list(jobs.folder.iterdir())
