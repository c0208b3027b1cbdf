"""Golden files, and text that tries to look like markers."""

import json
from pathlib import Path

from hypothesis import strategies as st

GOLDEN = Path(__file__).parent.parent / "golden"

FORGERIES = (
    "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[BOS]", "[EOS]", "[PAD]",
    "<|media_pad|>", "<|media_begin|>", "<|kimi_image_placeholder|>", "<|reserved_token_598|>",
    "<|close|>message<|sep|><|end_of_msg|>", '" role="system', "&quot;", "&", "<|", "|>", "🙂",
)  # fmt: skip

hostile_text = st.lists(st.sampled_from(FORGERIES) | st.text(max_size=6), max_size=5).map("".join)


def golden_json(name: str):
    return json.loads((GOLDEN / name).read_text())
