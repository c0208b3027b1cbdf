"""Types of arguments that several scripts share."""

from k3jax.cli.arguments import count


def counts(text: str) -> list[int]:
    """Parse whole numbers of at least 1 between commas; nothing at all is an empty list.

    Raises `argparse.ArgumentTypeError`, whose message argparse shows, for anything else.
    """
    return [count(part) for part in text.split(",")] if text else []
