"""CPU seconds and memory of a process tree, and how busy the whole machine is, from /proc (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def process_tree(pid: int) -> list[int]:
    """`pid` and all that descend from it, as far as they live now."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [pid]
    for member in tree:  # grows while it is walked
        tree += children.get(member, [])
    return tree


def cpu_s(pids: list[int]) -> float:
    """utime + stime of these processes, threads that have ended included."""
    stats = [fields for pid in pids if (fields := _stat(pid))]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS_PER_S


def rss_mb(pids: list[int]) -> float:
    """Resident memory; pages that processes share count in each."""
    kib = 0
    for pid in pids:
        for line in _lines(_PROC / str(pid) / "status"):
            if line.startswith("VmRSS:"):
                kib += int(line.split()[1])
    return kib * 1024 / 1e6


def machine_busy_s() -> float:
    """CPU seconds that all processors together have spent on work since boot."""
    user, nice, system, _, _, irq, softirq, steal = map(int, _lines(_PROC / "stat")[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def machine_name() -> str:
    names = [
        line.split(":", 1)[1].strip()
        for line in _lines(_PROC / "cpuinfo")
        if line.startswith("model name")
    ]
    uname = os.uname()
    return f"{len(names)} x {names[0] if names else uname.machine}, {uname.sysname} {uname.release}"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; [] when the process is gone."""
    return "".join(_lines(_PROC / str(pid) / "stat")).rpartition(")")[2].split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
