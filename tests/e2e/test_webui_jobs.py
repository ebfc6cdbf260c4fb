"""What the page's buttons do, without the page: train the tiny model, stop it, go on, evaluate, export, serve."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from erniekit.demo.tiny import TRAIN, make_tiny_model
from erniekit.webui.jobs import Jobs, WebJob
from erniekit.webui.paths import Roots
from erniekit.webui.runs import Runs

STEPS = 40
SHARED = "compute_type: fp32\ndevice: cpu\nmax_seq_len: 512\n"
RECIPE = (
    "model_name_or_path: model\ntrain_dataset_path: [data.jsonl]\nlearning_rate: 6e-3\nreport_to: none\n"
    f"max_steps: {STEPS}\nsave_steps: 20\ndataset_num_proc: 1\ncache_dir: cache\n{SHARED}"
)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    make_tiny_model(tmp_path / "model")
    lines = TRAIN.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "data.jsonl").write_text("".join(lines[:40]), encoding="utf-8")
    jobs = Jobs(tmp_path / "webui", Roots([tmp_path]))
    yield jobs
    for job in jobs.list():
        jobs.stop(job.id, force=True)


def until(holds: Callable[[], bool], what: Callable[[], str], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def ended(jobs: Jobs, job: WebJob) -> WebJob:
    until(lambda: not jobs.get(job.id).is_running, lambda: jobs.log_tail(job.id).text)
    return jobs.get(job.id)


@pytest.mark.full
def test_a_run_is_stopped_resumed_evaluated_merged_and_asked(jobs: Jobs, tmp_path: Path) -> None:
    runs = Runs(jobs)
    job = jobs.start("train", RECIPE + "fine_tuning: LoRA\n", "anna")

    def steps() -> list[int]:
        series = runs.series(job.id)
        return series["loss"].steps if "loss" in series else []

    until(lambda: len(steps()) >= 3, lambda: jobs.log_tail(job.id).text)
    jobs.stop(job.id)
    stopped = ended(jobs, job)
    assert (stopped.state, stopped.code) == ("stopped", 75), jobs.log_tail(job.id).text
    reached = steps()[-1]
    assert reached < STEPS, "it was to be stopped on its way"
    assert (Path(job.output_dir) / f"checkpoint-{reached}").is_dir()

    # Another page, as after a restart of this one, goes on with it.
    other = Jobs(tmp_path / "webui", Roots([tmp_path]))
    other.resume(job.id)
    assert ended(other, job).state == "ended", other.log_tail(job.id).text
    assert steps() == list(range(1, STEPS + 1)), "no step is missing and none is there twice"
    assert jobs.get(job.id).state == "ended"
    loss = runs.series(job.id)["loss"].values
    assert sum(loss[-5:]) / 5 < loss[0]

    asked = f"model_name_or_path: {job.output_dir}\neval_dataset_path: [data.jsonl]\ncache_dir: cache\n{SHARED}"
    evaluated = ended(jobs, jobs.start("eval", asked))
    assert evaluated.state == "ended", jobs.log_tail(evaluated.id).text
    assert runs.results(evaluated.id)["eval_loss"] < loss[0]

    merged = ended(jobs, jobs.start("export", f"output_dir: {job.output_dir}\ndevice: cpu\n"))
    assert merged.state == "ended", jobs.log_tail(merged.id).text
    export = Path(job.output_dir) / "export"

    server = jobs.start("server", f"model_name_or_path: {export}\nport: 0\nserved_model_name: tiny\n{SHARED}")
    until(lambda: bool(jobs.server_url(server.id)), lambda: jobs.log_tail(server.id).text)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8}
    request = urllib.request.Request(
        jobs.server_url(server.id) + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {jobs.server_key(server.id)}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"][0]["message"]["content"]
    jobs.stop(server.id)
    assert ended(jobs, server).state == "stopped"
