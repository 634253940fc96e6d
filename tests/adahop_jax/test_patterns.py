import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adahop_jax import patterns
from adahop_jax.patterns import (
    METHODS,
    Pattern,
    TensorProfile,
    classify,
    pattern_votes,
    profile_tensor,
)

ORDER = (Pattern.ROW, Pattern.COL, Pattern.NONE)

# Compiled whole: op by op, every new shape would compile some thirty programs.
profile_of = jax.jit(profile_tensor)
votes_of = jax.jit(pattern_votes, static_argnames="method")


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def planted(pattern, shape=(64, 96), magnitude=20.0, seed=0):
    x = noise(*shape, seed=seed)
    if pattern == Pattern.ROW:
        x[[3, 11]] *= magnitude
    elif pattern == Pattern.COL:
        x[:, [5, 17]] *= magnitude
    return x


def confusion(labels, found):
    matrix = np.zeros((3, 3), int)
    for label, pattern in zip(labels, found, strict=True):
        matrix[ORDER.index(Pattern(label)), ORDER.index(pattern)] += 1
    return matrix


def published_float64(x):
    """The published formula, word by word, in numpy."""
    x = np.asarray(x, np.float64)
    rows, cols = x.shape
    row_var, col_var = x.var(axis=1, ddof=1), x.var(axis=0, ddof=1)
    cv_row = row_var.std(ddof=1) / row_var.mean() / np.sqrt(2 / (cols - 1))
    cv_col = col_var.std(ddof=1) / col_var.mean() / np.sqrt(2 / (rows - 1))
    return cv_row, cv_col


@pytest.fixture(scope="module")
def labelled(golden: pathlib.Path):
    folder = golden / "patterns"
    spec = importlib.util.spec_from_file_location("generator", folder / "pattern_generator.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    specs = generator.load_specs(folder / "patterns.csv")
    return specs, [generator.make_matrix(s) for s in specs]


class TestLabelledMatrices:
    EXPECTED = {  # noqa: RUF012
        "published": [[102, 0, 15], [0, 101, 16], [0, 0, 126]],
        "robust": [[117, 0, 0], [0, 117, 0], [0, 0, 126]],
    }

    @pytest.mark.parametrize("method", METHODS)
    def test_confusion_matrix(self, labelled, method, record_property):
        specs, matrices = labelled
        found = confusion([s["label"] for s in specs], classify(matrices, method))
        np.testing.assert_array_equal(found, self.EXPECTED[method])
        record_property("golden", "patterns/patterns")

    def test_margins_of_ours_are_wide(self, labelled):
        # The threshold is at 1; what is near it would flip on other seeds.
        some = [(s["label"], x) for s, x in zip(*labelled, strict=True) if x.shape == (64, 128)]
        assert len(some) >= 20
        profile = profile_of(np.stack([x for _, x in some]))
        for (label, _), row, col in zip(some, profile.excess_row, profile.excess_col, strict=True):
            excess = {"row": float(row), "col": float(col)}
            assert excess.pop(label, 2) > 1.2
            assert max(excess.values()) < 0.6


@pytest.mark.parametrize("pattern", Pattern)
@pytest.mark.parametrize("method", METHODS)
def test_planted(pattern, method):
    assert classify(planted(pattern), method) is pattern


def test_opposite():
    assert [p.opposite for p in ORDER] == [Pattern.COL, Pattern.ROW, Pattern.NONE]
    assert Pattern("col") is Pattern.COL and str(Pattern.ROW) == "row"


class TestPublished:
    @given(
        shape=st.sampled_from([(2, 96), (64, 2), (17, 40), (96, 64)]),
        offset=st.sampled_from([0.0, 1.0, -3000.0]),
        spread=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 10**6),
    )
    def test_statistics_are_the_formula(self, shape, offset, spread, seed):
        x = noise(*shape, seed=seed) * np.exp(spread * noise(shape[0], 1, seed=seed + 1))
        x = (x + offset).astype(np.float32)
        profile = profile_of(x)
        np.testing.assert_allclose(
            [profile.cv_row, profile.cv_col], published_float64(x), rtol=1e-4
        )

    @pytest.mark.parametrize(("ratio", "pattern"), [(1.9, Pattern.NONE), (2.1, Pattern.ROW)])
    def test_threshold_is_two(self, ratio, pattern):
        one, zero = jnp.float32(1), jnp.float32(0)
        profile = TensorProfile(ratio * one, one, zero, zero)
        assert classify(profile) is pattern
        swapped = TensorProfile(one, ratio * one, zero, zero)
        assert classify(swapped) is pattern.opposite

    @pytest.mark.parametrize(
        "x",
        [np.full((48, 999), 0.1), 0.1 * np.ones(999) * np.arange(48)[:, None]],
        ids=["all equal", "equal within rows"],
    )
    def test_rounding_is_no_pattern(self, x):
        # In exact arithmetic both ratios are 0/0 here.
        profile = profile_of(x.astype(np.float32))
        assert (profile.cv_row, profile.cv_col) == (0, 0)
        assert classify(profile) is Pattern.NONE

    def test_one_row_apart_from_constant_rows(self):
        x = np.zeros((32, 48), np.float32)
        x[4] = noise(48)
        assert classify(x) is Pattern.ROW


class TestRobust:
    @pytest.mark.parametrize(
        ("magnitude", "pattern"), [(1.5, Pattern.NONE), (3.0, Pattern.ROW), (1e6, Pattern.ROW)]
    )
    @pytest.mark.parametrize("count", [1, 64])
    def test_twice_the_typical_row(self, magnitude, pattern, count):
        x = noise(256, 256)
        x[-count:] *= magnitude
        assert classify([x, x.T], "robust") == [pattern, pattern.opposite]

    @pytest.mark.parametrize("value", [1e2, 1e4, 1e12, 1e30])
    @pytest.mark.parametrize("shape", [(64, 256), (256, 64)])
    def test_a_single_outlier_is_no_row(self, value, shape):
        x = noise(*shape)
        x[5, 7] = value
        assert classify(x, "robust") is Pattern.NONE

    def test_scattered_outliers_are_no_row(self):
        x = noise(64, 64)
        x.reshape(-1)[np.random.default_rng(1).choice(64 * 64, 100, replace=False)] *= 100
        assert classify(x, "robust") is Pattern.NONE

    def test_half_of_a_row_is_a_row(self):
        x = noise(64, 64)
        x[9, ::2] *= 50
        assert classify(x, "robust") is Pattern.ROW

    def test_lognormal_rows(self):
        x = noise(64, 64) * np.exp(1.5 * noise(64, 1, seed=1))
        assert classify(x, "robust") is Pattern.ROW

    def test_shifted_row(self):
        x = noise(64, 64)
        x[7] -= 10
        assert classify(x, "robust") is Pattern.ROW

    @pytest.mark.parametrize(("row", "col"), [(10, 40), (40, 10)])
    def test_the_stronger_of_both(self, row, col):
        x = noise(128, 128)
        x[[1, 5]] *= row
        x[:, [3, 9]] *= col
        expected = Pattern.ROW if row > col else Pattern.COL
        assert classify(x, "robust") is expected
        assert classify(x, "published") is Pattern.NONE

    @pytest.mark.parametrize("shape", [(8, 8), (16, 512), (1024, 16), (1000, 6)])
    def test_noise_is_no_pattern(self, shape):
        # Of a thousand rows of six entries some show next to no spread by chance.
        assert np.asarray(votes_of(noise(50, *shape), "robust"))[:, 2].all()

    def test_masked_rows_do_not_count(self):
        x = noise(128, 128)
        x[:40] = 0
        assert classify(x, "robust") is Pattern.NONE

    @pytest.mark.parametrize(("excess", "pattern"), [(0.99, Pattern.NONE), (1.01, Pattern.ROW)])
    def test_threshold_is_one_octave(self, excess, pattern):
        one = jnp.float32(1)
        assert classify(TensorProfile(one, one, excess * one, -one), "robust") is pattern
        assert classify(TensorProfile(one, one, -one, excess * one), "robust") is pattern.opposite

    def test_excess_is_log2_of_the_magnitude(self):
        x = np.ones((16, 32), np.float32)
        x[3] = 8
        assert abs(float(profile_tensor(x).excess_row) - 3) < 1e-2


class TestInvariance:
    @given(pattern=st.sampled_from(Pattern), power=st.integers(-90, 90), seed=st.integers(0, 10**6))
    def test_scale(self, pattern, power, seed):
        x = planted(pattern, (24, 40), seed=seed)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
            profile_of(x),
            profile_of(np.ldexp(x, power)),
        )

    @given(pattern=st.sampled_from(Pattern), seed=st.integers(0, 10**6))
    def test_transpose_swaps(self, pattern, seed):
        x = planted(pattern, (24, 40), seed=seed)
        a, b = profile_of(x), profile_of(x.T)
        np.testing.assert_allclose(
            [a.cv_row, a.cv_col, a.excess_row, a.excess_col],
            [b.cv_col, b.cv_row, b.excess_col, b.excess_row],
            rtol=1e-4,
            atol=1e-4,
        )

    @given(pattern=st.sampled_from(Pattern), seed=st.integers(0, 10**6))
    def test_permutations(self, pattern, seed):
        x = planted(pattern, (24, 40), seed=seed)
        rng = np.random.default_rng(seed)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
            profile_of(x),
            profile_of(x[rng.permutation(24)][:, rng.permutation(40)]),
        )


@pytest.mark.parametrize("method", METHODS)
class TestEdges:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("shape", [(32, 48), (1, 48)])
    def test_not_finite_stays_visible(self, method, bad, shape):
        x = noise(2, *shape)
        x[1, 0, 7] = bad
        votes = np.asarray(votes_of(x, method))
        np.testing.assert_array_equal(votes[0], [0, 0, 1])
        assert np.isnan(votes[1]).all()
        assert all(np.isnan(v[1]) for v in jax.tree.leaves(profile_of(x)))
        with pytest.raises(ValueError, match=r"x has NaN or Inf"):
            classify(x[1], method)
        with pytest.raises(ValueError, match=r"x\[1\] has NaN or Inf"):
            classify(list(x), method)

    @pytest.mark.parametrize("value", [0.0, 1.0, 1e-40, 3e38])
    def test_constant(self, method, value):
        assert classify(np.full((32, 48), value, np.float32), method) is Pattern.NONE

    @pytest.mark.parametrize("largest", [1e-30, 1e30, 3e38])
    @pytest.mark.parametrize("pattern", Pattern)
    def test_huge_and_tiny(self, method, largest, pattern):
        x = planted(pattern)
        x = x / np.abs(x).max() * np.float32(largest)
        assert classify(x, method) is pattern

    @pytest.mark.parametrize("shape", [(1, 1), (1, 64), (64, 1), (0, 64), (64, 0)])
    def test_one_row_or_column(self, method, shape):
        x = noise(*shape) * (1 + 1e4 * (np.arange(shape[1]) == 3)).astype(np.float32)
        assert classify(x, method) is Pattern.NONE
        assert all(v == 0 for v in jax.tree.leaves(profile_of(x)))

    @pytest.mark.parametrize("pattern", Pattern)
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_narrow_floats(self, method, pattern, dtype):
        narrow = jnp.asarray(planted(pattern), dtype)
        assert classify(narrow, method) is pattern
        wide = profile_of(narrow.astype(jnp.float32))
        for value, same in zip(*map(jax.tree.leaves, (profile_of(narrow), wide)), strict=True):
            assert value.dtype == jnp.float32
            np.testing.assert_array_equal(value, same)


@pytest.mark.parametrize("method", METHODS)
class TestTransformations:
    def test_jit_vmap_and_batch_axes_agree(self, method):
        x = np.stack([planted(p, seed=s) for s in range(2) for p in ORDER]).reshape(2, 3, 64, 96)
        votes = np.asarray(pattern_votes(x, method))
        np.testing.assert_array_equal(votes, np.stack([np.eye(3)] * 2))
        assert votes.dtype == np.float32
        vote = jax.tree_util.Partial(pattern_votes, method=method)
        np.testing.assert_array_equal(jax.jit(vote)(x), votes)
        np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(vote)))(x), votes)
        np.testing.assert_array_equal(pattern_votes(profile_tensor(x), method), votes)

    def test_votes_add_up_in_a_training_step(self, method):
        xs = np.stack([planted(p, seed=9) for p in (Pattern.COL, Pattern.COL, Pattern.NONE)])

        @jax.jit
        @jax.grad
        def step(w):
            @jax.remat
            def loss(total, x):
                y = x * w
                statistics = jax.tree.leaves((profile_tensor(y), pattern_votes(y, method)))
                return total + jnp.sum(y) + sum(map(jnp.sum, statistics)), None

            return jax.lax.scan(loss, 0.0, xs)[0]

        # Statistics are constants; the root of zero would have slope Inf.
        np.testing.assert_allclose(step(jnp.float32(0)), xs.sum(dtype=float), rtol=1e-4)

        @jax.jit
        def count(xs):
            def add(total, x):
                return total + pattern_votes(x, method), None

            return jax.lax.scan(add, jnp.zeros(3), xs)[0]

        np.testing.assert_array_equal(count(xs), [0, 2, 1])

    def test_one_trace_for_many_tensors(self, method, monkeypatch):
        shapes = []

        def counting(x):
            shapes.append(x.shape)
            return profile_tensor(x)

        monkeypatch.setattr(patterns, "profile_tensor", counting)

        def tensors(seed):
            sizes = [(63, 95), (33, 65), (63, 95), (63, 95)]
            wanted = [Pattern.ROW, Pattern.COL, Pattern.NONE, Pattern.COL]
            return wanted, [planted(p, s, seed=seed) for p, s in zip(wanted, sizes, strict=True)]

        for seed in range(3):
            wanted, xs = tensors(seed)
            assert classify(xs, method) == wanted
        assert sorted(shapes) == [(1, 33, 65), (3, 63, 95)]


class TestClassify:
    def test_containers(self):
        x = planted(Pattern.ROW)
        assert classify(x) is Pattern.ROW
        assert classify(jnp.asarray(x)) is Pattern.ROW
        assert classify((x,)) == [Pattern.ROW]
        assert classify([]) == []
        assert classify(profile_of(x)) is Pattern.ROW
        assert classify(profile_of(np.stack([x, noise(64, 96)]))) == [Pattern.ROW, Pattern.NONE]

    @pytest.mark.parametrize("method", METHODS)
    def test_explicit_sharding(self, method):
        mesh = jax.make_mesh((1, 1), ("data", "model"))  # of explicit axes, whatever their size
        x = planted(Pattern.COL)
        specs = [jax.P("data", "model"), jax.P("model"), jax.P(None, "data"), jax.P()]
        sharded = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for spec in specs]
        assert classify(sharded, method) == [Pattern.COL] * 4

    @pytest.mark.parametrize("function", [classify, pattern_votes])
    def test_unknown_method(self, function):
        with pytest.raises(ValueError, match=r"method is 'norm', .*published, robust"):
            function(noise(4, 4), "norm")

    @pytest.mark.parametrize(
        ("x", "error", "message"),
        [
            ("abc", TypeError, r"x is of type str"),
            (None, TypeError, r"x is of type NoneType"),
            ([[1.0, 2.0], [3.0, 4.0]], TypeError, r"x\[0\] is of type list"),
            (np.ones((4, 4), int), TypeError, r"x has dtype int"),
            (np.ones(4, np.float32), ValueError, r"x has shape \(4,\)"),
            ([np.ones((2, 3, 4), np.float32)], ValueError, r"x\[0\] has shape \(2, 3, 4\)"),
            (profile_tensor(noise(2, 2, 4, 4)), ValueError, r"batch shape \(2, 2\)"),
        ],
        ids=["str", "None", "numbers", "int", "1-D", "3-D", "profile"],
    )
    def test_bad_input(self, x, error, message):
        with pytest.raises(error, match=message):
            classify(x)

    def test_traced(self):
        with pytest.raises(TypeError, match="use pattern_votes"):
            jax.jit(lambda x: classify([x]))(noise(4, 4))

    @pytest.mark.parametrize("function", [profile_tensor, pattern_votes])
    def test_vector(self, function):
        with pytest.raises(ValueError, match=r"x has shape \(5,\)"):
            function(np.ones(5, np.float32))
