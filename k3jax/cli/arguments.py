"""Types that several subcommands share: of arguments, and of what declares them."""

import argparse
import re

type Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_MULTIPLIER = {"": 1, "k": 1 << 10, "m": 1 << 20}


def count(text: str) -> int:
    """Parse a whole number of at least 1, with an optional binary suffix: 4096, 128k, 1m.

    `k` is 1024 and `m` is 1024², as in the names of context lengths; case does not matter.
    Raises `argparse.ArgumentTypeError`, whose message argparse shows, for anything else.
    """
    match = re.fullmatch(r"([0-9]{1,18})([km]?)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number such as 4096, 128k or 1m (k = 1024, m = 1024²)"
        )
    value = int(match[1]) * _MULTIPLIER[match[2]]
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value
