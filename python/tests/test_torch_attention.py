"""Attention of ironhorse.torch on a GPU, in the sizes that cuDNN takes: which kernels run, and that they are right."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ironhorse.torch as ops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch_cases import LOW, again, allowed, distance, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# What `Session::open` of crates/cuda/src/cudnn asks for.
has_cudnn = pytest.mark.skipif(
    not torch.backends.cudnn.is_available() or (torch.backends.cudnn.version() or 0) < 91000, reason="no cuDNN 9.10"
)
each_low = pytest.mark.parametrize("dtype", LOW, ids=lambda dtype: str(dtype).removeprefix("torch."))
LAYOUTS = ["heads", "positions", "packed"]


def made(
    layout: str, dtype: torch.dtype, batch: int, heads: tuple[int, int], lengths: tuple[int, int], dim: int
) -> Any:
    """q, k and v: one head after the other, one position after the other, or side by side in the rows of one tensor."""
    generator = torch.Generator("cuda").manual_seed(3)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64, device="cuda").to(dtype)

    counts = (heads[0], heads[1], heads[1])
    sizes = (lengths[0], lengths[1], lengths[1])
    if layout == "packed":
        rows = normal(batch, lengths[0], sum(counts) * dim)
        parts = rows.split([count * dim for count in counts], -1)
        return tuple(x.unflatten(-1, (-1, dim)).transpose(1, 2).requires_grad_() for x in parts)
    if layout == "positions":
        made = (normal(batch, t, n, dim).transpose(1, 2) for n, t in zip(counts, sizes, strict=True))
    else:
        made = (normal(batch, n, t, dim) for n, t in zip(counts, sizes, strict=True))
    return tuple(x.requires_grad_() for x in made)


def torchs(causal: bool) -> Any:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def kernels(call: Any) -> list[str]:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    return [event.name for event in record.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def by_cudnn(arguments: Any, causal: bool = True) -> bool:
    names = kernels(lambda: run(lambda q, k, v: ops.attention(q, k, v, causal), arguments))
    library, own = any("cudnn" in name for name in names), any(name.startswith("flash_") for name in names)
    assert library != own, names
    return library


@each_low
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_values_and_gradients(layout, causal, dtype):
    # As few products as cuDNN is asked for, grouped heads, and lengths that are no multiple of anything.
    for heads, length, dim in [((8, 8), 256, 64), ((8, 1), 384, 128), ((6, 2), 1001, 64), ((12, 12), 333, 32)]:
        arguments = made(layout, dtype, 2, heads, (length, length), dim)
        truth_arguments = again(arguments, torch.float64)
        d_y = torch.randn(2, heads[0], length, dim, device="cuda", generator=torch.Generator("cuda").manual_seed(7)).to(
            dtype
        )
        truth = run(torchs(causal), truth_arguments, d_y.double())
        theirs = run(torchs(causal), again(arguments), d_y)
        for fixed in (False, True):
            torch.use_deterministic_algorithms(fixed)
            try:
                got = run(lambda q, k, v: ops.attention(q, k, v, causal), arguments, d_y)
            finally:
                torch.use_deterministic_algorithms(False)
            for i, (mine, other, true) in enumerate(zip(got, theirs, truth, strict=True)):
                error, most = distance(mine, true), allowed(other, true)
                assert error <= most, f"{heads} {length} {dim} result {i}: {error:.2e}, allowed {most:.2e}"


@has_cudnn
def test_which_kernels_run():
    """What cuDNN does not take, or would take another way, runs by our own kernels."""
    bf16 = torch.bfloat16
    assert by_cudnn(made("heads", bf16, 2, (8, 8), (256, 256), 64))
    assert by_cudnn(made("packed", torch.float16, 2, (8, 2), (256, 256), 128))
    assert by_cudnn(made("positions", bf16, 2, (8, 8), (256, 512), 64), causal=False)
    assert not by_cudnn(made("heads", torch.float32, 2, (8, 8), (256, 256), 64))
    # A small one costs the host less so.
    assert not by_cudnn(made("heads", bf16, 1, (4, 4), (128, 128), 64))
    # With causal, the last query sees all keys.
    assert not by_cudnn(made("heads", bf16, 2, (8, 8), (256, 512), 64))
    # Addresses that are no multiples of 16 bytes.
    whole = torch.randn(3, 2 * 8 * 256 * 64 + 8, device="cuda").to(bf16)
    assert not by_cudnn(tuple(x[1:-7].view(2, 8, 256, 64).requires_grad_() for x in whole))
    # One head for all: elements of several heads at one address. The backward works on copies.
    q, k, v = made("heads", bf16, 2, (8, 1), (256, 256), 64)
    with torch.no_grad():
        names = kernels(lambda: ops.attention(q, k.expand(2, 8, 256, 64), v.expand(2, 8, 256, 64)))
    assert not any("cudnn" in name for name in names), names


@has_cudnn
def test_the_process_has_one_cudnn():
    run(ops.attention, made("heads", torch.bfloat16, 2, (8, 8), (256, 256), 64))
    torch.cuda.synchronize()
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudnn.so" in line}
    assert len(paths) == 1, paths


@each_low
def test_fixed_order_repeats_its_bits(dtype):
    arguments = made("heads", dtype, 2, (8, 4), (1024, 1024), 64)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (run(ops.attention, arguments) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("wanted", range(3))
def test_only_some_gradients(wanted):
    arguments = made("positions", torch.bfloat16, 2, (8, 2), (256, 256), 64)
    torch.use_deterministic_algorithms(True)
    try:
        all_of_them = run(ops.attention, arguments)
        for i, x in enumerate(arguments):
            x.requires_grad_(i == wanted)
        one = run(ops.attention, arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(one[0], all_of_them[0])
    assert distance(one[1], all_of_them[1 + wanted]) < torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("length", [896, 2048])
def test_the_first_call_may_be_recorded(length):
    """A shape that no call had before, recorded into a CUDA graph and replayed on other values."""
    arguments = made("heads", torch.bfloat16, 2, (3, 3), (length, length), 64)
    run(ops.attention, made("heads", torch.bfloat16, 1, (1, 1), (128, 128), 64))  # autograd starts its threads
    torch.use_deterministic_algorithms(True)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(ops.attention, arguments)
        with torch.no_grad():
            for x in arguments:
                x.mul_(0.5).add_(0.25)
        graph.replay()
        torch.cuda.synchronize()
        want = run(ops.attention, arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))


def test_threads_with_streams_of_their_own():
    lengths = [256, 384, 500, 640]
    cases = [made("heads", torch.bfloat16, 2, (8, 8), (n, n), 64) for n in lengths]
    want = [ops.attention(*case).detach() for case in cases]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(first: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for i in range(50):
                at = (first + i) % len(cases)
                got = ops.attention(*cases[at])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(got, want[at]):
                    wrong.append(f"length {lengths[at]}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled_code_gets_the_same():
    arguments = made("packed", torch.bfloat16, 2, (8, 2), (256, 256), 64)
    torch._dynamo.reset()
    compiled = torch.compile(ops.attention, fullgraph=True, backend="aot_eager")
    torch.use_deterministic_algorithms(True)
    try:
        want = run(ops.attention, arguments)
        got = run(compiled, arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_long_sequences_in_parts():
    """Several parts of a backward in a fixed order: all sequences and heads are equal, so their gradients must be."""
    q, k, v = made("heads", torch.bfloat16, 1, (1, 1), (2048, 2048), 64)
    many = tuple(x.detach().repeat(3, 48, 1, 1).requires_grad_() for x in (q, k, v))
    d_y = torch.randn(1, 1, 2048, 64, device="cuda").to(torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        one = run(ops.attention, (q, k, v), d_y)
        got = run(ops.attention, many, d_y.expand(3, 48, 2048, 64))
    finally:
        torch.use_deterministic_algorithms(False)
    for single, several in zip(one, got, strict=True):
        assert torch.isfinite(single).all() and torch.equal(several, several[:1, :1].expand_as(several))
        assert distance(several[:1, :1], single) < torch.finfo(torch.bfloat16).eps
