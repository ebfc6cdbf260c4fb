"""Jobs outlive the page: started as lists of words, found again, stopped as the process they are and no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from erniekit.errors import ConfigError
from erniekit.webui import jobs as jobs_module
from erniekit.webui import process
from erniekit.webui.job_log import TAIL_BYTES, plain
from erniekit.webui.jobs import JobError, Jobs
from erniekit.webui.paths import Roots
from unit.webui.conftest import RECIPE, Stand, until


def test_a_job_is_a_folder_and_five_words(jobs: Jobs, stand: Stand, room: Path) -> None:
    job = jobs.start("train", RECIPE, "anna")
    folder = room / "webui" / "jobs" / job.id
    assert stand.asked == [[sys.executable, "-m", "erniekit", "train", str(folder / "recipe.yaml")]]
    assert {"recipe.yaml", "command.txt", "log.txt", "job.json"} <= {p.name for p in folder.iterdir()}
    assert (folder / "command.txt").read_text() == f"erniekit train {folder / 'recipe.yaml'}\n"
    told = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert told["model_name_or_path"] == str(room / "model")
    assert told["train_dataset_path"] == [str(room / "data.jsonl")]
    assert told["output_dir"] == str(folder / "output"), "two users who name no folder do not share one"
    assert (job.state, job.owner) == ("running", "anna")


def test_the_process_leads_a_session_of_its_own(jobs: Jobs, monkeypatch: pytest.MonkeyPatch, room: Path) -> None:
    monkeypatch.setenv(jobs_module.TOKEN_VARIABLE, "secret")
    code = "import os; print(os.getsid(0) == os.getpid(), os.environ.get('ERNIEKIT_WEBUI_TOKEN'), os.getcwd())"
    code += "; print(os.environ['ERNIEKIT_MEDIA_FOLDERS'])"
    child = jobs_module.start_process([sys.executable, "-c", code], room / "log.txt", room, jobs.roots)
    assert child.wait(20) == 0
    assert (room / "log.txt").read_text().split() == ["True", "None", str(room), f"{room}:{room}/webui"]


@pytest.mark.parametrize(
    ("program", "state"),
    [
        ("pass", "ended"),
        ("raise SystemExit(2)", "failed"),
        ("raise SystemExit(75)", "stopped"),
        ("import os; os.kill(os.getpid(), 9)", "failed"),
    ],
)
def test_the_exit_code_decides_the_state(jobs: Jobs, stand: Stand, program: str, state: str) -> None:
    stand.program = program
    job = until(jobs, jobs.start("train", RECIPE).id, lambda job: not job.is_running)
    assert job.state == state
    assert job.ended is not None


def test_stop_asks_the_process_and_it_is_then_stopped(jobs: Jobs) -> None:
    job = jobs.start("train", RECIPE)
    jobs.stop(job.id)
    assert until(jobs, job.id, lambda job: not job.is_running).state == "stopped"
    assert jobs.stop(job.id).state == "stopped", "asking once more changes nothing"


def test_stop_tells_the_process_alone_and_force_ends_all_it_started(jobs: Jobs, stand: Stand, room: Path) -> None:
    stand.program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "print('child', child.pid, flush=True)\n"
        "while True: time.sleep(0.01)\n"
    )
    job = jobs.start("train", RECIPE)
    end = time.monotonic() + 60
    while "child" not in jobs.log_tail(job.id).text and time.monotonic() < end:
        time.sleep(0.02)
    child = int(jobs.log_tail(job.id).text.split()[1])
    jobs.stop(job.id)
    while "asked" not in jobs.log_tail(job.id).text and time.monotonic() < end:
        time.sleep(0.02)
    assert jobs.get(job.id).is_running
    assert process.identity(child), "a launcher tells its ranks itself"
    jobs.stop(job.id, force=True)
    assert until(jobs, job.id, lambda job: not job.is_running).state == "stopped"
    while process.identity(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not process.identity(child)


def test_a_pid_that_belongs_to_another_process_now_is_left_alone(jobs: Jobs, room: Path) -> None:
    job = jobs.start("train", RECIPE)
    file = room / "webui" / "jobs" / job.id / "job.json"
    time.sleep(0.05)  # the system counts start times in hundredths of a second
    bystander = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        file.write_text(json.dumps({**json.loads(file.read_text()), "pid": bystander.pid}))
        again = Jobs(room / "webui", Roots([room]))
        assert again.stop(job.id).state == "lost"
        assert not process.send(bystander.pid, job.identity, signal.SIGKILL, group=True)
        time.sleep(0.1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_page_started_anew_finds_what_still_runs_and_can_stop_it(jobs: Jobs, room: Path) -> None:
    job = jobs.start("train", RECIPE)
    other = Jobs(room / "webui", Roots([room]))
    assert [j.id for j in other.list()] == [job.id]
    assert other.get(job.id).is_running
    other.stop(job.id)
    assert until(other, job.id, lambda job: not job.is_running).state == "stopped"


@pytest.mark.parametrize(
    ("status", "log", "state"),
    [
        ("finished", "", "ended"),
        ("stopped", "", "stopped"),
        ("failed", "", "failed"),
        ("running", "error: no such model\nwhere: m\n", "failed"),
        ("running", "step 3\n", "lost"),
        (None, "", "lost"),
    ],
)
def test_a_run_that_ended_while_no_page_was_there_is_judged_by_what_it_left(
    room: Path, status: str | None, log: str, state: str
) -> None:
    output = room / "out"
    code = (
        "import os, sys; from erniekit.webui.jobs import Jobs; from erniekit.webui.paths import Roots\n"
        "import subprocess\n"
        "def launch(argv, log, folder):\n"
        "    open(log, 'w').write(sys.argv[2])\n"
        "    words = [sys.executable, '-S', '-c', 'import time; time.sleep(0.2)']\n"
        "    return subprocess.Popen(words, start_new_session=True)\n"
        "job = Jobs('webui', Roots(['.']), launch).start('train', sys.argv[1])\n"
        "print(job.id, job.pid, flush=True); os._exit(0)\n"
    )
    recipe = f"{RECIPE}output_dir: {output}\n"
    done = subprocess.run([sys.executable, "-c", code, recipe, log], cwd=room, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    id, pid = done.stdout.split()
    if status:
        output.mkdir()
        (output / "run.json").write_text(json.dumps({"status": status}))
    end = time.monotonic() + 60
    while process.identity(int(pid)) and time.monotonic() < end:
        time.sleep(0.02)
    assert Jobs(room / "webui", Roots([room])).get(id).state == state


def test_resume_runs_the_same_recipe_in_the_same_folder_without_starting_anew(jobs: Jobs, stand: Stand) -> None:
    stand.program = "print('first')"
    job = jobs.start("train", RECIPE + "overwrite_output_dir: True\n")
    assert "overwrite_output_dir: true" in jobs.recipe(job.id)
    until(jobs, job.id, lambda job: not job.is_running)
    stand.program = "print('second')"
    again = jobs.resume(job.id)
    assert (again.id, again.output_dir, again.starts) == (job.id, job.output_dir, 2)
    assert "overwrite_output_dir" not in jobs.recipe(job.id)
    until(jobs, job.id, lambda job: not job.is_running)
    assert jobs.log_tail(job.id).text.split() == ["first", "second"]
    assert stand.asked[0] == stand.asked[1]


def test_a_job_that_an_earlier_version_stored_is_read(jobs: Jobs, stand: Stand) -> None:
    stand.program = "pass"
    job = until(jobs, jobs.start("train", RECIPE, "anna").id, lambda job: not job.is_running)
    file = Path(job.folder) / "job.json"
    stored = json.loads(file.read_text())
    earlier = {"command": "word", "owner": "who", "stop_requested": "asked_to_stop"}
    file.write_text(json.dumps({earlier.get(name, name): value for name, value in stored.items()}))
    assert jobs.get(job.id) == job


def test_what_runs_is_not_resumed_and_not_deleted(jobs: Jobs) -> None:
    job = jobs.start("train", RECIPE)
    for action in (jobs.resume, jobs.delete):
        with pytest.raises(JobError, match="still running"):
            action(job.id)


def test_delete_removes_the_folder_of_the_job_and_nothing_else(jobs: Jobs, stand: Stand, room: Path) -> None:
    stand.program = "pass"
    (room / "kept").mkdir()
    job = jobs.start("train", RECIPE + "output_dir: kept\n")
    until(jobs, job.id, lambda job: not job.is_running)
    (room / "kept" / "weights").write_text("w")
    link = Path(job.folder) / "link"
    link.symlink_to(room / "kept")
    with pytest.raises(JobError, match="holds link, not written by the job"):
        jobs.delete(job.id)
    link.unlink()
    jobs.delete(job.id)
    assert not Path(job.folder).exists()
    assert (room / "kept" / "weights").read_text() == "w"
    assert jobs.list() == []


@pytest.mark.parametrize(
    "id", ["", "..", "../jobs", "/etc", "x", "20260101-000000-abcdef", "20260101-000000-abcdef/..", None]
)
def test_an_id_that_is_none_reads_and_deletes_nothing(jobs: Jobs, id: str) -> None:
    for action in (jobs.get, jobs.delete, jobs.stop, jobs.resume, jobs.log_tail, jobs.recipe):
        with pytest.raises(JobError, match="no such job"):
            action(id)


def test_a_folder_that_was_swapped_for_a_link_is_not_deleted(jobs: Jobs, stand: Stand, room: Path) -> None:
    stand.program = "pass"
    job = jobs.start("train", RECIPE)
    until(jobs, job.id, lambda job: not job.is_running)
    (room / "webui" / "jobs" / job.id).rename(room / "precious")
    (room / "webui" / "jobs" / job.id).symlink_to(room / "precious")
    with pytest.raises(JobError, match="not the folder of a job"):
        jobs.delete(job.id)
    assert (room / "precious" / "recipe.yaml").exists()


def test_two_trainings_into_one_folder_are_refused_and_two_without_a_folder_are_not(jobs: Jobs) -> None:
    first = jobs.start("train", RECIPE + "output_dir: shared\n", "anna")
    with pytest.raises(JobError, match=first.id):
        jobs.start("train", RECIPE + "output_dir: ./shared\n", "ben")
    one, other = jobs.start("train", RECIPE, "anna"), jobs.start("train", RECIPE, "ben")
    assert one.output_dir != other.output_dir
    assert [j.id for j in jobs.list("ben")] == [other.id]
    assert len(jobs.list()) == 3


@pytest.mark.parametrize("word", ["", "demo", "webui", "train; id", "--help", "data"])
def test_only_the_commands_of_the_page_are_started(jobs: Jobs, stand: Stand, word: str) -> None:
    with pytest.raises(JobError, match="is not a job"):
        jobs.start(word, RECIPE)
    assert not stand.asked


def test_a_recipe_that_does_not_pass_leaves_nothing_behind(jobs: Jobs, stand: Stand, room: Path) -> None:
    for recipe in ("max_steps: x", "train_dataset_path: a", RECIPE + "output_dir: /etc\n", RECIPE + "x" * 200_000, "["):
        with pytest.raises(ConfigError):
            jobs.start("train", recipe)
    assert not stand.asked
    assert not list((room / "webui" / "jobs").iterdir())


def test_the_log_is_read_from_where_it_was_left_and_letters_are_never_torn(jobs: Jobs, stand: Stand) -> None:
    stand.program = "pass"
    job = jobs.start("train", RECIPE)
    until(jobs, job.id, lambda job: not job.is_running)
    raw = "一\x1b[32m二\x1b[0m\n10%\r20%\r\n<b>三</b>".encode()
    seen, offset = "", 0
    for size in range(1, len(raw) + 1):
        job.log.write_bytes(raw[:size])
        part = jobs.log_tail(job.id, offset)
        offset = part.offset
        seen += part.text
        assert "\ufffd" not in part.text
    assert offset == len(raw)
    assert jobs.log_tail(job.id, 0).text == "一二\n20%\n<b>三</b>"
    assert "&lt;b&gt;" in jobs.log_tail(job.id).html
    assert jobs.log_tail(job.id, offset).text == ""


def test_of_a_long_log_the_end_is_given(jobs: Jobs, stand: Stand) -> None:
    stand.program = "pass"
    job = jobs.start("train", RECIPE)
    until(jobs, job.id, lambda job: not job.is_running)
    job.log.write_bytes(b"x" * 1_000_000 + b"\nend")
    for after in (-1, 0, 5_000_000):
        part = jobs.log_tail(job.id, after)
        assert part.text.endswith("\nend")
        assert len(part.text) <= TAIL_BYTES
        assert part.offset == 1_000_004


def test_where_a_server_answers_is_known_once_it_is_ready(jobs: Jobs, stand: Stand) -> None:
    stand.program = "import time; print('loading', flush=True); time.sleep(60)"
    job = jobs.start("server", "model_name_or_path: model\nport: 0\n")
    assert jobs.server_url(job.id) == ""
    with job.log.open("a") as log:
        log.write("ready: http://127.0.0.1:9/v1 (an adapter's author chose the name of its base)\n")
    assert jobs.server_url(job.id) == ""
    (Path(job.folder) / "server.address").write_text("http://127.0.0.1:4711/v1\n")
    assert jobs.server_url(job.id) == "http://127.0.0.1:4711/v1"
    jobs.stop(job.id)
    until(jobs, job.id, lambda job: not job.is_running)
    assert jobs.server_url(job.id) == ""


def test_a_run_does_not_end_up_in_the_folder_of_another_job_and_is_not_deleted_with_it(
    jobs: Jobs, stand: Stand
) -> None:
    stand.program = "pass"
    first = jobs.start("train", RECIPE)
    until(jobs, first.id, lambda job: not job.is_running)
    for inside in (first.folder, f"{first.folder}/mine", f"{first.output_dir}/deeper"):
        with pytest.raises(JobError, match=first.id):
            jobs.start("train", RECIPE + f"output_dir: {inside}\n")
    second = jobs.start("train", RECIPE + f"output_dir: {first.output_dir}\n")  # goes on in the same folder
    until(jobs, second.id, lambda job: not job.is_running)
    with pytest.raises(JobError, match=second.id):
        jobs.delete(first.id)
    jobs.delete(second.id)
    jobs.delete(first.id)
    assert jobs.list() == []


def test_the_real_command_line_says_what_is_wrong_into_the_log(room: Path) -> None:
    jobs = Jobs(room / "webui", Roots([room]))
    job = jobs.start("server", "model_name_or_path: model\nengine: transformers\ntensor_parallel_degree: 2\n")
    job = until(jobs, job.id, lambda job: not job.is_running, 60)
    assert (job.state, job.code) == ("failed", 2)
    assert "error: the embedded engine uses one device" in jobs.log_tail(job.id).text


def test_terminal_text_becomes_lines() -> None:
    assert plain("\x1b[1mbold\x1b[0m\r\na\rb\n") == "bold\nb\n"


def test_a_process_that_is_gone_has_no_identity() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    told = process.identity(os.getpid())
    child.wait()
    assert process.identity(child.pid) == ""
    assert process.is_same(os.getpid(), told)
    assert not process.is_same(os.getpid(), "")


def test_only_so_many_jobs_run_at_once(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "MAX_RUNNING", 2)
    first = jobs.start("train", RECIPE)
    jobs.start("train", RECIPE)
    with pytest.raises(JobError, match="2 jobs are running"):
        jobs.start("train", RECIPE)
    assert len(jobs.list()) == 2
    jobs.stop(first.id, force=True)
    until(jobs, first.id, lambda job: not job.is_running)
    jobs.start("train", RECIPE)


def test_a_chat_server_of_the_page_has_a_key_that_other_accounts_cannot_read(room: Path, tmp_path: Path) -> None:
    asked = []

    def launch(argv: list[str], log: Path, folder: Path) -> jobs_module.ChildProcess:
        asked.append(argv)
        program = f"import os; print('key', os.environ['{jobs_module.KEY_VARIABLE}'])"
        return jobs_module.start_process([sys.executable, "-S", "-c", program], log, folder, Roots([folder]))

    jobs = Jobs(room / "webui", Roots([room]), launch)
    job = jobs.start("server", "model_name_or_path: model\nport: 0\n")
    key = jobs.server_key(job.id)
    until(jobs, job.id, lambda job: not job.is_running)
    file = Path(job.folder) / jobs_module.KEY_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(key) >= 32
    assert f"key {key}" in jobs.log_tail(job.id).text, "the server was given it"
    assert key not in " ".join(asked[0])
    assert key not in jobs.recipe(job.id)
    train = jobs.start("train", RECIPE)
    assert jobs.server_key(train.id) == ""
