"""Every kernel compiles for every target, with the instructions that make it native there.

TRITON_INTERPRET=1 holds for the whole process of these tests, so each compiles in one of its own.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from triton_kernels import aot, decode

_SCRIPT = """
import dataclasses, json, sys
from triton_kernels import aot, decode, matmul, quantize, scaled_matmul

target = sys.argv[1]
fast = not target.startswith("gfx")
encoding = quantize.Encoding("floor", False, 32, None)
# 70,000 x 65,536 elements lie beyond what int32 can address.
plans = {
    "quantize": quantize.plan((70000, 65536), "bfloat16", {1: encoding}, fast=fast),
    "quantize_both": quantize.plan(
        (70000, 65536), "bfloat16", {0: encoding, 1: encoding}, fast=fast
    ),
    "decode": decode.plan(70000, 2048, fast=fast),
    "matmul": matmul.plan(70000, 65536, 1024, "bfloat16"),
}
if target in scaled_matmul.TILES:
    plans["scaled_matmul"] = scaled_matmul.plan(70000, 65536, 1024, "bfloat16", target=target)
compiled = {name: dataclasses.asdict(aot.compile_launch(p, target)) for name, p in plans.items()}
json.dump(compiled, sys.stdout)
"""

_FP4 = {
    "sm_100": "kind::mxf4.block_scale",
    "sm_120": "kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0",
    # Both operands' format is 4: E2M1.
    "gfx950": "cbsz:4 blgp:4",
}


@pytest.fixture(scope="module", params=list(aot.TARGETS))
def compiled(request):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(pathlib.Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, request.param],
        capture_output=True, text=True, cwd=root, env=environment | {"PYTHONPATH": root},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)


def test_products_use_the_native_fp4_instruction(compiled):
    target, kernels = compiled
    assert ("scaled_matmul" in kernels) == (target in _FP4)
    if target in _FP4:
        assert _FP4[target] in kernels["scaled_matmul"]["assembly"]


def test_hopper_multiplies_carriers_with_wgmma(compiled):
    target, kernels = compiled
    instruction = "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3"
    assert (instruction in kernels["matmul"]["assembly"]) == (target == "sm_90")


def test_quantizers_and_decoders_spill_nothing(compiled):
    _, kernels = compiled
    assert kernels["decode"]["stack"] == kernels["quantize"]["stack"] == 0


def test_offsets_past_2_31_elements_are_64_bit(compiled):
    """A row's offset is a product with the row's length: it has to be one of int64."""
    _, kernels = compiled
    for name, kernel in kernels.items():
        products = [line for line in kernel["ir"].splitlines() if "arith.muli" in line]
        assert any("i64" in line for line in products), name


def test_bad_input():
    with pytest.raises(ValueError, match=r"^target is 'sm_80', but must be one of sm_90, "):
        aot.compile_launch(decode.plan(1, 1), "sm_80")
    with pytest.raises(RuntimeError, match="to compile kernels leave it unset"):
        aot.compile_launch(decode.plan(1, 1), "sm_90")
