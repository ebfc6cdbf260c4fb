"""Chat models and the tabs that show them: unloaded when the tab closes, when unused, and when the page stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.webui import chat_leases, process
from erniekit.webui.chat_leases import ChatLeases
from erniekit.webui.jobs import Jobs, WebJob
from support.clock import Clock
from support.clock import until as until_true
from unit.webui.conftest import Stand, until

RECIPE = "model_name_or_path: model\n"


@pytest.fixture
def server(jobs: Jobs) -> WebJob:
    return jobs.start("server", RECIPE)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """That of the leases: what they wait for is for the test to say."""
    clock = Clock()
    monkeypatch.setattr(chat_leases, "time", clock)
    return clock


def gone(jobs: Jobs, id: str) -> bool:
    job = until(jobs, id, lambda job: not job.is_running)
    return process.identity(job.pid) == ""


def test_a_model_whose_last_tab_is_closed_is_unloaded_and_its_process_gone(
    jobs: Jobs, server: WebJob, clock: Clock
) -> None:
    leases = ChatLeases(jobs, reload_s=20)
    leases.hold(server.id, "tab 1")
    leases.hold(server.id, "tab 2")
    leases.close_tab("tab 1")
    clock.sleep(30)
    assert leases.check() == [], "another tab shows it"
    leases.close_tab("tab 2")
    clock.sleep(19)
    assert leases.check() == [], "a page that is reloaded has some seconds to come back"
    clock.sleep(1)
    assert leases.check() == [server.id]
    assert leases.release_reason(server.id) == "closed"
    assert gone(jobs, server.id)


def test_a_tab_that_is_reloaded_keeps_its_model(jobs: Jobs, server: WebJob, clock: Clock) -> None:
    leases = ChatLeases(jobs, reload_s=20)
    leases.hold(server.id, "before")
    leases.close_tab("before")
    leases.hold(server.id, "after")
    clock.sleep(30)
    assert leases.check() == []
    assert jobs.get(server.id).is_running


def test_a_model_that_is_not_asked_is_unloaded_and_one_that_is_asked_stays(jobs: Jobs, clock: Clock) -> None:
    asked, silent = jobs.start("server", RECIPE), jobs.start("server", RECIPE)
    leases = ChatLeases(jobs, idle_s=40)
    for job in (asked, silent):
        leases.hold(job.id, "tab")
        leases.use(job.id)
    clock.sleep(25)
    leases.use(asked.id)
    clock.sleep(25)
    assert leases.check() == [silent.id]
    assert leases.release_reason(silent.id) == "idle"
    assert gone(jobs, silent.id)
    assert jobs.get(asked.id).is_running


def test_when_the_page_stops_its_models_are_gone_and_its_trainings_go_on(jobs: Jobs, server: WebJob) -> None:
    training = jobs.start("train", RECIPE + "train_dataset_path: [data.jsonl]\n")
    leases = ChatLeases(jobs)
    leases.hold(server.id, "tab")
    leases.close()
    assert process.identity(server.pid) == ""
    assert jobs.get(training.id).is_running


def test_a_server_that_does_not_end_when_asked_is_killed(
    jobs: Jobs, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("erniekit.webui.chat_leases.STOP_S", 0.3)
    stand.program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(60)"
    job = jobs.start("server", RECIPE)
    until_true(lambda: "deaf" in jobs.log_tail(job.id).text, "it hears no SIGTERM")
    leases = ChatLeases(jobs)
    leases.hold(job.id, "tab")
    leases.close()
    assert gone(jobs, job.id)


def test_a_server_whose_page_was_killed_is_unloaded_by_the_next_page(jobs: Jobs, server: WebJob) -> None:
    assert ChatLeases(jobs, reload_s=0.0).check() == [], "its page, this process, is there"
    file = Path(server.folder) / "job.json"
    file.write_text(file.read_text().replace(server.page, "999999999 gone"))
    assert ChatLeases(jobs, reload_s=0.0).check() == [server.id]
    assert gone(jobs, server.id)
