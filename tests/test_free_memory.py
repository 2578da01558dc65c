"""How much memory is free: control groups of both versions, nested and in containers."""

from pathlib import Path
from typing import Any

import pytest

from lightning_ort import _memory

MB = 1 << 20
GROUPS = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def make(folder: Path, version: int, limit: Any, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = GROUPS[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"other 5\n{names[2]} {cache}\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes what Linux says of a process."""
    files = {"/proc/meminfo": "MemAvailable: 1048576 kB\n"}
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *a, **k: files.get(str(path)) or read(path, *a, **k))

    def say(version: int, path: str, root: str = "/") -> None:
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
        files["/proc/self/cgroup"] = f"0::{path}\n" if version == 2 else f"4:memory:{path}\n3:cpu:/\n0::/\n"
        files["/proc/self/mountinfo"] = (
            "22 1 0:20 / /proc rw - proc proc rw\n"
            f"35 31 0:32 {root} {tmp_path} rw,relatime shared:9 - {kind} cgroup {options}\n"
        )

    return say


@pytest.mark.parametrize("version", GROUPS)
def test_the_least_of_all_groups_around_the_process_counts(system: Any, tmp_path: Path, version: int) -> None:
    system(version, "/jobs/mine")
    assert _memory.free_bytes() == 1024 * MB
    unlimited = "max" if version == 2 else 9223372036854771712
    make(tmp_path, version, unlimited, 50 * MB)
    make(tmp_path / "other", version, 2 * MB, MB)
    assert _memory.free_bytes() == 1024 * MB
    make(tmp_path / "jobs", version, 300 * MB, 100 * MB)
    assert _memory.free_bytes() == 200 * MB
    make(tmp_path / "jobs" / "mine", version, 150 * MB, 100 * MB, cache=30 * MB)
    assert _memory.free_bytes() == 80 * MB


@pytest.mark.parametrize("version", GROUPS)
@pytest.mark.parametrize(("path", "root"), [("/docker/a", "/docker/a"), ("/../b", "/c"), ("/", "/")])
def test_a_container_may_see_its_own_group_as_the_root(
    system: Any, tmp_path: Path, version: int, path: str, root: str
) -> None:
    system(version, path, root)
    make(tmp_path, version, 300 * MB, 100 * MB)
    assert _memory.free_bytes() == 200 * MB
