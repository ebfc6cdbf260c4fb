"""Ctrl-C while modules are imported: it waits for the import's end, whatever the import does with exceptions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.first_interrupt import is_the_command

# As numpy's C code does: what is raised within is dropped.
DROPS = """
import pathlib, sys, time
print("importing", flush=True)
try:
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
except BaseException:
    print("dropped", flush=True)
print("imported", flush=True)
"""
PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[2])
from erniekit.cli.interrupts import interrupts_wait_for_imports
interrupts_wait_for_imports()
try:
    import drops
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


def importing(tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "drops.py").write_text(DROPS)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path / "go", tmp_path],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    return process


def test_a_ctrl_c_within_an_import_stops_the_process_behind_it(tmp_path: Path) -> None:
    process = importing(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline() == "\n"
    assert "stopping as soon as modules are imported" in process.stderr.readline()
    (tmp_path / "go").touch()
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("imported\ninterrupted\n", 130)


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    process = importing(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 130)


def test_ignored_interrupts_stay_ignored() -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from erniekit.cli.interrupts import interrupts_wait_for_imports as wait; wait()\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# A Ctrl-C as soon as the module that is named is looked for.
EARLY = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{name}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("name", ["erniekit.version", "erniekit.cli.main", "erniekit.cli.system_limits"])
@pytest.mark.parametrize("form", ["module", "script"])
def test_a_ctrl_c_while_the_command_itself_is_imported_ends_it_with_one_line(
    name: str, form: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(EARLY.format(name=name))
    script = tmp_path / "erniekit"
    script.write_text("import sys\nfrom erniekit.cli.main import main\nsys.exit(main())\n")
    words = ["-m", "erniekit"] if form == "module" else [script]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *words, "version"], capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_another_program_that_imports_the_package_keeps_its_ctrl_c() -> None:
    code = "import signal, erniekit.cli.main; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert not is_the_command("/usr/bin/pytest", ["python", "/usr/bin/pytest", "erniekit"])
    assert not is_the_command("-m", ["python", "-m", "erniekit.cli.launch_rank"])
    assert is_the_command("-m", ["python", "-X", "dev", "-m", "erniekit", "train"])
