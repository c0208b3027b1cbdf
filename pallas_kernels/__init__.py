"""Kernels for Kimi models: arrays in, arrays out. This package knows JAX and nothing else."""
