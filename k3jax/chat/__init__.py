"""The text side: tokenizer, chat encoder, output parser, image preprocessing. No JAX."""

from k3jax.chat.encoder import chat_format, encode_chat, expand_media_pads
from k3jax.chat.options import ChatOptions, thinking_from_openai
from k3jax.chat.tokenizer import Tokenizer, TokenStream

__all__ = [
    "ChatOptions",
    "TokenStream",
    "Tokenizer",
    "chat_format",
    "encode_chat",
    "expand_media_pads",
    "thinking_from_openai",
]
