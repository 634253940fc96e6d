"""Measuring commands: what kernels, layers and training steps cost on the device at hand."""
