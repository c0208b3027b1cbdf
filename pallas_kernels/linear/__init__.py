"""Products of activations `[..., in]` with weights `[out, in]`, float or quantised."""

from pallas_kernels.linear.dispatch import linear, linear_int8, linear_mxfp4
from pallas_kernels.linear.reference import decode_int8, decode_mxfp4

__all__ = ["decode_int8", "decode_mxfp4", "linear", "linear_int8", "linear_mxfp4"]
