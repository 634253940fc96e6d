"""How a backend is chosen, and that each one is whole."""

import functools

import jax
import jax.numpy as jnp
import pytest

from adahop_jax.backends import Backend, Quantizer, Request, base, choose_backend

NAMES = tuple(base._MODULES)


def test_auto_names_its_reason() -> None:
    backend, reason = choose_backend("auto")
    assert backend.name == "xla"
    assert jax.default_backend() in reason
    assert reason.endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_by_name(name: str) -> None:
    backend, reason = choose_backend(name)
    assert backend.name == name
    assert isinstance(backend, Backend)
    assert reason == "named by the caller."
    assert choose_backend(name)[0] is backend


@pytest.mark.parametrize("name", ["cuda", "", "XLA", None])
def test_unknown_names(name) -> None:
    with pytest.raises(ValueError, match=f"backend is {name!r}, but must be one of auto, xla"):
        choose_backend(name)


@pytest.mark.parametrize("name", NAMES)
def test_carrier_is_that_of_the_packed_matrix(name: str) -> None:
    """With or without the packed form in between a product is the same, along either axis."""
    backend, _ = choose_backend(name)
    a = jax.random.normal(jax.random.key(0), (5, 40))
    signs = jax.random.rademacher(jax.random.key(1), (16,), jnp.int8)

    def square(packed, a, quantizer):
        ((rows,), (columns,)) = (
            backend.encode(x, [Request(axis, quantizer, signs, packed=packed)])
            for x, axis in ((a, 1), (a.T, 0))
        )
        return backend.multiply(backend.carrier(rows), backend.carrier(columns), jnp.float32)

    for quantizer in (Quantizer(), Quantizer("rceil", block_size=16)):
        out = [
            jax.jit(square, static_argnums=(0, 2))(packed, a, quantizer) for packed in (False, True)
        ]
        assert out[0].shape == (5, 5)
        assert out[0].dtype == jnp.float32
        assert jnp.array_equal(*out)
        assert jnp.array_equal(out[0], out[0].T)


@pytest.mark.parametrize("name", NAMES)
def test_a_transform_fills_up_its_last_block(name: str) -> None:
    backend, _ = choose_backend(name)
    x = jnp.ones((3, 40))
    for block_size, length in ((None, 40), (16, 48), (128, 128)):
        quantizer = Quantizer(block_size=block_size)
        q = jax.eval_shape(functools.partial(backend.quantize, axis=-1, quantizer=quantizer), x)
        assert q.shape == (3, length)


def test_quantizer_is_a_static_value() -> None:
    assert Quantizer("ceil") == Quantizer("ceil", "nearest", None)
    assert hash(Quantizer("ceil")) == hash(Quantizer("ceil"))
    assert Quantizer("ceil") != Quantizer("ceil", block_size=32)
    with pytest.raises(AttributeError):
        Quantizer().rounding = "stochastic"  # pyright: ignore[reportAttributeAccessIssue]
