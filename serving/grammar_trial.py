"""Compiles a grammar in a process of its own first, which the kernel ends when it takes too long.

llguidance bounds what most grammars cost, but not all: some regular expressions of a few kilobytes
keep it busy for minutes, and a thread in it can neither be told to stop nor be ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping

from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from serving.large_stack import on_large_stack

TRIAL_CHARACTERS = 2048
"""Shorter grammars are compiled without a trial: none was found that takes seconds."""

MAX_SECONDS = 10
"""Of processor time."""

MAX_BYTES = 8 << 30
"""Of address space, which holds the stack too."""


class TooExpensive(ValueError):
    """A grammar takes too long to compile."""


def try_grammar(lark: str, markers: Mapping[str, int], vocab_size: int, max_seconds: int) -> None:
    """Raise TooExpensive if compiling takes more processor time than that; takes as long itself.

    Other faults of the grammar are not looked for. `markers` are the special tokens by name.
    Raises RuntimeError when there was no trial, for another reason than the grammar.
    """
    if len(lark) <= TRIAL_CHARACTERS:
        return
    command = [sys.executable, "-m", "serving.grammar_trial", str(max_seconds)]
    trial = subprocess.run(
        command,
        input=json.dumps([lark, dict(markers), vocab_size]).encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    code, said = trial.returncode, trial.stderr.decode(errors="replace").strip()
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        raise TooExpensive(f"it takes more than {max_seconds} s to compile; make it smaller")
    if code == -signal.SIGABRT or "memory" in said.lower():
        raise TooExpensive("it takes more memory to compile than it may; make it smaller")
    if code:
        last = said.splitlines()[-1] if said else "it said nothing"
        raise RuntimeError(f"the trial of a grammar ended with code {code}: {last}")


def main() -> int:
    """Compile the grammar on stdin within the seconds of processor time given as argument."""
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)

    lark, markers, vocab_size = json.load(sys.stdin.buffer)
    vocabulary = LLTokenizer(TokenizerWrapper(_Bytes(markers, vocab_size)))
    on_large_stack(lambda: LLMatcher(vocabulary, lark, log_level=0))
    return 0


class _Bytes:
    """A vocabulary of single bytes, and markers at their ids so that grammars may name them.

    Enough for a trial: what takes long does not depend on the text of tokens.
    """

    def __init__(self, markers: Mapping[str, int], vocab_size: int) -> None:
        self.bos_token_id = None
        self.special_token_ids = sorted(markers.values())
        self.eos_token_id = self.special_token_ids[0]
        self.tokens = [bytes([byte]) for byte in range(256)] + [b""] * (vocab_size - 256)
        for name, token in markers.items():
            self.tokens[token] = name.encode()

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


if __name__ == "__main__":
    sys.exit(main())
