"""A script in a process of its own, which has imported nothing yet; and the memory of a process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def memory_in_mib(process: int | str = "self") -> int:
    """That a process holds now; 0 where the system does not say."""
    file = Path(f"/proc/{process}/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20 if file.exists() else 0
