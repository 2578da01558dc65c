"""Which processes there are, for the tests that end some."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended; one that nobody has waited for is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
