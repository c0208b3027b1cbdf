"""What runs between sublayers: the residual sum, its mixture over depth, RMSNorm."""

from pallas_kernels.residual.mix import residual_mix
from pallas_kernels.residual.mix_xla import mixture, rms_norm

__all__ = ["mixture", "residual_mix", "rms_norm"]
