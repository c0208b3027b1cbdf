"""The `k3jax` console command."""

from k3jax.cli.dispatch import main as main
