"""Structured output: grammars compiled beside the event loop, masks made by llguidance."""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.tiktoken import lltokenizer_from_encoding

from k3jax.chat.json_schema import check_schema
from k3jax.chat.tokenizer import Tokenizer
from serving.grammar_trial import MAX_SECONDS, TooExpensive, try_grammar
from serving.large_stack import on_large_stack
from serving.structural_tag import tag_to_lark
from serving.turns import Channel, open_channel
from serving.wire import ConstraintText, FieldError

MAX_TEXT = 1 << 20
"""Characters of a schema or grammar."""

COMPILED_KEPT = 256

_THINK = 'TEXT <|close|> "think" <|sep|> <|open|> "response" <|sep|> '
_END = ' <|close|> "response" <|sep|> <|close|> "message" <|sep|>'


class GrammarFailed(RuntimeError):
    """A grammar could not be followed any further."""


class GrammarConstraint:
    """One sequence's place in a compiled grammar; see `k3jax.engine.request.TokenConstraint`.

    Once the grammar is at its end, only end ids are allowed. One that runs out of its limits in the
    middle of an answer raises GrammarFailed, which ends the request and no other.
    """

    def __init__(self, start: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._start, self._vocab_size, self._eos_ids = start, vocab_size, tuple(eos_ids)
        self._matcher = start.deep_copy()
        self._ended = False
        self._num_bytes = 4 * -(-vocab_size // 32)

    def fork(self) -> GrammarConstraint:
        """A fresh copy at the start of the grammar."""
        return GrammarConstraint(self._start, self._vocab_size, self._eos_ids)

    def mask(self) -> bytes:
        """One bit per id, little-endian, padded to whole 32-bit words."""
        if not self._ended:
            mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise GrammarFailed(_reason(self._matcher.get_error()))
            return mask[: self._num_bytes]
        allowed = bytearray(self._num_bytes)
        for token in self._eos_ids:
            allowed[token // 8] |= 1 << token % 8
        return bytes(allowed)

    def accept(self, token: int) -> None:
        """Go on by an id that the last mask allowed. Raises GrammarFailed for any other one."""
        self._ended = self._ended or token in self._eos_ids
        if not self._ended and not self._matcher.consume_token(token):
            raise GrammarFailed(_reason(self._matcher.get_error()))


class ConstraintCompiler:
    """Compiles constraints for one vocabulary, on threads of its own, and remembers them.

    There are more threads than processors: most of the time they wait for a trial.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        *,
        num_threads: int = 8,
        max_seconds: int = MAX_SECONDS,
    ) -> None:
        """`max_seconds` of processor time are what compiling a constraint may take."""
        self._max_seconds = max_seconds
        self._tokenizer, self._eos_ids = tokenizer, tuple(eos_ids)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="k3jax-grammar")
        self._compiled: OrderedDict[str, GrammarConstraint] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None

    async def compile(self, text: ConstraintText, prompt: Sequence[int]) -> GrammarConstraint:
        """The constraint for an answer to `prompt`, which may be thought about first.

        Raises FieldError naming the keyword, node or position that cannot be done.
        """
        loop = asyncio.get_running_loop()
        channel = open_channel(self._tokenizer, prompt)
        lark = await loop.run_in_executor(self._threads, to_lark, text, channel)
        if lark not in self._compiled:
            where = f"sampling_params.{text.kind}"
            self._compiled[lark] = await loop.run_in_executor(
                self._threads, self._compile, lark, where
            )
        return self._known(lark)

    def compile_now(self, text: ConstraintText, prompt: Sequence[int]) -> GrammarConstraint:
        """`compile`, for programs without an event loop."""
        lark = to_lark(text, open_channel(self._tokenizer, prompt))
        if lark not in self._compiled:
            self._compiled[lark] = self._compile(lark, f"sampling_params.{text.kind}")
        return self._known(lark)

    def _known(self, lark: str) -> GrammarConstraint:
        self._compiled.move_to_end(lark)
        while len(self._compiled) > COMPILED_KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[lark].fork()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, lark: str, where: str) -> GrammarConstraint:
        try:
            tokenizer = self._tokenizer
            try_grammar(lark, tokenizer.special_ids, tokenizer.vocab_size, self._max_seconds)
        except TooExpensive as error:
            raise FieldError(where, str(error)) from None
        vocabulary = self._load_vocabulary()
        matcher = on_large_stack(lambda: LLMatcher(vocabulary, lark, log_level=0))
        if matcher.is_error():
            raise FieldError(where, _reason(matcher.get_error()))
        return GrammarConstraint(matcher, self._tokenizer.vocab_size, self._eos_ids)

    def _load_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = lltokenizer_from_encoding(
                self._tokenizer._encoding,
                n_vocab=self._tokenizer.vocab_size,
                eos_token=list(self._eos_ids),
            )
        return self._vocabulary


def to_lark(text: ConstraintText, channel: Channel | None) -> str:
    """The whole grammar of an answer, in llguidance's dialect of Lark.

    JSON, a regular expression or a grammar describes the response; around it go the end of the
    thinking that the prompt may have begun, and the end of the message. A structural tag describes
    the whole answer. Raises FieldError.
    """
    where = f"sampling_params.{text.kind}"
    if len(text.text) > MAX_TEXT:
        raise FieldError(where, f"{len(text.text)} characters, expected at most {MAX_TEXT}")
    try:
        if text.kind == "structural_tag":
            return tag_to_lark(_json(text.text), channel)
        body = _body(text)
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(where, str(error)) from None
    if channel is None:
        return f"%llguidance {{}}\nstart: body\n{body}\n"
    before = _THINK if channel == "think" else ""
    return f"%llguidance {{}}\nstart: {before}body{_END}\nTEXT: /(.|\\n)*/\n{body}\n"


def _body(text: ConstraintText) -> str:
    match text.kind:
        case "json_schema":
            schema = _json(text.text)
            if not isinstance(schema, dict | bool):
                raise ValueError(f"expected a JSON schema, not {type(schema).__name__}")
            check_schema(schema, "schema")
            return f"body: %json {json.dumps(schema)}"
        case "regex":
            return f"body: /{regex_to_lark(text.text)}/"
        case _:
            try:
                lark = any_to_lark(text.text)
            except Exception as error:  # the converter raises its own and several others
                raise ValueError(f"no grammar that can be read: {error}") from None
            return f"body: %lark {{\n{lark}\n}}"


def _reason(error: str) -> str:
    """llguidance's error without its positions in a grammar that the caller has not written."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", lines[0])
    why = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = text.replace(" (in regex): regex parse error:", f": {why[0]}" if why else "")
    return text.replace("Unimplemented keys: ", "cannot enforce the keywords ")


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
