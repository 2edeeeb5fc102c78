"""Kernels that start while the kernel before them still runs (programmatic dependent launch).

A decode step is a chain of kernels of a few microseconds; without this, memory stands still between
the end of one and the first loads of the next. A kernel that is launched early may, before it
waits, do only what no earlier kernel has a part in: read weights. `wait_for_earlier` returns when
the kernel before has ended, and so, as that one waited too, all before it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Let the next kernel's programs take what room these leave."""
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr):
    """Wait until all that earlier kernels wrote can be read, and what they read overwritten."""
    if EARLY:
        cuda.gdc_wait()


@cache
def can_launch_early(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch: NVIDIA's Hopper and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(early: bool) -> dict[str, Any]:
    """Return the keyword arguments of a launch of a kernel with the parameter EARLY."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
