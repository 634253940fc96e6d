"""Implementations of the whole-array operations: see `base.Backend`."""

from adahop_jax.backends.base import Backend, Quantizer, Request, choose_backend

__all__ = ["Backend", "Quantizer", "Request", "choose_backend"]
