"""Help: instant, short, and made from the same declarations the config is."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from erniekit.cli.commands import COMMANDS
from erniekit.cli.help import help_lines
from erniekit.config.flat import IGNORED_KEYS, KEYS
from erniekit.errors import ConfigError
from support.clock import within

PROBE = """
import sys
from erniekit.cli.main import main
code = main({args!r})
heavy = [m for m in ("torch", "numpy", "transformers", "yaml") if m in sys.modules]
sys.exit(f"imported {{heavy}}" if heavy else code)
"""


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["train", "--help", "all"], ["version"]])
def test_help_imports_nothing_heavy(args):
    done = subprocess.run([sys.executable, "-c", PROBE.format(args=args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"]])
def test_help_answers_within_three_tenths_of_a_second(args):
    best = 9.0
    for _ in range(5):  # processor time: what it takes on a free core, whatever else runs on this machine
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "erniekit", *args], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert within(best, 0.3)


def test_every_short_help_fits_a_screen():
    for args in ([], *([name] for name in COMMANDS)):
        lines = help_lines(args)
        assert 1 <= len(lines) <= 40, args
        assert max(map(len, lines)) <= 120, args
        assert not [line for line in lines if line.endswith("...")], args  # no text is cut in the middle


def test_the_overview_names_every_command_and_what_is_to_come():
    text = "\n".join(help_lines([]))
    for name in COMMANDS:
        assert name in text


def test_help_all_names_every_key_and_every_inert_one():
    text = "\n".join(help_lines(["train", "all"]))
    words = set(text.replace(",", " ").split())
    assert set(KEYS) <= words
    assert set(IGNORED_KEYS) <= words


def test_help_on_one_key_says_what_it_takes():
    text = "\n".join(help_lines(["train", "lr_scheduler_type"]))
    assert "cosine" in text
    assert "linear" in text
    assert help_lines(["train", "--lr-scheduler-type"]) == help_lines(["lr_scheduler_type"])
    assert "without effect" in help_lines(["fuse_rope"])[0]
    assert len(help_lines(["train", "optim"])) > 10  # a section


def test_the_short_help_of_train_names_the_main_ways_to_spread_a_run():
    text = "\n".join(help_lines(["train"]))
    for name in ("tensor_parallel_degree", "pipeline_parallel_degree", "sharding"):
        assert f" {name} " in text


def test_help_on_something_unknown_suggests():
    with pytest.raises(ConfigError) as e:
        help_lines(["train", "learning_rat"])
    assert "learning_rate" in e.value.fix


def test_a_key_that_is_called_as_a_section_is_explained_before_it():
    lines = help_lines(["quantize", "quant"])
    assert lines[0] == "quant (quantize)"
    assert any("use_fp8" in line for line in lines), "and the section's keys follow"


@pytest.mark.parametrize("command", ["server", "chat"])
def test_a_command_without_training_says_what_it_computes_in(command):
    short, whole = "\n".join(help_lines([command])), "\n".join(help_lines([command, "compute_type"]))
    for text in (short, whole):
        assert "fp32 on a CPU, as stored on a GPU" in text
        assert "master weights" not in text
    assert "  default  -" in whole.splitlines()
    assert "bf16 with fp32 master weights" in "\n".join(help_lines(["train", "compute_type"]))
