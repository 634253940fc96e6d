"""MXFP4 kernels in Triton, for any framework that can launch one.

A module here holds kernels and functions that plan their launches: from shapes and dtypes to a
`Launch`, plain data. JAX (`adahop_jax.backends.triton`), the interpreter (`interpreter`) and the
ahead-of-time compiler (`aot`) run the same plans. Nothing here imports JAX or torch.
"""
