"""Weights on disk: released safetensors folders and our own Orbax format."""

from k3jax.weights.hf import load as load_hf
from k3jax.weights.hf_writer import save as save_hf
from k3jax.weights.load import load_model
from k3jax.weights.native import load_native, save_native

__all__ = ["load_hf", "load_model", "load_native", "save_hf", "save_native"]
