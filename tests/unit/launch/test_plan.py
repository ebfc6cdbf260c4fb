"""What is started where: flags, environment and visible devices -> processes, machines, meeting point."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.config import load
from erniekit.devices import entry_of
from erniekit.errors import ConfigError, DeviceError
from erniekit.launch.plan import (
    LaunchPlan,
    choose_devices,
    inside,
    launch_name,
    needed,
    plan,
)


def planned(words: str = "", **env: str) -> LaunchPlan:
    return plan(load(["device=cpu", *shlex.split(words)]), env)


def test_one_cpu_and_one_machine_need_no_launcher() -> None:
    launch = planned()
    assert (launch.nproc, launch.nnodes, launch.world) == (1, 1, 1)
    assert not needed(launch, load([]))


def test_more_processes_or_machines_need_one() -> None:
    assert needed(planned("nproc_per_node=2"), load([]))
    assert needed(planned(NNODES="2", MASTER_ADDR="10.0.0.1"), load([]))


def test_one_process_is_watched_over_when_restarts_are_asked_for() -> None:
    asked, refused = "max_restarts=2", "max_restarts=0"
    assert needed(planned(asked), load([asked]))
    assert not needed(planned(refused), load([refused]))


def test_the_environment_names_machines_and_meeting_point() -> None:
    launch = planned("nproc_per_node=8", NNODES="2", MASTER_ADDR="10.0.0.1", RANK="1", ERNIEKIT_DIST_LOG="logs")
    assert (launch.nnodes, launch.node_rank, launch.world) == (2, 1, 16)
    assert (launch.address, launch.port) == ("10.0.0.1", 8080)
    assert launch.log_dir == Path("logs")
    assert planned(NNODES="2", MASTER_ADDR="a", MASTER_PORT="99").port == 99


def test_the_launcher_knows_where_checkpoints_are() -> None:
    """To say from which one a run goes on, on the machines whose disk has it."""
    assert (planned().output, planned().saves_on_each_node) == (Path("output"), False)
    launch = planned("output_dir=here save_on_each_node=True")
    assert (launch.output, launch.saves_on_each_node) == (Path("here"), True)


def test_without_a_number_the_machines_are_numbered_on_arrival() -> None:
    assert planned(NNODES="3", MASTER_ADDR="a").node_rank is None
    assert planned(NNODES="3", MASTER_ADDR="a", NODE_RANK="2", RANK="0").node_rank == 2


def test_flags_win_over_the_environment() -> None:
    env = dict(NNODES="4", MASTER_ADDR="b", MASTER_PORT="1", RANK="3", ERNIEKIT_DIST_LOG="b")
    launch = planned("--nnodes 2 --rank 0 --master a:8021 --log_dir a --nproc_per_node 3", **env)
    assert (launch.nnodes, launch.node_rank, launch.address, launch.port) == (2, 0, "a", 8021)
    assert (launch.log_dir, launch.nproc) == (Path("a"), 3)


def test_on_one_machine_a_stray_rank_is_no_matter_and_the_port_is_free_unless_named() -> None:
    launch = planned(RANK="3", WORLD_SIZE="8", MASTER_ADDR="elsewhere")
    assert (launch.address, launch.port, launch.node_rank) == ("127.0.0.1", 0, None)
    named = planned(MASTER_PORT="8123")
    assert (named.address, named.port, named.node_rank) == ("127.0.0.1", 8123, 0)


@pytest.mark.parametrize(
    ("words", "env", "what"),
    [
        ("--nnodes 2", {}, "a rendezvous address"),
        ("--nnodes 2 --rank 2 --master a:1", {}, "no such number"),
        ("--rank 1", {}, "no such number"),
        ("--nnodes 2 --master a:port", {}, "not a port"),
        ("", {"NNODES": "two"}, "NNODES is 'two'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(words: str, env: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        planned(words, **env)


# The launcher words of the seed documents' scripts, variables filled in.
SEEDS = {
    "000": "--log_dir L --gpus 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15 --device iluvatar_gpu",
    "001": "--log_dir L --gpus 0,1,2,3,4,5,6,7 --master 10.1.15.172:8021 --nproc_per_node 8 --nnodes 2 --rank 1"
    " --device iluvatar_gpu",
    "002": "--log_dir L --npus 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15 --master 141.61.41.162:12123 --nnodes 8"
    " --device npu",
}


def test_the_launcher_words_of_the_seeds_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    worlds = {}
    for seed, words in SEEDS.items():
        cfg = load(shlex.split(words))
        choose_devices(cfg)
        worlds[seed] = entry_of(cfg.train.device, os.environ).count_visible(os.environ)
        assert cfg.launch.log_dir == "L"
    assert worlds == {"000": 16, "001": 8, "002": 16}
    launch = plan(load([*shlex.split(SEEDS["001"]), "device=cpu"]), {})
    assert (launch.world, launch.node_rank, launch.address, launch.port) == (16, 1, "10.1.15.172", 8021)
    launch = plan(load([*shlex.split(SEEDS["002"])]), os.environ)
    assert (launch.world, launch.node_rank, launch.port) == (128, None, 12123)


def test_one_device_of_a_machine_is_named_by_our_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERNIEKIT_DEVICE", "npu:1")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,6")
    choose_devices(load(["train_dataset_path=y"]))
    assert os.environ["ASCEND_RT_VISIBLE_DEVICES"] == "6"


def test_a_script_behind_the_device_list_is_not_a_device() -> None:
    with pytest.raises(ConfigError, match=r"train\.py' is not a device"):
        choose_devices(load(["--gpus", "0,1", "examples/post-training/sft/train.py"]))


def test_visible_devices_are_counted_as_cuda_counts_them() -> None:
    for listed, want in (("0,2,5", 3), ("", 0), ("0,-1,1", 1)):
        env = {"CUDA_VISIBLE_DEVICES": listed}
        assert entry_of("auto", env).count_visible(env) == want
    env = {"XPU_VISIBLE_DEVICES": "0,1"}
    assert entry_of("xpu", env).count_visible(env) == 2


def test_more_processes_than_devices_is_refused() -> None:
    with pytest.raises(DeviceError, match="1 device is visible"):
        plan(load(["nproc_per_node=2"]), {"CUDA_VISIBLE_DEVICES": "0"})


def test_ranks_share_a_device_only_where_that_is_asked_for() -> None:
    one = {"CUDA_VISIBLE_DEVICES": "0"}
    with pytest.raises(DeviceError) as refused:
        plan(load(["nproc_per_node=4"]), one)
    assert "ranks_per_device=4" in str(refused.value.fix)
    assert plan(load(["nproc_per_node=4", "ranks_per_device=4"]), one).nproc == 4
    assert plan(load(["ranks_per_device=2"]), one).nproc == 2
    with pytest.raises(DeviceError, match="1 device is visible here for 2 ranks each"):
        plan(load(["nproc_per_node=4", "ranks_per_device=2"]), one)


def test_a_rank_never_launches_again() -> None:
    assert inside({"TORCHELASTIC_RUN_ID": "x"})
    assert inside({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert not inside({"RANK": "1", "WORLD_SIZE": "2"})  # a cluster's number of this machine
    assert not inside({})


def test_planning_imports_no_torch_on_one_device(root: Path) -> None:
    code = (
        "import sys; from erniekit.launch.plan import plan, needed; from erniekit.config import load;"
        "cfg = load([]); assert not needed(plan(cfg, {'CUDA_VISIBLE_DEVICES': '0'}), cfg);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_only_what_a_launcher_starts_again_has_a_launch_name() -> None:
    assert launch_name({}) == ""
    assert launch_name({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}) == "", (
        "numbered by hand: nothing restarts it"
    )
    assert launch_name({"ERNIEKIT_LAUNCH": "a1", "TORCHELASTIC_RUN_ID": "none"}) == "a1"
    assert str(os.getppid()) in launch_name({"TORCHELASTIC_RUN_ID": "none"}), "torchrun's id is the same every day"
