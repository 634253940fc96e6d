"""Products of bfloat16 matrices with a float32 result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adahop_jax.products import bf16_product, dot_f32


@pytest.mark.parametrize("contract", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("compiled", [False, True])
def test_over_one_axis_of_each(contract: tuple[int, int], compiled: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((7, 40)), rng.standard_normal((40, 5))
    stored_a = jnp.asarray(a if contract[0] == 1 else a.T, jnp.float32)
    stored_b = jnp.asarray(b if contract[1] == 0 else b.T, jnp.float32)
    product = jax.jit(bf16_product, static_argnums=2) if compiled else bf16_product
    out = product(stored_a, stored_b, contract)
    assert out.dtype == jnp.float32
    want = np.asarray(a, jnp.bfloat16).astype(float) @ np.asarray(b, jnp.bfloat16).astype(float)
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_float32_operands_are_rounded_to_nearest_even() -> None:
    """Also where the cast sits in the same computation as the product."""
    a = jnp.array([[1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-9]])  # a tie down, a tie up, below
    want = np.array([[1.0, 1 + 2.0**-6, 1.0]])
    for product in (bf16_product, jax.jit(bf16_product, static_argnums=2)):
        np.testing.assert_array_equal(product(a, jnp.eye(3), (1, 0)), want)
        np.testing.assert_array_equal(product(jnp.eye(3), a, (1, 1)), want.T)


def test_sums_are_float32() -> None:
    """In bfloat16 256 + 1 is 256."""
    a = jnp.concatenate([jnp.full((1, 1), 256), jnp.ones((1, 99))], axis=1).astype(jnp.bfloat16)
    for product in (dot_f32, jax.jit(dot_f32, static_argnums=2)):
        assert product(a, jnp.ones((100, 1), jnp.bfloat16), (1, 0))[0, 0] == 355


def test_other_platforms_get_the_native_product() -> None:
    """Where XLA has a bfloat16 product nothing is widened."""
    shape = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)
    product = jax.jit(lambda a, b: dot_f32(a, b, (1, 0)))
    lowered = {
        platform: product.trace(shape, shape).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda")
    }
    native = "(tensor<32x32xbf16>, tensor<32x32xbf16>) -> tensor<32x32xf32>"
    assert native in lowered["cuda"]
    assert native not in lowered["cpu"]
    assert "HIGHEST" in lowered["cpu"]


def test_vmap() -> None:
    a, b = jax.random.normal(jax.random.key(0), (2, 3, 8, 8))
    out = jax.vmap(lambda a, b: bf16_product(a, b, (1, 0)))(a, b)
    for i in range(3):
        np.testing.assert_allclose(out[i], bf16_product(a[i], b[i], (1, 0)), rtol=1e-6)


def test_a_contraction_of_nothing_is_zero() -> None:
    np.testing.assert_array_equal(
        dot_f32(jnp.ones((2, 0)), jnp.ones((0, 3)), (1, 0)), np.zeros((2, 3))
    )
