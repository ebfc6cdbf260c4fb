"""`streaming: True`: training starts before its data has been read, and is the run that would have read all of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import rmtree

import pytest

from erniekit.config import load
from erniekit.data.storage import web
from erniekit.errors import ConfigError, DataError
from support.jsonl import write_jsonl

STEPS = 4
ROWS = 260
KEYS = dict(
    max_steps=STEPS, save_steps=STEPS // 2, logging_steps=1, per_device_train_batch_size=8,
    gradient_accumulation_steps=1, random_shuffle=False, buffer_size=4, doctor="off",
)  # fmt: skip


class Withheld(BaseHTTPRequestHandler):
    """A file whose second half is sent once `rest` is set."""

    content, tag, rest, waited, broken = b"", '"1"', threading.Event(), False, False

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._head(0)

    def do_GET(self) -> None:
        start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        self._head(start)
        half = len(self.content) // 2
        try:
            if start < half:
                self.wfile.write(self.content[start:half])
                self.wfile.flush()
            if self.broken:
                return
            type(self).waited = type(self).waited or not self.rest.is_set()
            if self.rest.wait(100):
                self.wfile.write(self.content[max(start, half) :])
        except OSError:
            pass  # a reader that wanted the first rows alone

    def _head(self, start: int) -> None:
        self.send_response(206 if start else 200)
        self.send_header("ETag", self.tag)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()


@pytest.fixture
def server() -> Iterator[tuple[str, type[Withheld]]]:
    handler = type("OneFile", (Withheld,), {"rest": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/rows.jsonl", handler
        handler.rest.set()
        server.shutdown()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three MiB in few samples: what makes it long is a field that is not used."""
    rows = [
        {
            "src": [f"question {n}"],
            "tgt": [f"answer {n}"] if n % 3 else [f"a longer answer, number {n}"],
            "x": "-" * 12000,
        }
        for n in range(ROWS)
    ]
    return write_jsonl(tmp_path_factory.mktemp("many") / "rows.jsonl", rows)


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(r["global_step"], r["loss"]) for r in map(json.loads, lines) if "loss" in r]


@pytest.fixture
def released(tmp_path: Path, server) -> Callable[[str], None]:
    """released(run): the second half is sent once the run has logged a step. Who waits for it before, waits in vain."""

    def arrange(run: str) -> None:
        metrics = tmp_path / run / "metrics.jsonl"

        def wait() -> None:
            while not (metrics.exists() and "loss" in metrics.read_text()):
                time.sleep(0.02)
            server[1].rest.set()

        threading.Thread(target=wait, daemon=True).start()

    return arrange


def test_training_starts_before_the_second_half_is_sent_and_a_stopped_run_goes_on(
    server, released: Callable, many: Path, train: Callable, weights: Callable, tmp_path: Path, capsys, monkeypatch
) -> None:
    url, handler = server
    handler.content = many.read_bytes()
    train(tmp_path / "whole", train_dataset_path=many, **KEYS)
    released("streamed")
    keys = dict(KEYS, train_dataset_path=url, streaming=True)
    train(tmp_path / "streamed", **keys)
    assert handler.waited
    assert losses(tmp_path / "streamed") == losses(tmp_path / "whole")
    assert weights(tmp_path / "streamed") == weights(tmp_path / "whole")
    told = json.loads((tmp_path / "streamed" / "run.json").read_text())["data"]
    assert told["train"][0]["so_far"]
    assert 64 < told["train"][0]["rows"] < ROWS
    assert told["packs_per_epoch"] is None
    assert not list(Path(os.environ["ERNIEKIT_CACHE"], "streams").iterdir()), "a finished run keeps no samples"
    assert "rows are read on while it trains" in capsys.readouterr().out

    # from a checkpoint, where nothing of what was read is left
    last = tmp_path / "streamed" / f"checkpoint-{STEPS}"
    rmtree(last)
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "other"))
    train(tmp_path / "streamed", **keys, dataloader_num_workers=1)
    assert f"checkpoint-{STEPS // 2} at step {STEPS // 2}" in capsys.readouterr().out
    assert weights(last) == weights(tmp_path / "whole" / f"checkpoint-{STEPS}")

    handler.tag = '"2"'
    rmtree(last)
    with pytest.raises(ConfigError, match="other settings") as refused:
        train(tmp_path / "streamed", **keys)
    assert "train data" in refused.value.where


@pytest.mark.full
def test_a_lost_server_ends_the_run_and_the_same_command_goes_on(
    server, many: Path, train: Callable, weights: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_TRIES", 1)
    url, handler = server
    handler.content = many.read_bytes()
    handler.broken = True
    keys = dict(KEYS, train_dataset_path=url, streaming=True, per_device_train_batch_size=16)
    with pytest.raises(DataError, match="cannot be read further") as stopped:
        train(tmp_path / "streamed", **keys)
    assert "start the same command again" in stopped.value.fix
    assert list((tmp_path / "streamed").glob("checkpoint-*"))
    handler.broken = False
    handler.rest.set()
    train(tmp_path / "streamed", **keys)
    train(tmp_path / "whole", **dict(keys, train_dataset_path=many, streaming=False))
    assert weights(tmp_path / "streamed") == weights(tmp_path / "whole")


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"max_steps": -1}, "max_steps"),
        ({"save_strategy": "epoch"}, "save_strategy"),
        ({"compat": "erniekit"}, "compat"),
        ({"mix_strategy": "interleave_over"}, "mix_strategy"),
        ({"curriculum": "length"}, "curriculum"),
    ],
)
def test_what_needs_all_rows_is_refused_by_name(given: dict, key: str, many: Path, train: Callable, tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"streaming: how many rows there are is not known|streaming works in stage SFT"
    ) as refused:
        train(tmp_path / "run", **dict(KEYS, train_dataset_path=many, streaming=True, **given))
    assert key in f"{refused.value.what} {refused.value.fix}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"stage": "DPO", "reference_logps": "cached"}, "cached measures all pairs before the first step"),
        ({"stage": "VL-SFT"}, "stage: VL-SFT does not stream: rows with pictures are packed by their patches"),
        (
            {"stage": "KTO"},
            "stage: KTO does not stream: each prompt is measured with the answer of a row",
        ),
        ({"stage": "CLS"}, "the classes, by which the model's head is built, are not known"),
        ({"stage": "PT", "split": "9,1"}, "divides documents by their number"),
        ({"stage": "PT", "evaluation_strategy": "steps", "eval_steps": 1}, "no part of the text left to evaluate on"),
        ({"stage": "PT", "train_dataset_path": "a.jsonl,b.jsonl"}, "several entries are blended by how many rows"),
        ({"stage": "PT", "input_dir": "tokens"}, "token files are read where they lie"),
    ],
)
def test_stages_and_keys_that_do_not_stream_say_why(given: dict, why: str) -> None:
    words = {**KEYS, "model_name_or_path": "m", "train_dataset_path": "a.jsonl", "streaming": True, **given}
    with pytest.raises(ConfigError, match=why):
        load([f"{key}={value}" for key, value in words.items()], "train")


def test_pretraining_on_streamed_text_is_the_run_on_indexed_text_also_after_a_stop(
    train: Callable, weights: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"Document {n}. " + "The quiet river runs to the harbor. " * (n % 7)} for n in range(300)]
    text = write_jsonl(tmp_path / "text.jsonl", rows)
    keys = dict(
        KEYS, stage="PT", train_dataset_path=text, max_seq_len=64, per_device_train_batch_size=4, fine_tuning="Full",
        split="1",
    )  # fmt: skip
    train(tmp_path / "whole", **keys)
    del keys["split"]
    train(tmp_path / "streamed", **keys, streaming=True)
    assert losses(tmp_path / "streamed") == losses(tmp_path / "whole")
    told = json.loads((tmp_path / "streamed" / "run.json").read_text())["data"]["train"][0]
    assert told["so_far"]
    assert told["rows"] < 300
    last = tmp_path / "streamed" / f"checkpoint-{STEPS}"
    rmtree(last)
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "other"))
    train(tmp_path / "streamed", **keys, streaming=True)
    assert weights(last) == weights(tmp_path / "whole" / f"checkpoint-{STEPS}")


@pytest.mark.parametrize("stage", ["DPO", pytest.param("RM", marks=pytest.mark.full), "CLS"])
def test_pairs_and_classes_that_are_streamed_are_those_of_the_whole_file(
    stage: str, train: Callable, weights: Callable, tmp_path: Path
) -> None:
    words = [f"Number {n}. " * (1 + n % 3) for n in range(300)]
    pairs = [{"prompt": f"What is {n}?", "chosen": said, "rejected": "No."} for n, said in enumerate(words)]
    texts = [{"text": said, "label": "odd" if n % 2 else "even"} for n, said in enumerate(words)]
    rows = write_jsonl(tmp_path / "rows.jsonl", texts if stage == "CLS" else pairs)
    more = {"CLS": {"class_labels": "even,odd"}, "DPO": {"reference_logps": "live"}}.get(stage, {})
    keys = dict(KEYS, stage=stage, train_dataset_path=rows, max_seq_len=96, per_device_train_batch_size=2, **more)
    train(tmp_path / "whole", **keys)
    train(tmp_path / "streamed", **keys, streaming=True)
    assert losses(tmp_path / "streamed") == losses(tmp_path / "whole")
    assert weights(tmp_path / "streamed") == weights(tmp_path / "whole")
    assert json.loads((tmp_path / "streamed" / "run.json").read_text())["data"]["train"][0]["rows"] < 300


def started(tiny_model: Path, words: dict[str, object], folder: Path, cache: Path, ranks: int = 1) -> subprocess.Popen:
    keys = dict(
        model_name_or_path=tiny_model, output_dir=folder, fine_tuning="Full", compute_type="fp32", max_seq_len=96,
        learning_rate=1e-3, report_to="none", device="cpu", **words,
    )  # fmt: skip
    env = {**os.environ, "ERNIEKIT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "erniekit", "train", *(f"{k}={v}" for k, v in keys.items())]
    command += [f"nproc_per_node={ranks}"] if ranks > 1 else []
    return subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def ended(process: subprocess.Popen) -> None:
    error = process.communicate(timeout=240)[1]
    assert process.returncode == 0, error


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_with_the_same_rows(
    ranks: int, server, many: Path, tiny_model: Path, weights: Callable, tmp_path: Path
) -> None:
    url, handler = server
    handler.content = many.read_bytes()
    keys = dict(KEYS, random_shuffle=True, shuffle_buffer=20, streaming=True)
    ended(started(tiny_model, dict(keys, train_dataset_path=many), tmp_path / "whole", tmp_path / "a"))
    keys |= dict(train_dataset_path=url, per_device_train_batch_size=8 // ranks)
    run = started(tiny_model, keys, tmp_path / "killed", tmp_path / "b", ranks)
    while not list((tmp_path / "killed").glob("checkpoint-2")):
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)  # launcher and ranks, while they wait for rows that are withheld
    run.wait()
    handler.rest.set()
    ended(started(tiny_model, keys, tmp_path / "killed", tmp_path / "b", ranks))
    if ranks == 1:
        assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    pairs = zip(losses(tmp_path / "killed"), losses(tmp_path / "whole"), strict=True)
    for (step, got), (_, want) in pairs:  # ranks add up in another order
        assert got == (want if ranks == 1 else pytest.approx(want, rel=1e-5)), step
