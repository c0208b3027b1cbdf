"""The k3jax.v1 protocol, and the code that `scripts/generate_protos.sh` wrote from it.

The code is committed so that installing needs no compiler of protocols; a test renews it.
"""
