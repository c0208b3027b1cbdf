"""The entry point from chat messages to prompt ids: validate, write segments, encode."""

from collections.abc import Sequence
from typing import Any, Literal

from k3jax.chat import kimi_linear, xtml
from k3jax.chat.options import DEFAULT_OPTIONS, ChatOptions
from k3jax.chat.segments import Segment, encode_segments
from k3jax.chat.tokenizer import Tokenizer
from k3jax.chat.validate import validate_messages, validate_options

XTML_MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

MEDIA_PAD = "<|media_pad|>"


def chat_format(tokenizer: Tokenizer) -> Literal["xtml", "kimi-linear"]:
    """The chat format of a vocabulary, by the markers it names.

    Raises:
        ValueError: neither K3's nor Kimi-Linear's markers are all present.
    """
    if all(marker in tokenizer.special_ids for marker in XTML_MARKERS):
        return "xtml"
    if all(marker in tokenizer.special_ids for marker in kimi_linear.MARKERS):
        return "kimi-linear"
    raise ValueError(
        "the tokenizer has neither K3's chat markers "
        f"({' '.join(XTML_MARKERS)}) nor Kimi-Linear's ({' '.join(kimi_linear.MARKERS)})"
    )


def chat_segments(
    tokenizer: Tokenizer,
    messages: Any,
    options: ChatOptions = DEFAULT_OPTIONS,
    image_prompts: Sequence[str] | None = None,
) -> list[Segment]:
    """Validate a request and write it as segments in the vocabulary's chat format.

    Raises:
        ValueError: as `encode_chat`.
    """
    checked = validate_messages(messages)
    validate_options(options, checked)
    if chat_format(tokenizer) == "kimi-linear":
        return kimi_linear.build_segments(checked, options)
    return xtml.build_segments(checked, options, image_prompts or (), text_placeholders=False)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Any,
    options: ChatOptions = DEFAULT_OPTIONS,
    image_prompts: Sequence[str] | None = None,
) -> list[int]:
    """Prompt ids of a conversation.

    No text of the request can become a marker id, and a literal image placeholder in it is text.
    Each image leaves one `<|media_pad|>`; see `expand_media_pads`.

    Args:
        messages: OpenAI-style messages; developer counts as system.
        options: what else the request asks for.
        image_prompts: `ProcessedImage.prompt` of each image part, in order.

    Raises:
        ValueError: naming the message index and field, or the option, that is wrong; or that the
            number of image prompts differs from the number of image parts.
    """
    return encode_segments(tokenizer, chat_segments(tokenizer, messages, options, image_prompts))


def expand_media_pads(
    tokenizer: Tokenizer, ids: Sequence[int], num_tokens: Sequence[int]
) -> list[int]:
    """Repeat the n-th `<|media_pad|>` `num_tokens[n]` times: one id per image feature.

    Raises:
        ValueError: the number of pads in `ids` differs from the number of images.
    """
    pad = tokenizer.special_ids.get(MEDIA_PAD)
    found = sum(token == pad for token in ids)
    if found != len(num_tokens):
        raise ValueError(f"{found} {MEDIA_PAD} ids in the prompt for {len(num_tokens)} images")
    counts = iter(num_tokens)
    expanded: list[int] = []
    for token in ids:
        expanded.extend([token] * (next(counts) if token == pad else 1))
    return expanded
