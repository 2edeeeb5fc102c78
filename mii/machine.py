"""What this machine has to offer: cores, memory, GPUs. Found out without torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total",
    "--format=csv,noheader,nounits",
)
_NVIDIA_SMI_SECONDS = 20.0  # the first call after boot may load the driver
_FAST_BF16_FLAGS = frozenset(("amx_bf16", "avx512_bf16"))


@dataclass(frozen=True)
class GPU:
    """One NVIDIA GPU that this process may use."""

    device: str  # as CUDA_VISIBLE_DEVICES names it
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """The part of a machine that is ours: affinity, containers and CUDA_VISIBLE_DEVICES count."""

    cores: int
    memory_bytes: int  # that new processes can take, without swapping
    fast_bfloat16: bool  # the CPU multiplies matrices of bfloat16 in hardware
    gpus: tuple[GPU, ...] = ()
    no_gpu_reason: str = "there is no NVIDIA GPU"  # why gpus is empty, if it is

    @staticmethod
    def here(environment: Mapping[str, str] = os.environ) -> Machine:
        """Look at this machine."""
        gpus, reason = _gpus(environment)
        return Machine(_cores(), _memory(), _fast_bfloat16(), gpus, reason)


def _cores() -> int:
    """Return the cores that this process may use, by affinity and by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _numbers("/sys/fs/cgroup/cpu.max")  # microseconds of each period; period
    if len(quota) < 2:
        quota = [
            *_numbers("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
            *_numbers("/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
        ]
    allowed = quota[0] // quota[1] if len(quota) == 2 and quota[0] > 0 < quota[1] else cores
    return max(1, min(cores or 1, allowed or 1))


def _memory() -> int:
    """Return the bytes that can still be taken, by the system and by the container's limit."""
    available = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    if not available:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit = _numbers(f"/sys/fs/cgroup/{limit_file}")
        usage = _numbers(f"/sys/fs/cgroup/{usage_file}")
        if limit and usage:
            available = min(available, max(0, limit[0] - usage[0]))
    return available


def _fast_bfloat16() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return not _FAST_BF16_FLAGS.isdisjoint(flags.split())


def _gpus(environment: Mapping[str, str]) -> tuple[tuple[GPU, ...], str]:
    """Return the GPUs, and the reason if there are none."""
    with contextlib.suppress(PackageNotFoundError):
        if version("torch").endswith("+cpu"):
            return (), "the installed torch is built for CPUs only"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "none", "void"):
        return (), f"CUDA_VISIBLE_DEVICES is {visible!r}"
    try:
        answer = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return (), "there is no NVIDIA GPU (nvidia-smi does not answer)"
    gpus = visible_gpus(answer, visible)
    return gpus, "" if gpus else f"no GPU is named by CUDA_VISIBLE_DEVICES={visible!r}"


def visible_gpus(listing: str, visible: str | None) -> tuple[GPU, ...]:
    """Return the GPUs of nvidia-smi's listing that CUDA_VISIBLE_DEVICES leaves to us.

    As in CUDA, a name that means no device hides all that come after it.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    found = {row[0]: row for row in rows if len(row) == 4 and row[3].isdigit()}
    if visible is None:
        # By UUID: numbers mean different things to nvidia-smi and to CUDA.
        return tuple(GPU(row[1], row[2], int(row[3]) << 20) for row in found.values())
    gpus = []
    for device in (name.strip() for name in visible.split(",")):
        row = found.get(device) or next(
            (r for r in found.values() if device.startswith("GPU-") and r[1].startswith(device)),
            None,
        )
        if device.startswith("MIG-"):  # a part of a GPU, of unknown size
            row = next(iter(found.values()), None)
        if row is None:
            break
        gpus.append(GPU(device, row[2], int(row[3]) << 20))
    return tuple(gpus)


def _numbers(path: str) -> list[int]:
    """Return the numbers in a small file; "max" and a file that is not there give none."""
    try:
        return [int(word) for word in Path(path).read_text().split()]
    except (OSError, ValueError):
        return []
