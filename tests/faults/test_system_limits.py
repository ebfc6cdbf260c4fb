"""What the system refuses: few file descriptors, and folders that cannot be written: row L1.

Real processes with real limits, and folders that are really closed.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from erniekit.cli import system_limits
from erniekit.cli.main import main
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from faults.places import Place, words_of
from faults.results import fault

SECONDS = 60  # for a process that starts, on a machine with other work


def words(command: str, place: Place, folder: Path) -> list[str]:
    """The command, writing into `folder`."""
    rows = place.root / "rows.jsonl"
    if command == "export":
        return ["export", str(place.model), f"lora_path={place.run}", f"output_dir={folder}/made"]
    if command == "split":
        return ["split", f"model_name_or_path={place.model}", f"output_dir={folder}"]
    if command == "index":
        return ["data", "index", str(rows), "--model_name_or_path", str(place.model), "--output", f"{folder}/ix"]
    if command == "demo":
        return ["demo", "--dir", f"{folder}/demo"]
    out = words_of(command.removesuffix(" 2"), place)
    out = [word.replace(str(place.run), str(folder)).replace(f"{place.root}/eval", str(folder)) for word in out]
    return [*out, "nproc_per_node=2"] if command.endswith(" 2") else out


def few(limit: int, words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    command = [sys.executable, "-m", "erniekit", *words]
    return subprocess.run(command, preexec_fn=lower, cwd=cwd, capture_output=True, text=True, timeout=SECONDS)


FEW = {
    24: ("train", "chat", "server", "doctor", "eval", "export", "split", "index", "demo", "train 2"),
    40: ("train 2",),
}


@pytest.mark.parametrize("sizes", [{40: ("train 2",)}, pytest.param(FEW, marks=pytest.mark.full)], ids=["some", "all"])
def test_a_command_with_few_descriptors_ends_at_once_and_names_the_limit(sound, tmp_path, sizes):
    with fault("L1", "few file descriptors (ulimit -n)") as row:
        place, longest = Place(sound), 0.0
        for limit, commands in sizes.items():
            for command in commands:
                row.count += 1
                began = time.monotonic()
                done = few(limit, words(command, place, tmp_path / f"out-{row.count}"), tmp_path)
                longest = max(longest, time.monotonic() - began)
                assert done.returncode == 2, (command, done.stderr)
                assert f"this process may have {limit} files open" in done.stderr, (command, done.stderr)
                assert "fix:   raise it: ulimit -n" in done.stderr
                assert "Traceback" not in done.stderr
                row.hits += 1
        row.note = f"refused with the limit's name within {longest:.0f} s"


def test_a_low_limit_that_may_be_raised_is_raised():
    code = "import resource as r; from erniekit.cli.system_limits import require_descriptors; "
    code += "require_descriptors(); print(r.getrlimit(r.RLIMIT_NOFILE)[0])"

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 2000))

    done = subprocess.run([sys.executable, "-c", code], preexec_fn=lower, capture_output=True, text=True, check=True)
    assert int(done.stdout) == 2000


@contextmanager
def unwritable(folder: Path) -> Iterator[int]:
    """A folder nothing can be created in, whoever asks: immutable for root, without permission for others. Gives the
    error that creating a file meets."""
    folder.mkdir(parents=True)
    root = os.geteuid() == 0
    if root:
        tool = shutil.which("chattr")
        if not tool or subprocess.run([tool, "+i", str(folder)], capture_output=True).returncode:
            pytest.skip("root, and no immutable folders on this disk")
    else:
        folder.chmod(0o555)
    try:
        with pytest.raises(OSError) as caught:
            (folder / "probe").touch()
        yield caught.value.errno or 0
    finally:
        if root:
            subprocess.run(["chattr", "-i", str(folder)], check=True)
        else:
            folder.chmod(0o755)


WRITERS = ("train", "eval", "export", "split", "index", "demo")


@pytest.mark.parametrize("commands", [("train", "export", "index"), pytest.param(WRITERS, marks=pytest.mark.full)])
def test_a_folder_that_cannot_be_written_is_told_by_the_systems_own_reason(sound, tmp_path, capsys, commands):
    with fault("L1", "an output folder that cannot be written") as row, unwritable(tmp_path / "sealed") as number:
        reason = os.strerror(number)
        for command in commands:
            row.count += 1
            capsys.readouterr()
            assert main(words(command, Place(sound), tmp_path / "sealed")) == 2, command
            said = capsys.readouterr().err
            assert reason in said, (command, said)
            assert str(tmp_path / "sealed") in said, (command, said)
            assert "lsattr" in said or "ls -ld" in said, (command, said)
            assert "fault of erniekit" not in said, (command, said)
            row.hits += 1
        row.note = f"{reason}, with the folder and what to do"


def test_a_cache_that_cannot_be_written_is_told_by_the_systems_own_reason(sound, tmp_path, capsys, monkeypatch):
    with fault("L1", "a cache that cannot be written") as row, unwritable(tmp_path / "sealed") as number:
        row.count = 1
        monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "sealed"))
        assert main(words("eval", Place(sound), tmp_path / "out")) == 2
        said = capsys.readouterr().err
        assert os.strerror(number) in said
        assert "ERNIEKIT_CACHE" in said
        row.hits = 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENOSPC])
def test_an_error_of_the_system_that_a_user_can_mend_is_three_lines(number):
    told = system_limits.explained(OSError(number, os.strerror(number), "/there/out"))
    assert isinstance(told, ConfigError)
    assert os.strerror(number) in told.what
    assert told.where == "/there/out"
    assert told.fix


@pytest.mark.parametrize("key", ["train_dataset_path", "model_name_or_path", "output_dir", "tokenizer_name"])
@pytest.mark.parametrize("length", [300, 5000])
def test_a_text_that_is_too_long_for_a_path_is_three_lines(key, length, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"src": ["one"], "tgt": ["two"]}\n')
    make_tiny_model(tmp_path / "model")
    keys = dict(model_name_or_path="model", train_dataset_path="rows.jsonl", output_dir="out", device="cpu")
    assert main(["train", *(f"{name}={value}" for name, value in {**keys, key: "x" * length}.items())]) == 2
    what, where, fix = capsys.readouterr().err.splitlines()[-3:]
    assert what.startswith(f"error: {os.strerror(errno.ENAMETOOLONG)}: a path of ")
    assert len(where) < 100
    assert fix.startswith("fix: ")


def test_any_other_error_of_the_system_stays_a_fault_of_ours():
    assert system_limits.explained(OSError(errno.EINVAL, "Invalid argument", "x")) is None
