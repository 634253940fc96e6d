"""Votes that cotangents carry: equal to what classifying the tensors themselves would give."""

import functools
import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adahop_jax as adahop
from adahop_jax import MatmulStrategies, Pattern, Recipe, Strategy, StrategyTable
from adahop_jax.calibration import PROBES, new_probe, probe_paths

KEY = jax.random.key(0)
ORDER = (Pattern.ROW, Pattern.COL, Pattern.NONE)
ROW, COL, NONE = ORDER


def planted(pattern: Pattern, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Noise with two strong rows, two strong columns, or neither."""
    m = np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)
    if pattern == ROW:
        m[[3, 11]] *= 20
    if pattern == COL:
        m[:, [5, 17]] *= 20
    return m


def one_hot(*patterns: Pattern) -> np.ndarray:
    return np.array([[p == other for other in ORDER] for p in patterns], np.float32)


@functools.partial(jax.jit, static_argnames="method")
def votes_of(x, kernel, g, method="published"):
    """Votes of one layer, with g planted as the cotangent of its product."""

    def product(probe):
        return adahop.observe(x @ kernel, x, kernel, probe, method)

    _, pull = jax.vjp(product, new_probe())
    return pull(g)[0]


class Net(nn.Module):
    """Two layers and a bias, of either kind."""

    dense: type[nn.Dense] = adahop.Dense

    @nn.compact
    def __call__(self, x):
        h = self.dense(64, name="up")(x)
        return self.dense(48, name="down", use_bias=False)(nn.silu(h))


def net_loss(params, probes, batch):
    x, weights = batch
    return jnp.sum(Net().apply({"params": params, PROBES: probes}, x) * weights)


def batch(i: int, T: int = 40, K: int = 48) -> tuple[jax.Array, jax.Array]:
    """Inputs with strong columns and output weights with strong rows; batch 2 has neither."""
    x, weights = (COL, ROW) if i != 2 else (NONE, NONE)
    return jnp.asarray(planted(x, (T, K), i)), jnp.asarray(planted(weights, (T, 48), i + 50))


@pytest.fixture(scope="module")
def net():
    """(params, probes)."""
    variables = Net().init(KEY, batch(0)[0])
    return variables["params"], variables[PROBES]


net_votes = jax.jit(jax.grad(net_loss, argnums=1))


def assert_votes(got, want) -> None:
    got, want = adahop.votes_by_layer(got), adahop.votes_by_layer(want)
    assert list(got) == list(want)
    for path in want:
        np.testing.assert_array_equal(got[path], want[path])


# --- one layer ---


@pytest.mark.parametrize("method", ["published", "robust"])
@pytest.mark.parametrize(
    ("x", "w", "g"), [(COL, NONE, ROW), (ROW, ROW, COL), (NONE, COL, NONE), (COL, ROW, COL)]
)
def test_votes_of_planted_patterns(x: Pattern, w: Pattern, g: Pattern, method: str) -> None:
    """`w` is the pattern of W [out, in]: the kernel is its transpose."""
    kernel = planted(w, (40, 48), 1).T
    got = votes_of(planted(x, (64, 48)), kernel, planted(g, (64, 40), 2), method)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, one_hot(x, w, g))


def test_all_leading_axes_are_tokens() -> None:
    x, kernel, g = planted(ROW, (64, 48)), planted(NONE, (48, 40), 1), planted(ROW, (64, 40), 2)
    got = votes_of(x.reshape(4, 16, 48), kernel, g.reshape(4, 16, 40))
    np.testing.assert_array_equal(got, one_hot(ROW, NONE, ROW))


@pytest.mark.parametrize("scale", [1e-20, 65536.0, 1e20])
def test_votes_do_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    x, kernel, g = planted(COL, (64, 48)), planted(NONE, (48, 40), 1), planted(ROW, (64, 40), 2)
    np.testing.assert_array_equal(votes_of(x, kernel, g * scale), one_hot(COL, NONE, ROW))


def test_observe_leaves_values_and_gradients_alone() -> None:
    x, kernel, g = (jnp.asarray(planted(NONE, s)) for s in ((12, 8), (8, 6), (12, 6)))

    def with_probe(x, kernel):
        return adahop.observe(x @ kernel, x, kernel, new_probe())

    (y, pull), (want, want_pull) = (
        jax.vjp(jax.jit(f), x, kernel) for f in (with_probe, lambda x, kernel: x @ kernel)
    )
    np.testing.assert_array_equal(y, want)
    for a, b in zip(pull(g), want_pull(g), strict=True):
        np.testing.assert_array_equal(a, b)


# --- a model ---


def test_votes_equal_classified_tensors(net) -> None:
    """x, W^T and g of a plain Flax model, g found by adding zeros to each product."""
    params, probes = net

    def plain(shifts, x):
        up, down = params["up"], params["down"]
        products = {"up": x @ up["kernel"] + shifts["up"]}
        h = nn.silu(products["up"] + up["bias"])
        y = h @ down["kernel"] + shifts["down"]
        return y, {"up": x, "down": h}

    gradient = jax.jit(
        lambda x, weights: jax.grad(
            lambda shifts: (jnp.sum(plain(shifts, x)[0] * weights), plain(shifts, x)[1]),
            has_aux=True,
        )({"up": jnp.zeros((40, 64)), "down": jnp.zeros((40, 48))})
    )
    seen = set()
    for i in (0, 2):
        g, inputs = gradient(*batch(i))
        want = {}
        for path in ("down", "up"):
            patterns = adahop.classify([inputs[path], params[path]["kernel"].T, g[path]])
            want[path] = {"votes": one_hot(*patterns)}
            seen |= set(patterns)
        assert_votes(net_votes(params, probes, batch(i)), want)
    assert seen == set(ORDER)


def test_gradients_of_parameters_are_unchanged(net) -> None:
    params, probes = net
    with_probes = jax.jit(jax.grad(net_loss))(params, probes, batch(0))

    def plain(params, batch):
        return jnp.sum(Net(nn.Dense).apply({"params": params}, batch[0]) * batch[1])

    want = jax.jit(jax.grad(plain))(params, batch(0))
    jax.tree.map(np.testing.assert_array_equal, with_probes, want)


def test_micro_batches_add_up(net) -> None:
    """A sum over losses, and an accumulation in a scan, give the sum of the votes."""
    params, probes = net
    batches = [batch(i) for i in range(4)]
    want = jax.tree.map(lambda *v: sum(v), *(net_votes(params, probes, b) for b in batches))
    assert {tuple(r) for v in adahop.votes_by_layer(want).values() for r in np.asarray(v)} != {
        (0, 0, 4)
    }
    summed = jax.jit(jax.grad(lambda probes: sum(net_loss(params, probes, b) for b in batches)))(
        probes
    )
    assert_votes(summed, want)

    stacked = jax.tree.map(lambda *b: jnp.stack(b), *batches)
    accumulated, _ = jax.jit(
        lambda: jax.lax.scan(
            lambda total, b: (
                jax.tree.map(jnp.add, total, jax.grad(net_loss, 1)(params, probes, b)),
                None,
            ),
            probes,
            stacked,
        )
    )()
    assert_votes(accumulated, want)

    def mean_loss(probes):
        return jax.lax.scan(
            lambda total, b: (total + net_loss(params, probes, b) / 4, None), 0.0, stacked
        )[0]

    assert_votes(jax.jit(jax.grad(mean_loss))(probes), want)


def test_once_per_step_under_remat_and_vmap(net) -> None:
    params, probes = net
    want = net_votes(params, probes, batch(0))
    remat = jax.checkpoint(net_loss)
    assert_votes(jax.jit(jax.grad(remat, 1))(params, probes, batch(0)), want)

    stacked = jax.tree.map(lambda *b: jnp.stack(b), batch(0), batch(2))
    mapped = jax.jit(jax.grad(lambda p: jax.vmap(lambda b: net_loss(params, p, b))(stacked).sum()))(
        probes
    )
    both = jax.tree.map(jnp.add, want, net_votes(params, probes, batch(2)))
    assert_votes(mapped, both)


def test_unused_layer_has_no_votes(net) -> None:
    params, probes = net

    def loss(probes):
        x, _ = batch(0)
        up = {"params": params["up"], PROBES: probes["up"]}
        return jnp.sum(adahop.Dense(64).apply(up, x))

    votes = jax.jit(jax.grad(loss))(probes)
    with pytest.raises(ValueError, match="layer 'down' has no votes"):
        adahop.patterns_from_votes(votes)


# --- from votes to a table ---


def counts(x, w, g) -> dict:
    return {"votes": np.array([x, w, g], np.float32)}


def test_majority() -> None:
    votes = {
        "a": counts((5, 3, 2), (1, 6, 3), (0, 1, 9)),
        "b": {"c": counts((15, 15, 0), (0, 10, 10), (7, 0, 7))},
    }
    assert adahop.patterns_from_votes(votes) == {
        "a": {"x": ROW, "w": COL, "g": NONE},
        "b/c": {"x": NONE, "w": NONE, "g": NONE},
    }
    # A tie below the winner is none; averages count as sums do.
    tied = {"a": counts((2, 2, 5), (0.3, 0.3, 0.4), (0.5, 0.25, 0.25))}
    assert adahop.patterns_from_votes(tied) == {"a": {"x": NONE, "w": NONE, "g": ROW}}


def test_stacked_votes_count_together() -> None:
    stacked = {"votes": np.stack([one_hot(COL, NONE, ROW)] + [one_hot(ROW, COL, NONE)] * 2)}
    assert adahop.patterns_from_votes({"a": stacked}) == {"a": {"x": ROW, "w": COL, "g": NONE}}


def test_votes_that_give_no_pattern() -> None:
    with pytest.raises(ValueError, match="layer 'a/b' has no votes"):
        adahop.patterns_from_votes({"a": {"b": counts((0, 0, 0), (0, 0, 0), (0, 0, 0))}})
    with pytest.raises(ValueError, match="no adahop_jax layer made"):
        adahop.patterns_from_votes({"a": np.zeros((3, 3))})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("tensor", ["x", "w", "g"])
def test_nan_is_named(tensor: str, bad: float) -> None:
    tensors = {
        "x": planted(COL, (64, 48)),
        "w": planted(NONE, (48, 40)),
        "g": planted(ROW, (64, 40)),
    }
    tensors[tensor][2, 3] = bad
    votes = {"deep": {"up": {"votes": votes_of(tensors["x"], tensors["w"], tensors["g"])}}}
    good = {"deep": {"up": counts((0, 1, 0), (0, 0, 1), (1, 0, 0))}}
    total = jax.tree.map(jnp.add, votes, good)
    with pytest.raises(ValueError, match=f"infinity in {tensor} of layer 'deep/up'"):
        adahop.patterns_from_votes(total)


S = Strategy


@pytest.mark.parametrize(
    ("patterns", "lv1", "lv2"),
    [
        # y: x row/col/none against opp(W); gx: g against W; gw: opp(g) against x.
        ((COL, NONE, ROW), (S.IHT, S.IHT_OE_LEFT, S.IHT_OE_RIGHT), (S.IHT, S.IHT_OE_LEFT, S.BF16)),
        ((ROW, COL, NONE), (S.IHT, S.IHT_OE_RIGHT, S.IHT), (S.IHT, S.IHT_OE_RIGHT, S.IHT)),
        (
            (ROW, ROW, COL),
            (S.IHT_OE_RIGHT, S.IHT, S.IHT),
            (S.IHT_OE_RIGHT, S.IHT, S.IHT),
        ),
        (
            (NONE, COL, COL),
            (S.IHT, S.IHT_OE_RIGHT, S.IHT_OE_LEFT),
            (S.IHT, S.BF16, S.IHT_OE_LEFT),
        ),
    ],
    ids=lambda p: "-".join(p),
)
def test_table_of_planted_patterns(patterns, lv1, lv2) -> None:
    x, w, g = patterns
    votes = votes_of(planted(x, (64, 48)), planted(w, (40, 48), 1).T, planted(g, (64, 40), 2))
    for level, want in (("lv1", lv1), ("lv2", lv2)):
        recipe = Recipe(policy=level, k=7)
        table = adahop.table_from_votes({"block": {"up": {"votes": votes}}}, recipe)
        assert table == StrategyTable({"block/up": MatmulStrategies(*want, k=7)})


def test_uniform_policies_need_no_votes() -> None:
    for policy in ("bf16", "plain", "iht"):
        table = adahop.table_from_votes({}, Recipe(policy=policy))
        assert table == StrategyTable.uniform(policy)


# --- calibrate ---


@pytest.mark.parametrize("has_aux", [False, True])
def test_calibrate(net, has_aux: bool) -> None:
    """Takes as many batches as the recipe says, from one trace, and sums their votes."""
    params, probes = net
    taken, traces = [], []

    def batches():
        for i in range(10):
            taken.append(i)
            yield batch(i)

    def loss(params, probes, b):
        traces.append(1)
        value = net_loss(params, probes, b)
        return (value, {"tokens": 40}) if has_aux else value

    recipe = Recipe(calibration_steps=4, k=5)
    table, votes = adahop.calibrate(loss, params, probes, batches(), recipe, has_aux=has_aux)
    assert (taken, len(traces)) == ([0, 1, 2, 3], 1)
    each = [net_votes(params, probes, batch(i)) for i in range(4)]
    assert_votes(votes, jax.tree.map(lambda *v: sum(v), *each))
    assert table == adahop.table_from_votes(votes, recipe)
    assert list(table) == ["down", "up"]
    assert table["up"] == MatmulStrategies.from_patterns(
        **adahop.patterns_from_votes(votes)["up"], level=2, k=5
    )
    assert adahop.patterns_from_votes(votes)["up"]["x"] == COL
    assert adahop.patterns_from_votes(votes)["down"]["g"] == ROW


def test_calibrate_needs_batches_and_finite_tensors(net) -> None:
    params, probes = net
    with pytest.raises(ValueError, match="batches is empty"):
        adahop.calibrate(net_loss, params, probes, [], Recipe())
    x, weights = batch(0)
    with pytest.raises(ValueError, match="in x of layer"):
        adahop.calibrate(net_loss, params, probes, [(x.at[1, 2].set(jnp.nan), weights)], Recipe())


def test_classifier_of_the_recipe_is_used() -> None:
    """A strong row beside a strong column tells the two methods apart."""
    x = planted(NONE, (64, 48))
    x[:, 5] *= 20
    x[7] *= 20
    tensors = {m: adahop.classify(jnp.asarray(x), m) for m in ("published", "robust")}
    assert tensors["published"] != tensors["robust"]
    for method, pattern in tensors.items():
        layer = adahop.Dense(40, recipe=Recipe(classifier=method))
        variables = layer.init(KEY, x)
        votes = jax.jit(jax.grad(lambda v: jnp.sum(layer.apply(v, x) ** 2)))(variables)[PROBES]  # noqa: B023
        np.testing.assert_array_equal(votes["votes"][:1], one_hot(pattern))


def test_paths() -> None:
    probes = {"block_0": {"mlp": {"up": {"votes": new_probe()}}, "votes": {"votes": new_probe()}}}
    assert probe_paths(probes) == ["block_0/mlp/up", "block_0/votes"]


# --- sharding ---

_SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import adahop_jax as adahop
from test_calibration import Net, batch, net_loss, KEY, PROBES

variables = Net().init(KEY, batch(0)[0])
found = []
for shape in ((1, 1), (8, 1), (2, 4)):
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = Mesh(devices, ("data", "model"))
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    kernels = jax.tree.map(
        lambda p: put(p, P(None, "model") if p.ndim == 2 else P()), variables["params"]
    )
    # Strong rows are in one shard of the data alone: classified by shards they would be outvoted.
    data = [put(batch(i), P("data")) for i in (0, 2)]
    votes = jax.jit(jax.grad(net_loss, argnums=1))
    total = [votes(kernels, put(variables[PROBES], P()), b) for b in data]
    found.append(jax.tree.map(lambda *v: np.asarray(sum(v)), *total))
assert len(jax.devices()) == 8
for other in found[1:]:
    jax.tree.map(np.testing.assert_array_equal, other, found[0])
for votes in adahop.votes_by_layer(found[0]).values():
    np.testing.assert_array_equal(votes.sum(-1), 2)
print("equal votes")
"""


def test_votes_of_sharded_arrays_are_global() -> None:
    here = pathlib.Path(__file__).parent
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(adahop.__file__).parents[1]), str(here)]),
    }
    run = subprocess.run(
        [sys.executable, "-c", _SHARDED], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "equal votes\n"


def test_no_votes_at_all():
    with pytest.raises(ValueError, match="votes is empty: the model has no adahop_jax layers"):
        adahop.table_from_votes({}, adahop.Recipe())
