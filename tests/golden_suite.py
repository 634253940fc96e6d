"""The reference suite that every backend runs: exact bits for quantization, tolerances for
products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as adahop
from adahop_jax import e2m1

RULES = ("floor", "ceil", "even", "rceil")


def golden_input(oracle: dict[str, np.ndarray], dtype: str) -> jax.Array:
    """`x_f32`, or `x_bf16` from its bits."""
    if dtype == "f32":
        return jnp.asarray(oracle["x_f32"])
    return jax.lax.bitcast_convert_type(jnp.asarray(oracle["x_bf16"]), jnp.bfloat16)


def relative_error(got: jax.Array, want: np.ndarray) -> float:
    """Frobenius norm of the difference over that of the wanted, in float64."""
    difference = np.asarray(got, np.float64) - want
    return float(np.linalg.norm(difference) / np.linalg.norm(want))


class GoldenSuite:
    """Inherited by one test class a backend, which sets `backend`."""

    backend: str
    draws = 256
    """Of stochastic rounding; the tolerances follow it."""

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("dtype", ["f32", "bf16"])
    def test_quantize(self, quantize_file, oracle, dtype: str, rule: str) -> None:
        x = golden_input(oracle, dtype)
        q = adahop.quantize(x, scale_rule=rule, backend=self.backend)
        np.testing.assert_array_equal(q.scales, oracle[f"{dtype}_{rule}_scale"])
        np.testing.assert_array_equal(q.codes, oracle[f"{dtype}_{rule}_packed"])
        want = oracle[f"{dtype}_{rule}_dequant"]
        got = np.asarray(q.dequantize(jnp.float32))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(
            np.where(np.isnan(want), 0, got.view(np.uint32)),
            np.where(np.isnan(want), 0, want.view(np.uint32)),
        )

    @pytest.mark.parametrize("rule", RULES)
    def test_quantize_along_another_axis(self, quantize_file, oracle, rule: str) -> None:
        """The same blocks, moved to the first axis, give the same codes there."""
        x = jnp.moveaxis(golden_input(oracle, "f32"), -1, 0)
        q = adahop.quantize(x, axis=0, scale_rule=rule, backend=self.backend)
        np.testing.assert_array_equal(jnp.moveaxis(q.scales, 0, -1), oracle[f"f32_{rule}_scale"])
        np.testing.assert_array_equal(jnp.moveaxis(q.codes, 0, -1), oracle[f"f32_{rule}_packed"])

    @pytest.mark.parametrize("rule", e2m1.NONSATURATING_RULES)
    @pytest.mark.parametrize("dtype", ["f32", "bf16"])
    def test_stochastic(self, stochastic_file, oracle, dtype: str, rule: str) -> None:
        """Every draw is a neighbour; grid values stay; the upward frequency is the oracle's."""
        x = golden_input(oracle, dtype)
        draws = self.draws
        keys = jax.random.split(jax.random.key(7), draws)

        def draw(key: jax.Array) -> adahop.MXFP4Array:
            return adahop.quantize(
                x, scale_rule=rule, rounding="stochastic", key=key, backend=self.backend
            )

        q = jax.jit(jax.vmap(draw))(keys)
        np.testing.assert_array_equal(q.scales[0], oracle[f"{dtype}_{rule}_scale"])
        low, high = (oracle[f"{dtype}_{rule}_{side}"].astype(np.float64) for side in ("lo", "hi"))
        p = oracle[f"{dtype}_{rule}_p_up"]
        values = np.asarray(q.dequantize(jnp.float32), np.float64)
        assert np.all((values == low) | (values == high))
        up = np.sum((values == high) & (high != low), axis=0)
        # Six standard deviations an element, and five for the sum over elements.
        spread = np.sqrt(draws * p * (1 - p))
        assert np.all(np.abs(up - draws * p) <= 6 * spread + 1)
        total = np.sqrt(np.sum(spread**2))
        assert abs(np.sum(up - draws * p)) <= 5 * total + 1e-6

    @pytest.mark.parametrize("rule", ["floor", "rceil"])
    def test_inner_hadamard_product(self, matmul_file, oracle, rule: str) -> None:
        signs = jnp.asarray(oracle["sign"]) if oracle["has_sign"] else None
        a, b, n = jnp.asarray(oracle["A"]), jnp.asarray(oracle["B"]), int(oracle["n"])
        out = adahop.matmul(
            a, b, "iht", block_size=n, signs=signs, scale_rule=rule, backend=self.backend
        )
        assert relative_error(out, oracle[f"{rule}_Cq"]) < 4e-6
        # The transform is accurate enough that every code of both operands is the oracle's.
        for matrix, axis, name in ((a, -1, "A"), (b, 0, "BT")):
            rotated = adahop.hadamard_transform(matrix, n, axis, signs)
            q = adahop.quantize(rotated, axis, scale_rule=rule, backend=self.backend)
            codes, scales = (q.codes, q.scales) if name == "A" else (q.codes.T, q.scales.T)
            np.testing.assert_array_equal(codes, oracle[f"{rule}_{name}_packed"])
            np.testing.assert_array_equal(scales, oracle[f"{rule}_{name}_scale"])

    def test_plain_product(self, matmul_file, oracle) -> None:
        a, b = jnp.asarray(oracle["A"]), jnp.asarray(oracle["B"])
        out = adahop.matmul(a, b, "plain", scale_rule="floor", backend=self.backend)
        assert relative_error(out, oracle["floor_Cq_plain"]) < 4e-6

    @pytest.mark.parametrize("rule", ["floor", "rceil"])
    def test_extraction(self, extract_file, oracle, rule: str) -> None:
        side, k = str(oracle["side"]), int(oracle["k"])
        a, b = jnp.asarray(oracle["A"]), jnp.asarray(oracle["B"])
        matrix, axis = (a, 0) if side == "left" else (b, 1)
        np.testing.assert_array_equal(adahop.top_outliers(matrix, k, axis), oracle["idx"])
        out = adahop.matmul(
            a,
            b,
            f"iht_oe_{side}",
            k=k,
            block_size=int(oracle["n"]),
            signs=jnp.asarray(oracle["sign"]) if oracle["has_sign"] else None,
            scale_rule=rule,
            backend=self.backend,
        )
        assert relative_error(out, oracle[f"{rule}_Cq"]) < 4e-6
