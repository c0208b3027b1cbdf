"""The tokenizer of k3-nano: a small byte-pair vocabulary in K3's layout, learnt from its corpus."""

import base64
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import regex

from k3jax.chat.tokenizer import PATTERN
from k3jax.chat.vocabulary import NUM_SPECIAL

SPECIAL_NAMES: dict[int, str] = {
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
    6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>",
    19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>", 65: "<osagent_mode>",
    254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
"""K3's marker names by their distance from the first special id."""

FILES = ("tiktoken.model", "tokenizer_config.json", "generation_config.json")

STRUCTURE = ("<|open|>", "<|close|>", "<|sep|>")
"""Markers that K3 declares as not special, so that decoding keeps them."""

COMMON_WORDS = (
    "the of and to in is was for on with as at by from it that this be are or an not you have had "
    "but his they she which we there can all their if would about so what has when more no out up "
    "into them then its only some could these two may first any my now such like our over man even "
    "most me also did many before must through back where much your way well down should because "
    "each just those people too how little state good very make world still own see men work long "
    "here between both life being under never same another know while last might us great old year "
    "off come since against go came right used take three"
).split()
"""Fill the vocabulary up to its size, so that other text is not spelt letter by letter."""

_PIECE = regex.compile(PATTERN, regex.V1)
_WORD = regex.compile(r"([^\r\n\p{L}\p{N}]?)(\p{L}+)", regex.V1)


def learn(texts: Iterable[str], num_base: int, min_count: int = 3) -> list[bytes]:
    """Learn `num_base` tokens in rank order: 256 bytes, then merges.

    Every word and punctuation run that occurs `min_count` times becomes one token, words also
    with a leading space. Digits never merge, and a word never merges with the sign before it, so
    a copied word or number looks the same wherever it stands. All merges with a space come last:
    a word's inside is always merged before its space.

    Raises:
        ValueError: `num_base` is too small for the words, or too large for what there is to learn.
    """
    counts = Counter(piece for text in texts for piece in _PIECE.findall(text))
    inner: Counter[bytes] = Counter()
    spaced: set[bytes] = set()
    for piece, count in counts.items():
        if count < min_count or any(char.isdigit() for char in piece):
            continue
        word = _WORD.fullmatch(piece)
        inner[(word[2] if word else piece).encode()] += count
        if word and word[1] == " ":
            spaced.add(word[2].encode())
    merges = _merge_all(inner)
    fill = [word.encode() for word in COMMON_WORDS if word.encode() not in spaced]
    needed = len(merges) + len(spaced)
    if 256 + needed > num_base:
        raise ValueError(f"{num_base} ranks cannot hold 256 bytes and {needed} merges")
    while fill:
        more = _merge_all(Counter({word: 1 for word in fill}), merges)
        if 256 + len(more) + len(spaced) + len(fill) <= num_base:
            merges, spaced = more, spaced | set(fill)
            break
        fill.pop()
    spare = num_base - 256 - len(merges) - len(spaced)
    loose = [word for word in merges if word.isalpha() and word not in spaced]
    if spare > len(loose):
        raise ValueError(f"{num_base} ranks are {spare - len(loose)} more than there is to learn")
    spaced |= set(loose[:spare])
    return [bytes([byte]) for byte in range(256)] + merges + [b" " + one for one in sorted(spaced)]


def _merge_all(pieces: Counter[bytes], known: list[bytes] | None = None) -> list[bytes]:
    """Merge the most frequent pair (first in byte order if tied) until every piece is one token."""
    merges = list(known or ())
    split = {piece: tuple(bytes([byte]) for byte in piece) for piece in pieces}
    for merged in merges:
        split = {piece: _apply(parts, merged) for piece, parts in split.items()}
    while True:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for parts in split.values():
            pairs.update(itertools.pairwise(parts))
        if not pairs:
            return merges
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(left + right)
        split = {piece: _apply(parts, left + right) for piece, parts in split.items()}


def _apply(parts: tuple[bytes, ...], merged: bytes) -> tuple[bytes, ...]:
    """Join neighbours that form `merged`, from the left."""
    if len(parts) == 1:
        return parts
    joined: list[bytes] = []
    index = 0
    while index < len(parts):
        if index + 1 < len(parts) and parts[index] + parts[index + 1] == merged:
            joined.append(merged)
            index += 2
        else:
            joined.append(parts[index])
            index += 1
    return tuple(joined)


def write(folder: Path, tokens: list[bytes]) -> None:
    """Write `tiktoken.model`, `tokenizer_config.json` and `generation_config.json`."""
    base = len(tokens)
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    added = {
        str(base + offset): {"content": name, "special": name not in STRUCTURE}
        for offset, name in SPECIAL_NAMES.items()
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": 8192,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"eos_token_id": [base + 1, base + 2], "temperature": 1.0, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    assert max(SPECIAL_NAMES) < NUM_SPECIAL


def copy(source: Path, target: Path) -> None:
    """Copy the files that `write` makes."""
    for name in FILES:
        if source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
