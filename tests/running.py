"""Which processes there are, for the tests that end some, and whether this system can have copies for audits."""

import platform
from pathlib import Path

import pytest

_ACTIONS = Path("/proc/sys/kernel/seccomp/actions_avail")

# by what the system says, not by the code under test, which could switch its own tests off
NEEDS_COPIES = pytest.mark.skipif(
    platform.machine() != "x86_64" or not _ACTIONS.exists() or "trap" not in _ACTIONS.read_text(),
    reason="needs Linux on x86_64 with filters of system calls",
)


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended; one that nobody has waited for is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
