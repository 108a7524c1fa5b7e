"""Runs without a GPU, unlike the cases themselves: that there is one for every function of the C library."""

from __future__ import annotations

from pathlib import Path

from test_capi_cuda import CASES

HEADER = Path(__file__).resolve().parents[2] / "crates/capi/include/ironhorse.h"


def test_every_function_of_the_header_has_a_case() -> None:
    lines = HEADER.read_text().splitlines()
    assert {line.split("(")[0].split()[-1] for line in lines if line.startswith("int32_t cuda_")} == set(CASES)
