"""Exact, fast Kimi K3 inference in JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3jax.bundled import bundled_model
    from k3jax.chat import ChatOptions, Tokenizer, encode_chat, parse_output
    from k3jax.config import K3Config
    from k3jax.engine.drafts import prompt_lookup
    from k3jax.engine.engine import Engine
    from k3jax.engine.engine_config import EngineConfig
    from k3jax.engine.generate import PromptImages, generate, stream
    from k3jax.engine.request import (
        Completion,
        FinishReason,
        Request,
        SamplingParams,
        TokenEvent,
    )
    from k3jax.text_model import Prompt, TextModel
    from k3jax.weights import load_model

__version__ = "0.1.0"

# Imported when first used, so that `import k3jax` and `k3jax --help` do not wait for JAX.
_HOMES = {
    "ChatOptions": "k3jax.chat",
    "Completion": "k3jax.engine.request",
    "Engine": "k3jax.engine.engine",
    "EngineConfig": "k3jax.engine.engine_config",
    "FinishReason": "k3jax.engine.request",
    "K3Config": "k3jax.config",
    "Prompt": "k3jax.text_model",
    "PromptImages": "k3jax.engine.generate",
    "Request": "k3jax.engine.request",
    "SamplingParams": "k3jax.engine.request",
    "TextModel": "k3jax.text_model",
    "TokenEvent": "k3jax.engine.request",
    "Tokenizer": "k3jax.chat",
    "bundled_model": "k3jax.bundled",
    "encode_chat": "k3jax.chat",
    "generate": "k3jax.engine.generate",
    "load_model": "k3jax.weights",
    "parse_output": "k3jax.chat",
    "prompt_lookup": "k3jax.engine.drafts",
    "stream": "k3jax.engine.generate",
}

__all__ = [
    "ChatOptions",
    "Completion",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "K3Config",
    "Prompt",
    "PromptImages",
    "Request",
    "SamplingParams",
    "TextModel",
    "TokenEvent",
    "Tokenizer",
    "__version__",
    "bundled_model",
    "encode_chat",
    "generate",
    "load_model",
    "parse_output",
    "prompt_lookup",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
