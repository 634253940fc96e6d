"""The fused transform and quantization, against the bits of the reference backend."""

import functools
import itertools
from typing import cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from adahop_jax import e2m1
from adahop_jax.backends import Quantizer, choose_backend
from adahop_jax.hadamard import hadamard_transform
from triton_kernels import interpreter, quantize
from triton_kernels.launch import ArraySpec
from triton_kernels.quantize import TILE, Encoding, Tile

from . import ptx_model

WIDE = Tile(512, 512, 2048, 4)
"""A launch costs the interpreter much the same whatever its size."""
F32, BF16, F16 = np.float32, ml_dtypes.bfloat16, np.float16
KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)


def matrix(shape: tuple[int, int], dtype: type = F32, seed: int = 0) -> np.ndarray:
    """Blocks of very different magnitudes along both axes, ties and zeros of both signs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, -0.0], shape)
    x = np.where(rng.random(shape) < 0.2, ties, x)
    limit = 6 if dtype is F16 else 30
    for axis, length in enumerate(shape):
        blocks = np.ldexp(1.0, rng.integers(-limit // 2, limit // 2, -(-length // 16)))
        x = x * np.expand_dims(np.repeat(blocks, 16)[:length], 1 - axis)
    x[shape[0] // 2] = 0
    return x.astype(dtype)


def make_signs(shape: tuple[int, int], axis: int, encoding: Encoding) -> np.ndarray | None:
    """What the encoding asks for, the same in every call."""
    if encoding.signs is None:
        return None
    length = shape[axis] if encoding.signs == "full" else encoding.block_size or 1
    return np.random.default_rng(axis).choice(np.array([-1, 1], np.int8), (length,))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _reference(
    x: jax.Array, axis: int, quantizer: Quantizer, signs: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    q = choose_backend("xla")[0].quantize(x, axis - 2, quantizer, signs=signs)
    return jnp.moveaxis(q.codes, axis, -1), jnp.moveaxis(q.scales, axis, -1)


def reference(x: np.ndarray, encodings: dict[int, Encoding]) -> list[np.ndarray]:
    """Codes and scale bytes of each axis, contraction-major."""
    out = []
    for axis, e in sorted(encodings.items()):
        quantizer = Quantizer(cast(e2m1.ScaleRule, e.scale_rule), "nearest", e.block_size)
        signs = make_signs(x.shape, axis, e)
        out += _reference(jnp.asarray(x), axis, quantizer, signs)
    return [np.asarray(part) for part in out]


def run(
    x: np.ndarray,
    encodings: dict[int, Encoding],
    *,
    tile: Tile = WIDE,
    fast: bool = False,
    keys: tuple[np.ndarray, ...] = (KEY, KEY),
) -> list[np.ndarray]:
    plan = quantize.plan(x.shape, x.dtype.name, encodings, fast=fast, tile=tile)
    inputs = [x]
    for axis, e in sorted(encodings.items()):
        signs = make_signs(x.shape, axis, e)
        inputs += [x if signs is None else signs, keys[axis] if e.stochastic else x]
    return interpreter.run(plan, inputs)


def check(
    x: np.ndarray,
    encodings: dict[int, Encoding],
    monkeypatch: pytest.MonkeyPatch,
    tile: Tile = WIDE,
) -> list[np.ndarray]:
    """Compares both paths, compiled for conversion instructions and generic, with the reference."""
    want = reference(x, encodings)
    with monkeypatch.context() as patch:
        calls = ptx_model.interpret(patch)
        got = {"generic": run(x, encodings, tile=tile)}
        assert not calls
        got["ptx"] = run(x, encodings, tile=tile, fast=True)
        assert calls
    for path, parts in got.items():
        for i, (ours, theirs) in enumerate(zip(parts, want, strict=True)):
            np.testing.assert_array_equal(ours, theirs, f"{path}, output {i} of {encodings}")
    return want


CASES = {
    "1x1": ((1, 1), F32, {0: Encoding(), 1: Encoding("even", block_size=16)}),
    "1xN": ((1, 77), BF16, {0: Encoding("rceil"), 1: Encoding("mse", False, 64, "full")}),
    "Nx1": ((77, 1), F16, {0: Encoding("ceil", False, 128, "block"), 1: Encoding()}),
    "none-32": ((33, 95), F32, {0: Encoding("floor", False, 32, "full"), 1: Encoding("mse")}),
    "16-64": (
        (95, 33),
        BF16,
        {0: Encoding("even", False, 16, "block"), 1: Encoding("rceil", False, 64)},
    ),
    "64-16": (
        (95, 130),
        F16,
        {0: Encoding("mse", False, 64, "full"), 1: Encoding("ceil", False, 16, "full")},
    ),
    "32-128": (
        (64, 256),
        F32,
        {0: Encoding("mse", False, 32, "block"), 1: Encoding("even", False, 128, "full")},
    ),
    "128-32": (
        (256, 96),
        F32,
        {0: Encoding("rceil", False, 128, "full"), 1: Encoding("floor", False, 32, "block")},
    ),
    "mse-none": ((160, 64), F32, {0: Encoding("mse"), 1: Encoding("even", False, 64, "block")}),
}


@pytest.mark.parametrize("case", CASES)
def test_both_axes_in_one_launch(case, monkeypatch):
    shape, dtype, encodings = CASES[case]
    check(matrix(shape, dtype), encodings, monkeypatch)


@pytest.mark.parametrize(
    ("dtype", "encodings"),
    [
        (F32, {1: Encoding("floor", False, 32, "full")}),
        (BF16, {0: Encoding("rceil", False, 32, "full")}),
        (F16, {0: Encoding("even", False, 128, "block"), 1: Encoding("ceil")}),
    ],
    ids=["axis1", "axis0", "both"],
)
def test_several_tiles_of_the_measured_size(dtype, encodings, monkeypatch):
    """130 x 257: two tiles down, three across, the last ones nearly empty."""
    shape = (130, 257)
    assert shape[0] > TILE.rows and shape[1] > 2 * TILE.cols
    check(matrix(shape, dtype), encodings, monkeypatch, TILE)


@pytest.mark.parametrize("tile", [Tile(32, 64, 64, 4), Tile(64, 32, 256, 4)], ids=str)
def test_other_tiles_give_the_same_bits(tile, monkeypatch):
    """Also where there are more lanes than a tile has groups."""
    encodings = {0: Encoding("ceil", False, 32), 1: Encoding("floor", False, 16)}
    check(matrix((70, 72)), encodings, monkeypatch, tile)


@pytest.mark.parametrize("size", [None, 32, 128])
def test_nan_and_infinity_mark_their_blocks_alone(size, monkeypatch):
    """As do finite values whose transform overflows; infinities of both signs meet in one."""
    x = matrix((256, 288))
    x[3, 40], x[17, 5], x[40, 200], x[77, 255] = np.nan, np.inf, -np.inf, -np.nan
    x[130, 96:98] = np.inf, -np.inf
    x[200, 130:150] = 3e38
    encodings = {0: Encoding("floor", False, size), 1: Encoding("mse", False, size)}
    codes0, scales0, codes1, scales1 = check(x, encodings, monkeypatch)
    for codes, scales in ((codes0, scales0), (codes1, scales1)):
        assert 5 <= np.count_nonzero(scales == 255) < scales.size / 8
        assert not np.any(codes.reshape(*scales.shape, 16)[scales == 255])
    assert scales1[3, 1] == scales1[17, 0] == scales0[40, 0] == scales0[200, 1] == 255
    assert (scales1[200, 4] == 255) == (size is not None)


@pytest.mark.parametrize("rule", e2m1.SCALE_RULES)
def test_the_whole_range_of_float32(rule, monkeypatch):
    """From the smallest subnormal to the largest number, untransformed, along both axes."""
    rng = np.random.default_rng(1)
    exponents = np.linspace(-149, 127, 96).astype(int)
    x = np.ldexp(1 + rng.random((96, 64)), exponents[:, None] - rng.integers(0, 4, (96, 64)))
    x = x.clip(None, np.finfo(F32).max) * rng.choice([-1, 1], x.shape)
    x[-1, :5] = np.finfo(F32).max
    *_, scales = check(x.astype(F32), {0: Encoding(rule), 1: Encoding(rule)}, monkeypatch)
    assert scales.min() == 0 and scales.max() == (252 if rule == "floor" else 253)


def test_transforms_up_to_the_promised_magnitude(monkeypatch):
    """2^110, above which a factor may be subnormal."""
    x = matrix((64, 128))
    x *= np.ldexp(np.float32(1), 104 - np.frexp(np.abs(x).max(1, keepdims=True))[1])
    encodings = {0: Encoding("floor", False, 32), 1: Encoding("rceil", False, 32)}
    *_, scales = check(x, encodings, monkeypatch)
    assert 127 + 100 < scales.max() <= 127 + 108


SHAPES_AND_SIZES = list(itertools.product([(33, 95), (256, 128)], [None, 128]))


@pytest.mark.parametrize(("shape", "size"), SHAPES_AND_SIZES)
def test_every_byte_is_written(shape, size):
    """What padding adds included; outputs are poisoned with 0xA5, which no zero encodes to."""
    encodings = {0: Encoding("ceil", False, size), 1: Encoding("mse", False, size)}
    for part in run(np.zeros(shape, F32), encodings, tile=TILE):
        assert part.size and not np.any(part)


def test_negative_zeros_keep_their_sign():
    encodings = {0: Encoding(), 1: Encoding()}
    codes0, _, codes1, _ = run(np.full((32, 64), -0.0, F32), encodings)
    assert np.all(codes0 == 0x88) and np.all(codes1 == 0x88)


def test_one_axis_of_two_is_the_axis_alone():
    x = matrix((70, 90))
    encodings = {0: Encoding("even", False, 32, "full"), 1: Encoding("ceil", True, 16, "block")}
    both = run(x, encodings)
    alone = [part for axis in (0, 1) for part in run(x, {axis: encodings[axis]})]
    for one, two in zip(both, alone, strict=True):
        np.testing.assert_array_equal(one, two)


SIDE = 512


@pytest.fixture(scope="module")
def ups() -> tuple[np.ndarray, np.ndarray]:
    """Whether each element was rounded up, bool [SIDE, SIDE], with blocks along axis 0 and 1.

    A 4 in each block makes its scale 1; the other values, 2.5, are halfway. Columns 0, 32, .. of
    what comes back are those of the 4, and hold no coins; nor do such rows.
    """
    x = np.full((SIDE, SIDE), 2.5, F32)
    x[::32] = x[:, ::32] = 4
    encodings = {0: Encoding("ceil", True), 1: Encoding("rceil", True)}
    keys = (KEY, np.array([7, 8], np.uint32))
    codes0, scales0, codes1, scales1 = run(x, encodings, tile=Tile(128, 256, 512, 4), keys=keys)
    assert np.all(scales0 == 127) and np.all(scales1 == 127)
    out = []
    for packed in (codes0, codes1):
        codes = np.asarray(e2m1.unpack(jnp.asarray(packed), -1))
        inner = np.delete(np.delete(codes, np.s_[::32], 0), np.s_[::32], 1)
        assert set(np.unique(inner)) == {4, 5}
        assert np.all(codes[:, ::32] == 6) and np.all(codes[::32] == 6)
        out.append(codes == 5)
    return out[0], out[1]


class TestStochastic:
    """Elements of a constant array turn up or down as fair, independent coins."""

    @staticmethod
    def coins(ups: np.ndarray) -> np.ndarray:
        """+1 and -1, and 0 for what is no coin."""
        coins = np.where(ups, 1, -1)
        coins[::32] = 0
        coins[:, ::32] = 0
        return coins

    def test_coins_are_fair_at_every_place(self, ups):
        for one in ups:
            coins = self.coins(one)
            count = np.abs(coins).sum()
            assert abs(coins.sum()) < 5 * np.sqrt(count)
            # By place in a block, by column of a block and by row: five standard deviations.
            for sums in (
                coins.reshape(512, 16, 32).sum((0, 1)),
                coins.sum(0),
                coins.sum(1),
                coins.reshape(4, 128, 512).sum((1, 2)),
            ):
                assert np.all(np.abs(sums) < 5 * np.sqrt(SIDE * SIDE / len(sums)))

    def test_coins_are_independent(self, ups):
        """Products of two coins some way apart sum to what chance gives, five deviations."""
        for one in ups:
            coins = self.coins(one)
            # Within a word and a block, between blocks, rows, programs, and of these together.
            steps = [0, *range(1, 32), 32, 64, 128, 256]
            for down, across in itertools.product([0, 1, 2, 31, 32, 64, 127, 128, 256], steps):
                if down or across:
                    a = coins[: SIDE - down, : SIDE - across]
                    pairs = a * coins[down:, across:]
                    total, count = pairs.sum(), np.abs(pairs).sum()
                    assert abs(total) < 5 * np.sqrt(count), (down, across)

    def test_no_two_blocks_share_their_noise(self, ups):
        for one in ups:
            blocks = np.delete(one, np.s_[::32], 0).reshape(-1, 32)
            # The chance that any two of them agree, 31 coins each, is about 1 in 70.
            assert len(np.unique(np.packbits(blocks, axis=1), axis=0)) == len(blocks)

    def test_both_axes_differ(self, ups):
        zero, one = (self.coins(axis) for axis in ups)
        for other in (one, one.T):
            pairs = zero * other
            assert abs(pairs.sum()) < 5 * np.sqrt(np.abs(pairs).sum())

    def test_the_key_and_the_place_alone_decide(self):
        x = matrix((40, 256))
        encodings = {1: Encoding("rceil", True, 32)}

        def codes(key: list[int], tile: Tile = WIDE, x: np.ndarray = x) -> np.ndarray:
            return run(x, encodings, tile=tile, keys=(KEY, np.array(key, np.uint32)))[0]

        first = codes([1, 2])
        np.testing.assert_array_equal(first, codes([1, 2]))
        np.testing.assert_array_equal(first, codes([1, 2], Tile(32, 64, 32, 4)))
        np.testing.assert_array_equal(first[:9], codes([1, 2], x=x[:9]))
        others = [codes(key) for key in ([1, 3], [2, 2], [2, 1], [1, 2**31 + 2], [2**31 + 1, 2])]
        for a, b in itertools.combinations([first, *others], 2):
            assert np.mean(a != b) > 0.2

    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("rule", e2m1.NONSATURATING_RULES)
    def test_unbiased_between_neighbours(self, rule, axis):
        """Random values: the scale bytes are the reference's, the mean error is chance's."""
        x = np.random.default_rng(2).standard_normal((256, 256)).astype(F32)
        e = Encoding(rule, True, 32, "block")
        codes, scales = run(x, {axis: e})
        nearest, want = reference(x, {axis: e})
        np.testing.assert_array_equal(scales, want)
        rotated = np.moveaxis(_rotated(x, axis, make_signs(x.shape, axis, e)), axis, 1)
        v = rotated * np.ldexp(1.0, 127 - np.repeat(scales, 32, axis=1).astype(int))
        got, near = (_signed_values(c) for c in (codes, nearest))
        grid = np.array(e2m1.E2M1_VALUES)
        grid = np.concatenate([-grid[:0:-1], grid])
        low = grid[np.searchsorted(grid, v, side="right") - 1]
        high = grid[np.searchsorted(grid, v, side="left")]
        assert np.all((got == low) | (got == high)) and np.mean(got != near) > 0.1
        np.testing.assert_array_equal(np.signbit(got), np.signbit(v))
        deviation = np.sqrt(np.sum((v - low) * (high - v)))
        assert abs(np.sum(got - v)) < 5 * deviation
        # The same by the fraction of a step, in tenths: a wrong slope cancels in the sum.
        fraction = np.where(high > low, (v - low) / np.where(high > low, high - low, 1), 0)
        for tenth in range(10):
            inside = (fraction * 10 // 1 == tenth) & (high > low)
            p = fraction[inside]
            ups = np.count_nonzero(got[inside] == high[inside])
            assert abs(ups - p.sum()) < 5 * np.sqrt(np.sum(p * (1 - p)))


def _rotated(x: np.ndarray, axis: int, signs: np.ndarray | None) -> np.ndarray:
    factors = None if signs is None else jnp.asarray(signs)
    return np.asarray(hadamard_transform(jnp.asarray(x), 32, axis, factors), np.float64)


def _signed_values(packed: np.ndarray) -> np.ndarray:
    codes = e2m1.unpack(jnp.asarray(packed), -1)
    return np.asarray(e2m1.decode(codes, jnp.uint8(127)), np.float64)


class TestPlan:
    @pytest.mark.parametrize(
        ("length", "size", "blocks"),
        [(1, None, 1), (32, None, 1), (33, None, 2), (33, 16, 2), (16, 16, 1), (65, 64, 4)]
        + [(64, 64, 2), (1, 128, 4), (130, 128, 8), (96, 32, 3), (97, 32, 4)],
    )
    def test_count_blocks(self, length, size, blocks):
        assert quantize.count_blocks(length, Encoding(block_size=size)) == blocks

    def test_shapes_and_grid(self):
        encodings = {1: Encoding("ceil", True, 128, "full"), 0: Encoding("even", False, 16)}
        plan = quantize.plan((300, 130), "bfloat16", encodings)
        assert plan.grid == (3 * 2,)
        x = ArraySpec((300, 130), "bfloat16")
        key, signs = ArraySpec((2,), "uint32"), ArraySpec((130,), "int8")
        assert plan.inputs == (x, x, x, signs, key)
        # Axis 0 comes first, in whatever order it was asked for.
        shapes = [(130, 10 * 16), (130, 10), (300, 8 * 16), (300, 8)]
        assert plan.outputs == tuple(ArraySpec(shape, "uint8") for shape in shapes)
        assert plan.scalars == (300, 130, 10, 8)
        assert plan.num_warps == TILE.warps
        single = quantize.plan((300, 130), "float32", {0: Encoding(signs="block", block_size=64)})
        assert single.inputs[1:] == (ArraySpec((64,), "int8"), single.inputs[0])
        assert [o.shape for o in single.outputs] == [(130, 160), (130, 10)]

    def test_plans_are_equal_and_hash_by_their_arguments(self):
        def make(rule: str = "floor", size: int = 32, fast: bool = True, rows: int = 64):
            encodings = {0: Encoding(rule, False, size), 1: Encoding()}
            return quantize.plan((rows, 64), "float32", encodings, fast=fast)

        plans = [make(), make("even"), make(size=64), make(fast=False), make(rows=65)]
        assert len({*plans, make()}) == len(plans)
        assert make() == make() and hash(make()) == hash(make())

    def test_the_order_of_axes_does_not_matter(self):
        a, b = Encoding("even"), Encoding("ceil", False, 16)
        assert quantize.plan((9, 8), "float32", {0: a, 1: b}) == quantize.plan(
            (9, 8), "float32", {1: b, 0: a}
        )
