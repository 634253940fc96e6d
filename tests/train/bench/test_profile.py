"""Kernels are told apart by name and path, and read from a GPU's streams alone."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from train.bench import profile
from train.bench.profile import Event, breakdown, classify, device_events, longest, op_paths
from train.bench.recipe_step import make_program
from train.options import TrainOptions

FORWARD, BACKWARD = "jit(step)/jvp(Llama)/", "jit(step)/transpose(jvp(Llama))/"


@pytest.mark.parametrize(
    ("name", "path", "part"),
    [
        ("quantize_both_axes", FORWARD + "block_0/mlp/up/triton_call", "quantizers"),
        ("decode_rows", BACKWARD + "block_3/attention/q/triton_call", "quantizers"),
        ("loop_convert_fusion_2", FORWARD + "block_0/mlp/down/convert_element_type", "quantizers"),
        ("matmul_rows", BACKWARD + "block_11/attention/o/triton_call", "products"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", FORWARD + "block_0/mlp/gate/dot_general")
        + ("products",),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", BACKWARD + "block_0/attention/k/dot_general")
        + ("products",),
        ("gemm_fusion_dot_17_0", FORWARD + "block_0/attention/v/dot_general", "products"),
        ("MemcpyD2D", FORWARD + "block_0/mlp/up/copy", "rest"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", FORWARD + "block_0/attention/cond")
        + ("attention",),
        ("nvjet_tst_128x8", FORWARD + "block_0/attention/vmap(BTNH,BSNH->BNTS)/dot_general")
        + ("attention",),
        ("loop_sin_fusion", FORWARD + "block_0/attention/sin", "attention"),
        ("input_reduce_fusion", FORWARD + "block_0/attention_norm/reduce_sum", "rest"),
        ("loop_add_fusion", FORWARD + "block_0/add", "rest"),
        ("loop_logistic_fusion", FORWARD + "block_0/mlp/mul", "rest"),
        ("nvjet_tst_256x128", FORWARD + "embedding.attend/dot_general", "head and loss"),
        ("nvjet_tst_256x128", BACKWARD + "head/dot_general", "head and loss"),
        ("input_reduce_fusion", "jit(step)/jvp()/reduce_max", "head and loss"),
        ("loop_scatter", "jit(step)/transpose(jvp(jit(take_along_axis)))/scatter-add")
        + ("head and loss",),
        ("input_scatter_fusion", BACKWARD + "embedding/jit(_take)/scatter-add", "rest"),
        ("loop_multiply_fusion", "jit(step)/mul", "optimizer"),
        ("input_reduce_fusion", "jit(step)/reduce_sum", "optimizer"),
        ("loop_fusion", "jit(step)/jit(tree_bias_correction)/pow", "optimizer"),
        # Without a path the name has to do.
        ("quantize_axis", "", "quantizers"),
        ("matmul_rows", "", "products"),
        ("flash_fwd_kernel", "", "attention"),
        ("loop_add_fusion_3", "", "rest"),
    ],
)
def test_classify(name: str, path: str, part: str) -> None:
    assert classify(name, path) == part


@pytest.mark.usefixtures("hardly_compiled")
def test_classify_knows_the_operations_of_the_real_step() -> None:
    """Every name that the classifier relies on occurs in the program that training runs."""
    options = TrainOptions(model="tiny", batch_size=1, seq_len=8)
    program = make_program(options, options.recipe("bf16"))
    text = program.step.lower(program.state, program.batches[0]).compile().as_text() or ""
    paths = [path for path in op_paths(text).values() if path.startswith("jit(step)/")]
    kernels = [("gemm" if "dot_general" in path else "fusion", path) for path in paths]
    assert {classify(*kernel) for kernel in kernels} == set(profile.PARTS)


def test_breakdown_adds_up() -> None:
    events = [
        Event("matmul_rows", 1.0, ""),
        Event("matmul_rows", 2.0, ""),
        Event("quantize_axis", 0.5, ""),
    ]
    assert breakdown(events) == dict.fromkeys(profile.PARTS, 0.0) | {
        "products": 3.0,
        "quantizers": 0.5,
    }
    assert longest(events, 1) == [
        {"kernel": "matmul_rows", "part": "products", "seconds": 3.0, "launches": 2, "path": ""}
    ]
    assert [row["kernel"] for row in longest(events, 9)] == ["matmul_rows", "quantize_axis"]


def test_op_paths_of_a_compiled_module() -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("inside"):
            return jnp.sin(x) @ x

    text = step.lower(jnp.ones((8, 8))).compile().as_text()
    assert any(path.startswith("jit(step)/inside/") for path in op_paths(text).values())
    line = '  ROOT %a.1-b = f32[] add(%c, %d), metadata={op_type="x" op_name="p[\\"k\\"]/q;r/s"}'
    assert op_paths(line) == {"a.1-b": 'p[\\"k\\"]/q'}


TRACE = """
planes {
  name: "/device:GPU:0"
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "name" } }
  event_metadata { key: 1 value { id: 1 name: "matmul_rows" } }
  event_metadata { key: 2 value { id: 2 name: "loop_add_fusion_3" } }
  event_metadata { key: 3 value { id: 3 name: "whole step" } }
  lines {
    name: "Stream #13(Compute)"
    events { metadata_id: 1 duration_ps: 3000000 stats { metadata_id: 1 str_value: "call.7" } }
    events { metadata_id: 1 duration_ps: 1000000 stats { metadata_id: 2 str_value: "by/name" } }
    events { metadata_id: 2 duration_ps: 2000000 }
  }
  lines { name: "XLA Modules" events { metadata_id: 3 duration_ps: 9000000 } }
}
planes {
  name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "fusion" } }
  lines { name: "Stream of a host" events { metadata_id: 1 duration_ps: 5000000 } }
}
"""


def test_device_events_are_those_of_the_streams() -> None:
    paths = {"call.7": "jit(step)/a", "loop_add_fusion.3": "jit(step)/b"}
    events = device_events(ProfileData.from_text_proto(TRACE), paths)
    assert [(name, path) for name, _, path in events] == [
        ("matmul_rows", "jit(step)/a"),
        ("matmul_rows", "by/name"),
        ("loop_add_fusion_3", "jit(step)/b"),
    ]
    assert [seconds for _, seconds, _ in events] == pytest.approx([3e-6, 1e-6, 2e-6])


def test_a_cpu_trace_has_no_kernels() -> None:
    step = jax.jit(lambda x: jnp.sin(x) @ x)
    data = profile.record(lambda: step(jnp.ones((8, 8))))
    assert "/host:CPU" in [plane.name for plane in data.planes]
    assert device_events(data, {}) == []
