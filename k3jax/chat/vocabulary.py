"""Reads and checks the files of a Kimi vocabulary: ranks, and the names of its special ids."""

import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

NUM_SPECIAL = 256
"""Special ids that follow the base ranks in every Kimi vocabulary (tokenization_kimi.py)."""


def read_ranks(path: str | Path) -> dict[bytes, int]:
    """Parse a `tiktoken.model` file: one `base64(token bytes) rank` per line.

    Raises:
        ValueError: naming file and line, for a malformed line, a token or a rank given twice.
    """
    ranks: dict[bytes, int] = {}
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token64, rank = line.split()
            ranks[binascii.a2b_base64(token64, strict_mode=True)] = int(rank)
        except ValueError:
            shown = line[:60].decode("ascii", "backslashreplace")
            raise ValueError(f"{path}:{number}: expected 'base64 rank', found {shown!r}") from None
    filled = sum(1 for line in lines if line.strip())
    if len(ranks) != filled or len(set(ranks.values())) != filled:
        _raise_first_duplicate(path, lines)
    if not ranks:
        raise ValueError(f"{path}: no ranks in the file")
    return ranks


def _raise_first_duplicate(path: str | Path, lines: Sequence[bytes]) -> None:
    first: dict[tuple[str, str], int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        token64, rank = line.split()
        for key in (("token", token64.decode()), ("rank", str(int(rank)))):
            if key in first:
                raise ValueError(
                    f"{path}:{number}: duplicate {' '.join(key)}, first on line {first[key]}"
                )
            first[key] = number


def check_ranks(ranks: Mapping[bytes, int]) -> None:
    """Raise ValueError unless the ranks are 0..n-1 and every byte has one."""
    values = set(ranks.values())
    if values != set(range(len(ranks))):
        missing = min(set(range(len(ranks))) - values)
        raise ValueError(
            f"{len(ranks)} ranks must be exactly 0..{len(ranks) - 1}, but {missing} is missing"
        )
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise ValueError(f"byte 0x{byte:02x} has no rank of its own, so it cannot be encoded")


def name_specials(num_base: int, special_names: Mapping[int, str]) -> Mapping[str, int]:
    """Name to id of all `NUM_SPECIAL` ids; those not in `special_names` (id to name) are reserved.

    Raises:
        ValueError: an id that is no special id, an empty name, or a name used twice.
    """
    end = num_base + NUM_SPECIAL
    for token, name in special_names.items():
        if not num_base <= token < end:
            clash = "collides with a base rank" if 0 <= token < num_base else "is out of range"
            raise ValueError(
                f"special token {name!r} has id {token}, which {clash}: "
                f"{num_base} ranks leave ids {num_base}..{end - 1}"
            )
    ids: dict[str, int] = {}
    for token in range(num_base, end):
        name = special_names.get(token, f"<|reserved_token_{token}|>")
        if not name:
            raise ValueError(f"special token {token} has an empty name")
        if name in ids:
            raise ValueError(f"special token name {name!r} is used by ids {ids[name]} and {token}")
        ids[name] = token
    return MappingProxyType(ids)


def special_names_of(config: Any) -> dict[int, str]:
    """Id to name from `added_tokens_decoder` of a parsed tokenizer_config.json.

    Raises:
        ValueError: the field is missing or an entry is malformed.
    """
    added = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(added, dict):
        raise ValueError("added_tokens_decoder is missing")
    names: dict[int, str] = {}
    for key, entry in added.items():
        content = entry.get("content") if isinstance(entry, dict) else entry
        if not key.isdecimal() or not isinstance(content, str):
            raise ValueError(f"added_tokens_decoder[{key!r}] needs an integer id and a content")
        names[int(key)] = content
    return names


def token_name(config: Mapping[str, Any], key: str) -> str | None:
    """A token named by a config field, written as a string or as `{"content": …}`.

    Raises:
        ValueError: it is neither of the two, nor absent.
    """
    value = config.get(key)
    name = value.get("content") if isinstance(value, dict) else value
    if not isinstance(name, str | None):
        raise ValueError(f"{key} must be a token name, not {value!r}")
    return name
