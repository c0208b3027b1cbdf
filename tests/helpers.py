"""Small things that many tests need."""

from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
K3_TINY = GOLDEN / "k3-tiny"
KIMI_LINEAR_TINY = GOLDEN / "kimi-linear-tiny"
