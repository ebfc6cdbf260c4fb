"""A command line -> the run it starts: by paddle.distributed.launch, a plain script, erniekit or paddleformers-cli.

Called by runs.py for every command of a script; commands that start no run are none of these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from erniekit.config.migrate.shell import ShellWord

LAUNCHERS = ("paddle.distributed.launch", "paddle.distributed.run", "paddle.distributed.fleet.launch")
COMMANDS = ("train", "eval", "export", "split", "server", "chat")
BEFORE = ("nohup", "exec", "time", "sudo", "env", "bash -c")
# Script -> the stage it trains. The longest that fits counts; a script of another name is taken for SFT, with a remark.
SCRIPTS = {
    "sft/train.py": "SFT",
    "dpo/dpo_train.py": "DPO",
    "vl_sft/train.py": "VL-SFT",
    "run_finetune.py": "SFT",
    "run_pretrain.py": "PT",
    "pretrain.py": "PT",
}
# Launcher options that set which processes start where; the launch line has them.
PLACES = {
    "gpus": "devices", "npus": "devices", "xpus": "devices", "devices": "devices", "nnodes": "nnodes",
    "nproc_per_node": "nproc_per_node", "master": "master", "rank": "rank", "ips": "ips", "log_dir": "log_dir",
}  # fmt: skip
OTHERS = {
    "hosts": "the machines find each other at master",
    "host": "the machines find each other at master",
    "job_id": "one launch at a time meets at master",
    "run_mode": "all ranks are the same",
    "log_level": "ranks log into log_dir",
    "max_restart": "max_restarts sets how often a crashed run starts again (3)",
    "elastic_level": "max_restarts sets how often a crashed run starts again (3)",
    "elastic_timeout": "join_timeout_s is the wait for the other machines",
    "start_port": "ports are found by themselves",
}


@dataclass
class Launch:
    """One run as a script starts it."""

    line: int
    command: str = "train"
    program: str = ""  # the script, where one is started
    stage: str = ""  # that the script trains
    words: list[ShellWord] = field(default_factory=list)  # behind it
    options: dict[str, ShellWord] = field(default_factory=dict)  # of PLACES, by our name
    device_flag: str = "gpus"  # the flag the launcher had for them
    dropped: list[tuple[str, ShellWord, str]] = field(default_factory=list)  # option, value, why
    by_paddle: bool = False


def launch_of(words: list[ShellWord]) -> Launch | None:
    """The run that a command starts; None for any other command."""
    while words and (words[0].text in BEFORE):
        words = words[1:]
    if not words:
        return None
    program, line = words[0].text.rpartition("/")[2], words[0].line
    if program in ("erniekit", "paddleformers-cli"):
        if len(words) < 2 or words[1].text not in COMMANDS:
            return None
        return Launch(line, words[1].text, words=words[2:])
    if not re.fullmatch(r"python[\d.]*", program):
        return None
    rest = words[1:]
    while rest and rest[0].text in ("-u", "-B", "-O", "-W"):
        rest = rest[1:]
    launch = Launch(line)
    if len(rest) > 1 and rest[0].text == "-m":
        if rest[1].text not in LAUNCHERS:
            return None
        launch.by_paddle = True
        rest = _options(rest[2:], launch)
    if not rest or not rest[0].text.endswith(".py"):
        return None
    launch.program, launch.words = rest[0].text, rest[1:]
    launch.stage = next((SCRIPTS[end] for end in sorted(SCRIPTS, key=len)[::-1] if _ends(launch.program, end)), "")
    known = bool(launch.stage) or launch.by_paddle
    return launch if known else None


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith("/" + end)


def _options(words: list[ShellWord], launch: Launch) -> list[ShellWord]:
    """Takes the launcher's own options; what is left begins with the script."""
    while words and words[0].text.startswith("-"):
        name, equals, text = words[0].text.lstrip("-").partition("=")
        value = ShellWord(text, words[0].line, words[0].open)
        words = words[1:]
        if not equals and words and not words[0].text.startswith("-") and not words[0].text.endswith(".py"):
            value, words = words[0], words[1:]
        name = name.replace("-", "_")
        if name in PLACES:
            launch.options[PLACES[name]] = value
            if PLACES[name] == "devices":
                launch.device_flag = name
        else:
            launch.dropped.append((name, value, OTHERS.get(name, "an option of Paddle's launcher")))
    return words
