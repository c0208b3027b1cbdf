"""A stand-in for the model: it says what the test wrote, in the model's own ids."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from k3jax.engine.request import FinishReason, SamplingParams
from k3jax.text_model import Prompt, TextModel

END = "<|close|>message<|sep|><|end_of_msg|>"


def said(text: str, thought: str | None = None) -> str:
    """A reply with one text, after a thought if the prompt opened thinking."""
    opened = "" if thought is None else f"{thought}<|close|>think<|sep|><|open|>response<|sep|>"
    return f"{opened}{text}<|close|>response<|sep|>{END}"


def called(name: str, thought: str = "", **arguments: str) -> str:
    """A reply that is one call with string arguments."""
    written = "".join(
        f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    )
    return (
        f"{thought}<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"
        f'<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>{written}'
        f"<|close|>call<|sep|><|close|>tools<|sep|>{END}"
    )


@dataclass
class Script:
    """A token source that gives one reply per prompt.

    A reply that does not end by itself is cut off by length. `interrupt_after` raises what Ctrl-C
    raises once a reply has given so many tokens.
    """

    model: TextModel
    replies: list[str]
    interrupt_after: int | None = None
    prompts: list[str] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)

    def __call__(
        self, prompt: Prompt, sampling: SamplingParams
    ) -> Iterator[tuple[int, FinishReason | None]]:
        self.prompts.append(self.model.tokenizer.decode(prompt.tokens))
        self.sampling.append(sampling)
        ids = self.model.tokenizer.encode_control(self.replies.pop(0))
        for number, token in enumerate(ids, 1):
            reason = None
            if number == len(ids):
                stops = token in self.model.config.eos_token_ids
                reason = FinishReason.STOP if stops else FinishReason.LENGTH
            yield token, reason
            if number == self.interrupt_after:
                raise KeyboardInterrupt
