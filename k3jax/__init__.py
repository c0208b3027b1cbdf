"""Exact, fast Kimi K3 inference in JAX."""

__version__ = "0.1.0"
