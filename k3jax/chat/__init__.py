"""The text side: tokenizer, chat encoder, output parser, image preprocessing. No JAX."""

from k3jax.chat.deltas import Delta, ParsedOutput, ToolCall, collect
from k3jax.chat.encoder import chat_format, encode_chat, expand_media_pads
from k3jax.chat.image import ImageProcessor, ProcessedImage
from k3jax.chat.options import ChatOptions, thinking_from_openai
from k3jax.chat.parser import OutputParser, parse_output
from k3jax.chat.tokenizer import Tokenizer, TokenStream

__all__ = [
    "ChatOptions",
    "Delta",
    "ImageProcessor",
    "OutputParser",
    "ParsedOutput",
    "ProcessedImage",
    "TokenStream",
    "Tokenizer",
    "ToolCall",
    "chat_format",
    "collect",
    "encode_chat",
    "expand_media_pads",
    "parse_output",
    "thinking_from_openai",
]
