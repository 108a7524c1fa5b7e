"""What the tests of ironhorse.jit share: whether NVRTC is here, a stand-in for the GPU. conftest.py has fixtures."""

from __future__ import annotations

import pytest
from ironhorse import jit
from ironhorse.errors import NotAvailableError
from ironhorse.jit import _op, _torch
from jit_cases import Stand

ARCH = "sm_90a"
F32 = "__global__ void f(float* x) { x[0] = 1; }"


def can_compile() -> bool:
    try:
        jit.compile(F32, arch=ARCH)
    except NotAvailableError:
        return False
    return True


compiles = pytest.mark.skipif(not can_compile(), reason="NVRTC is not here")


def stand_for_gpu(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """A stand-in for the GPU; torch's CUDA implementations run on tensors of the CPU."""
    stand, define = Stand(), _torch._define
    monkeypatch.setattr(jit.Kernel, "on", lambda kernel, device=0: stand.on(kernel, device))
    monkeypatch.setattr(_op, "cuda_available", lambda: True)
    monkeypatch.setattr(_torch, "_define", lambda *a: define(*a[:4], a[3], a[5]))  # CUDA's for the CPU
    return stand
