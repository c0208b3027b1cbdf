"""Weights on disk: released safetensors folders and our own Orbax format."""
