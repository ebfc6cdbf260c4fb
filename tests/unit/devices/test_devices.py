"""Which device a word means, and a kind of device that is added by one file and one registration."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from erniekit import capabilities, devices
from erniekit.bench.measure import Gauge
from erniekit.demo import tiny
from erniekit.devices import DEVICES, DeviceEntry, entry_of, others, pick, probes
from erniekit.devices.base import Device
from erniekit.devices.cuda import SHARED_CARD, CudaDevice
from erniekit.errors import DeviceError
from erniekit.train.step import DeviceClock, Launched, StepResult
from support import toy_device

TESTS = Path(toy_device.__file__).parent
TOY = {"PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "ERNIEKIT_DEVICES": "toy=toy_device"}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(devices, "DEVICES", {"toy": DeviceEntry(toy_device.__name__, "TOY_VISIBLE"), **DEVICES})
    return "toy"


def train(output: Path, models: Path, device: str, *more: str, **env: str) -> str:
    """What a run as typed said."""
    keys = dict(
        model_name_or_path=models / "tiny", train_dataset_path=tiny.TRAIN, output_dir=output,
        fine_tuning="Full", max_seq_len=128, max_steps=3, gradient_accumulation_steps=2, learning_rate=1e-3,
        cache_dir=models / "cache", unified_checkpoint_config="async_save", save_steps=2, doctor="off",
        logging_steps=1, device=device, report_to="none", dataset_num_proc=1, log_dir=output / "ranks",
    )  # fmt: skip
    command = [sys.executable, "-m", "erniekit", "train", *(f"{key}={value}" for key, value in keys.items()), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def records(output: Path) -> list[dict[str, float]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def same_numbers(one: Path, other: Path) -> bool:
    names = ("loss", "grad_norm", "learning_rate")
    return [[r.get(n) for n in names] for r in records(one)] == [[r.get(n) for n in names] for r in records(other)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.make_tiny_model(folder / "tiny", family="llama")
    return folder


def test_a_device_of_another_package_trains_as_the_cpu_does(models: Path, tmp_path: Path) -> None:
    train(tmp_path / "cpu", models, "cpu")
    said = train(tmp_path / "toy", models, "toy", **TOY, TOY_CALLS=str(tmp_path / "calls"))
    assert "Toy" in said
    assert "bf16 is slow on Toy" in said
    assert len(records(tmp_path / "toy")) == 3
    assert same_numbers(tmp_path / "toy", tmp_path / "cpu")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("toy", "cpu")]
    assert weights[0] == weights[1]
    last = records(tmp_path / "toy")[-1]
    assert (last["current_memory_allocated"], last["max_memory_reserved"]) == (2.0, 5.0)
    assert "current_memory_allocated" not in records(tmp_path / "cpu")[-1]
    calls = (tmp_path / "calls").read_text().split("\n")
    assert {"reset_peak", "stream", "on_stream", "wait_stream", "record_stream", "synchronise"} <= set(calls)
    assert calls.count("stream") == 1, "one stream for the copies of all steps"


@pytest.mark.full
def test_two_ranks_on_a_device_of_another_package_meet_over_its_backend(models: Path, tmp_path: Path) -> None:
    ranks = ("nproc_per_node=2", "straggler_factor=0")  # whose probe is a product for a card
    train(tmp_path / "cpu", models, "cpu", *ranks)
    train(tmp_path / "toy", models, "toy", *ranks, **TOY, TOY_CALLS=str(tmp_path / "calls"))
    assert same_numbers(tmp_path / "toy", tmp_path / "cpu")
    assert {"bind 0", "bind 1"} <= set((tmp_path / "calls").read_text().split("\n"))


def test_auto_takes_the_first_that_is_present_and_else_the_cpu(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick("auto").name == "Toy"
    assert pick("auto", no_cuda=True).vendor == "cpu"
    monkeypatch.setenv("TOY_ABSENT", "1")
    assert pick("auto").vendor == ("nvidia" if torch.cuda.is_available() else "cpu")


def test_a_device_that_is_absent_is_refused_with_a_way_out(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_ABSENT", "1")
    with pytest.raises(DeviceError, match="'toy' was asked for") as error:
        pick(toy)
    assert "device=cpu" in (error.value.fix or "")
    for word, fix in (("npu", "npu-smi"), ("iluvatar_gpu", "ixsmi"), ("musa", "mthreads-gmi"), ("mps", "macOS")):
        with pytest.raises(DeviceError, match=f"'{word}' was asked for") as error:
            pick(word)
        assert fix in (error.value.fix or "")
    with pytest.raises(DeviceError, match=r"neither Kunlunxin's .*nor Intel's"):
        pick("xpu")


def test_the_variable_names_modules_and_what_is_wrong_with_it_is_said_on_use() -> None:
    assert others("") == {}
    found = others("toy=my.toy:TOY_VISIBLE, other=some.where,")
    assert found == {"toy": DeviceEntry("my.toy", "TOY_VISIBLE"), "other": DeviceEntry("some.where")}
    with pytest.raises(DeviceError, match="no device can be read from 'nowhere'"):
        others("nowhere")["nowhere"].load()


def test_visible_devices_are_counted_by_each_kinds_own_variable(toy: str) -> None:
    env = {"TOY_VISIBLE": "0,1", "CUDA_VISIBLE_DEVICES": "0"}
    assert entry_of("toy", env).count_visible(env) == 2
    assert entry_of("gpu", env).count_visible(env) == 1
    assert entry_of("auto", env).module == toy_device.__name__
    assert entry_of("auto", {"CUDA_VISIBLE_DEVICES": "0"}).visible == "CUDA_VISIBLE_DEVICES"


def test_a_late_result_arrives_by_the_devices_own_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_CALLS", str(tmp_path / "calls"))
    clock = DeviceClock(toy_device.make())
    clock.start()
    told = torch.tensor([1.0, 2.0])
    step = Launched(told, torch.ones(()), lambda v: StepResult(1, v[0], v[1], 1e-3, 1, 1, 1, True), clock)
    step.send()
    result = step.result()
    assert (result.loss, result.grad_norm) == (1.0, 2.0)
    assert (tmp_path / "calls").read_text().split() == ["record", "synchronize", "record", "synchronize"]


def test_steps_are_timed_and_memory_is_read_by_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = Gauge(toy_device.make())
    seconds, told = gauge.time_steps(lambda number: number, 5, 3)
    assert told == [5, 6, 7]
    assert all(0 <= each < 1 for each in seconds)
    assert (gauge.held(), gauge.peak()) == (toy_device.make().allocated(), toy_device.make().peak_allocated())
    seconds, _ = Gauge(pick("cpu")).time_steps(lambda number: sum(range(10_000)), 0, 2)
    assert all(each > 0 for each in seconds)


def test_a_cache_may_take_what_the_share_of_all_memory_leaves() -> None:
    made = toy_device.make()
    free, total = made.free_memory()
    assert made.usable_memory(0.9) == int(free - 0.1 * total)
    assert made.usable_memory(0.1) == 0, "others use more than the share already"
    assert 0 < pick("cpu").usable_memory(0.9) <= pick("cpu").free_memory()[1]


def test_every_word_of_the_seeds_and_of_their_scripts_names_a_vendor() -> None:
    vendors = {"gpu": "cuda", "iluvatar_gpu": "iluvatar", "npu": "ascend", "xpu": "kunlunxin", "metax_gpu": "metax"}
    for word, module in vendors.items():
        assert DEVICES[word].module == f"erniekit.devices.{module}"
    exported = {"PADDLE_XCCL_BACKEND": "iluvatar_gpu"}
    assert devices.named("auto", exported) == "iluvatar_gpu"
    assert devices.named("auto", {**exported, "ERNIEKIT_DEVICE": "npu:0"}) == "npu"
    assert devices.named("cpu", exported) == "cpu", "what was typed is what counts"
    assert devices.named("auto", {"PADDLE_XCCL_BACKEND": "mlu"}) == "auto"


def test_our_variable_names_a_device_that_exists_and_may_name_one_of_several() -> None:
    with pytest.raises(DeviceError, match="'npuu' is not a device") as refused:
        devices.named("auto", {"ERNIEKIT_DEVICE": "npuu:0"})
    assert "ascend" in refused.value.fix
    with pytest.raises(DeviceError, match="'cuda' is not a device") as refused:
        devices.named("auto", {"ERNIEKIT_DEVICE": "cuda:0"})
    assert refused.value.fix == "did you mean gpu:0?", "here the index may stay"
    assert devices.named("cpu", {"ERNIEKIT_DEVICE": "npuu"}) == "cpu", "what was typed is what counts"
    assert devices.named_one("auto", {"ERNIEKIT_DEVICE": "npu"}) == ()
    assert devices.named_one("auto", {"ERNIEKIT_DEVICE": "npu:1"}) == ("1",)
    assert devices.named_one("npu", {"ERNIEKIT_DEVICE": "npu:1"}) == ()
    visible = {"ERNIEKIT_DEVICE": "npu:1", "ASCEND_RT_VISIBLE_DEVICES": "4, 6"}
    assert devices.named_one("auto", visible) == ("6",), "of those that a scheduler has left visible"
    for wrong in ("npu:2", "npu:", "npu:-1"):
        with pytest.raises(DeviceError):
            devices.named_one("auto", {**visible, "ERNIEKIT_DEVICE": wrong})


def test_visible_devices_reach_the_ranks_in_the_words_each_runtime_reads() -> None:
    npu = entry_of("npu", {})
    # torch_npu stops reading at the first character that is no digit and no comma.
    assert npu.show({"ASCEND_RT_VISIBLE_DEVICES": "0, 1, 2"}) == {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2"}
    assert npu.show({}, ("4", "5")) == {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}
    assert npu.show({}) == {}
    kunlunxin = entry_of("kunlunxin", {})
    both = {"XPU_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}
    assert kunlunxin.show(both, ("1", "2")) == {"XPU_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "1,2"}
    assert kunlunxin.count_visible({"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 3
    assert entry_of("auto", {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}).visible in (
        "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES",  # the second where this machine has NVIDIA's files
    )  # fmt: skip


def test_every_vendors_file_loads_and_answers_where_its_device_is_not() -> None:
    """Without its driver and package: no traceback, a finding with a fix."""
    for word, entry in DEVICES.items():
        module = entry.load()
        assert module.EVIDENCE, word
        if not module.present() and word not in devices.FAMILIES:
            assert module.count() == 0 or word in ("cpu", "nvidia"), word
            bad = [finding for finding in module.findings() if not finding.ok]
            assert word == "generic" or any(finding.fix for finding in bad), word


def test_a_file_of_the_tree_is_not_said_to_be_named_by_a_variable() -> None:
    mine = DeviceEntry("erniekit.devices.mychip", "MYCHIP_VISIBLE_DEVICES")
    assert mine.origin == "erniekit.devices.mychip, which does not say whether it ran on real hardware"
    assert others("toy=toy_device")["toy"].origin == "toy_device, named by ERNIEKIT_DEVICES"
    assert DeviceEntry("far", package="chips 1.0").origin == "far, of the installed package chips 1.0"
    with pytest.raises(DeviceError) as caught:
        mine.load()
    assert caught.value.where == "DEVICES"


def test_the_page_on_devices_names_every_member_of_the_base_class(root: Path) -> None:
    page = (root / "docs" / "adding-a-device.md").read_text(encoding="utf-8")
    members = [name for name in (*Device.__annotations__, *vars(Device)) if not name.startswith("_")]
    assert len(members) > 40
    assert [name for name in dict.fromkeys(members) if not re.search(rf"`{name}(\(.*?\))?`", page)] == []
    for name in ("wait_stream(other)", "wait_event(event)", "EVIDENCE", "WHEN_ABSENT", "findings()"):
        assert f"`{name}`" in page


def test_the_vendor_of_a_cuda_card_is_read_from_the_build_and_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.devices import cuda_family

    names = {
        "NVIDIA H200": "nvidia", "Iluvatar BI-V150": "iluvatar", "IX BI-V100": "iluvatar", "MetaX C500": "metax",
        "P800 OAM": "kunlunxin", "": "nvidia",
    }  # fmt: skip
    for name, vendor in names.items():
        monkeypatch.setattr(cuda_family, "_name", lambda name=name: name.lower())
        assert cuda_family.maker() == vendor, name
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert cuda_family.maker() == "amd"
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch, "corex", True, raising=False)
    assert cuda_family.maker() == "iluvatar"


def test_a_capability_that_is_left_out_by_hand_is_not_tried(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_known", {})
    monkeypatch.setattr(toy_device.ToyDevice, "fast_bf16", True)
    monkeypatch.setenv("ERNIEKIT_WITHOUT", "bf16, graphs")
    device = pick("toy")
    assert device.lacks["bf16"] == "left out by ERNIEKIT_WITHOUT"
    assert not device.fast_bf16
    assert toy_device.ToyDevice.fast_bf16, "the kind's claim stands; this device is without"
    monkeypatch.setattr(probes, "_known", {})
    monkeypatch.setenv("ERNIEKIT_WITHOUT", "tritn")
    with pytest.raises(DeviceError, match="no capability is called tritn"):
        pick("toy")
    capabilities.set_lacks({})


def test_a_card_that_ranks_share_has_a_part_of_its_memory_and_is_another_host_to_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", *SHARED_CARD):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    hosts = set()
    for rank in range(2):
        device = CudaDevice("card", "cuda", 80).share(rank, 2)
        assert device.total_memory == 40
        hosts.add(os.environ.pop("NCCL_HOSTID"))
    assert len(hosts) == 2
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    CudaDevice("card", "cuda", 80).share(0, 2)
    assert os.environ["NCCL_MAX_CTAS"] == "8", "what the user has set stays"
    monkeypatch.delenv("NCCL_HOSTID")
