"""Byte-level BPE tokenizer of Kimi checkpoints, read from `tiktoken.model` and its config."""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import tiktoken

from k3jax.chat.vocabulary import (
    NUM_SPECIAL,
    check_ranks,
    name_specials,
    read_ranks,
    special_names_of,
    token_name,
)

MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
"""The released tokenizer cuts its input at these lengths; a cut is a forced token boundary."""

TURN_END_NAMES = ("<|end_of_msg|>", "<|im_end|>")
"""Markers that end an assistant turn whatever the config calls eos (K3, Kimi-Linear)."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Pre-tokenisation alternatives, in the order of tokenization_kimi.py (fancy-regex syntax)."""

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_RUN = re.compile(r"\s+|\S+")


class Tokenizer:
    """Text to ids and back.

    Ids `0..num_base-1` are BPE ranks; the `NUM_SPECIAL` ids above them are markers. `encode` can
    never produce a marker; `encode_control` is for text written by this program only.

    Attributes:
        num_base: number of BPE ranks.
        vocab_size: `num_base + NUM_SPECIAL`.
        special_ids: marker name to id, all `NUM_SPECIAL` of them.
        bos_id, pad_id, unk_id: ids named by the config, None when it names none.
        eos_ids: ids that end a turn: the config's eos token and the turn-end markers present.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        special_names: Mapping[int, str] = MappingProxyType({}),
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
    ) -> None:
        """Build from parsed tables.

        Args:
            ranks: token bytes to rank; ranks are exactly 0..n-1 and cover all 256 single bytes.
            special_names: id to name for the named markers; the others of the 256 ids are called
                `<|reserved_token_{id}|>`.

        Raises:
            ValueError: gaps in the ranks, a missing byte, a marker id outside its range, a marker
                name used twice, or a bos/eos/pad/unk name that is no marker.
        """
        self.num_base = len(ranks)
        self.vocab_size = self.num_base + NUM_SPECIAL
        check_ranks(ranks)
        self.special_ids = name_specials(self.num_base, special_names)
        self._encoding = tiktoken.Encoding(
            "kimi",
            pat_str=PATTERN,
            mergeable_ranks=dict(ranks),
            special_tokens=dict(self.special_ids),
        )
        self._special_names = frozenset(self.special_ids)
        self.bos_id = self._named_id("bos_token", bos_token)
        self.pad_id = self._named_id("pad_token", pad_token)
        self.unk_id = self._named_id("unk_token", unk_token)
        eos_id = self._named_id("eos_token", eos_token)
        ends = [self.special_ids[name] for name in TURN_END_NAMES if name in self.special_ids]
        self.eos_ids = tuple(sorted({*ends, *([] if eos_id is None else [eos_id])}))

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Read `tiktoken.model` and `tokenizer_config.json` of a checkpoint folder.

        Raises:
            FileNotFoundError: one of the two files is missing.
            ValueError: a malformed line (named by file and number), a duplicate rank or token, or
                a config whose marker ids collide with the ranks.
        """
        folder = Path(path)
        model, config_path = folder / "tiktoken.model", folder / "tokenizer_config.json"
        for file in (model, config_path):
            if not file.is_file():
                raise FileNotFoundError(f"tokenizer file {file} does not exist")
        ranks = read_ranks(model)
        try:
            config = json.loads(config_path.read_bytes())
            names = special_names_of(config)
            tokens = {key: token_name(config, key) for key in _NAMED_TOKENS}
        except ValueError as error:
            raise ValueError(f"{config_path}: {error}") from None
        try:
            return cls(ranks, names, **tokens)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; marker names in it are text and stay text."""
        ids: list[int] = []
        for piece in _cut(text):
            ids.extend(self._encoding.encode_ordinary(piece))
        return ids

    def encode_control(self, text: str) -> list[int]:
        """Ids of a control segment: marker names become their ids. Never pass untrusted text."""
        ids: list[int] = []
        for piece in _cut(text):
            ids.extend(
                self._encoding.encode(
                    piece, allowed_special=self._special_names, disallowed_special=()
                )
            )
        return ids

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """Bytes of a sequence of ids; markers give their names unless `skip_special`.

        Raises:
            ValueError: an id outside `0..vocab_size-1`.
        """
        return b"".join(
            self.token_bytes(token)
            for token in ids
            if not (skip_special and self.is_special(token))
        )

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of a sequence of ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id (a marker's name for a marker). Raises ValueError out of range."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside 0..{self.vocab_size - 1}")
        return self._encoding.decode_single_token_bytes(int(token))

    def is_special(self, token: int) -> bool:
        """Whether an id is one of the `NUM_SPECIAL` markers."""
        return self.num_base <= token < self.vocab_size

    def _named_id(self, key: str, name: str | None) -> int | None:
        if name is None:
            return None
        if name not in self.special_ids:
            raise ValueError(f"{key} {name!r} is not among the {NUM_SPECIAL} special tokens")
        return self.special_ids[name]


class TokenStream:
    """Incremental `decode`: a character split over tokens comes out whole, with its last token.

    The joined output equals `Tokenizer.decode` of all ids, except that a character whose last
    bytes never arrive is left out instead of becoming U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became certain with this id, often the token's own, possibly empty."""
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def reset(self) -> None:
        """Forget an unfinished character."""
        self._decoder.reset()


def _cut(text: str) -> Iterator[str]:
    """Cut over-long input where the released tokenizer does."""
    for start in range(0, len(text), MAX_ENCODE_CHARS):
        yield from _cut_runs(text[start : start + MAX_ENCODE_CHARS])


def _cut_runs(text: str) -> Iterator[str]:
    if len(text) <= MAX_RUN_CHARS:
        yield text
        return
    start = 0
    for run in _RUN.finditer(text):
        for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
            yield text[start:cut]
            start = cut
    yield text[start:]
