"""Available memory, of this machine and of folders that look like a container's."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.devices import cpu, pick
from erniekit.host_memory import available_memory, total_memory

GIB = 1 << 30


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    texts = {
        "proc/meminfo": "MemTotal: 99 kB\nMemFree: 1024 kB\nMemAvailable: 16777216 kB\n",
        "proc/self/cgroup": groups,
    }
    for name, text in {**texts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_files_kept_in_memory_count_as_available(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, "", {})) == 16 * GIB


@pytest.mark.parametrize("path", ["/", "/pod/one"])
def test_a_containers_limit_counts_whether_or_not_its_group_is_seen_by_name(path: str, tmp_path: Path) -> None:
    limit = {
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{5 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon {3 * GIB}\ninactive_file {2 * GIB}\n",
    }
    root = machine(tmp_path, f"0::{path}\n", limit)
    assert available_memory(root) == 5 * GIB
    assert total_memory(root) == min(8 * GIB, total_memory(tmp_path / "absent"))


def test_the_narrowest_of_the_groups_around_a_process_counts(tmp_path: Path) -> None:
    v1 = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB // 2),
    }
    assert available_memory(machine(tmp_path, "5:cpu:/job\n4:memory:/job\n0::/\n", v1)) == GIB
    assert (
        available_memory(machine(tmp_path, "4:memory:/job\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9"})) == 0
    )


def test_a_group_without_a_limit_limits_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"})
    assert available_memory(root) == 16 * GIB
    assert total_memory(root) == total_memory(tmp_path / "absent")


def test_controllers_of_one_group_and_names_that_are_not_utf_8_are_read(tmp_path: Path) -> None:
    limit = {f"sys/fs/cgroup/cpu,memory/memory.{name}": str(GIB) for name in ("limit_in_bytes", "usage_in_bytes")}
    root = machine(tmp_path, "4:cpu,memory:/\n", limit)
    assert available_memory(root) == 0
    (root / "proc/self/cgroup").write_bytes(b"0::/user-\xff\n")
    assert available_memory(root) == 16 * GIB


def test_nothing_available_is_not_the_same_as_not_saying(tmp_path: Path) -> None:
    root = machine(tmp_path, "", {})
    (root / "proc/meminfo").write_text("MemAvailable: 0 kB\n")
    assert available_memory(root) == 0


def test_a_system_that_does_not_say_has_half_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_memory(tmp_path) is None
    monkeypatch.setattr(cpu, "available_memory", lambda: None)
    free, total = pick("cpu").free_memory()
    assert free == total // 2 > 0


def test_a_host_has_at_least_what_it_says_is_available() -> None:
    free, total = pick("cpu").free_memory()
    assert 0 < free <= total == total_memory()
