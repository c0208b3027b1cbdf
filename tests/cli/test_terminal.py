"""What a person sees: channels on lines of their own, no colour in files, no stray controls."""

import io

import pytest

from k3jax.chat import OutputParser
from k3jax.chat.deltas import Delta
from k3jax.cli.terminal import ReplyPrinter, Style, rate, visible


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(*deltas: Delta, colour: bool = False) -> str:
    out = io.StringIO()
    printer = ReplyPrinter(out, Style(colour))
    for delta in deltas:
        printer.show([delta])
    printer.end()
    return out.getvalue()


def test_channels_are_lines_of_their_own():
    text = printed(
        Delta("reasoning", "I "),
        Delta("reasoning", "think."),
        Delta("content", "It "),
        Delta("content", "is."),
        Delta("call_start", name="get_time", index=0),
        Delta("call_arguments", '{"city": ', index=0),
        Delta("call_arguments", '"Oslo"}', index=0),
        Delta("call_end", index=0),
        Delta("call_start", name="stop", index=1),
        Delta("call_arguments", "{}", index=1),
        Delta("call_end", index=1),
        Delta("finish", finish_reason="tool_calls"),
    )
    assert text == 'thinking: I think.\nIt is.\n→ get_time {"city": "Oslo"}\n→ stop {}\n'


def test_text_that_ends_its_line_gets_no_second_end():
    assert printed(Delta("reasoning", "a\n"), Delta("content", "b\n")) == "thinking: a\nb\n"
    assert printed() == ""


def test_retracted_thinking_is_followed_by_the_answer():
    deltas = [Delta("reasoning", "42"), Delta("retract_reasoning"), Delta("content", "42")]
    assert printed(*deltas) == "thinking: 42\n(that was the answer)\n42\n"


def test_colour_marks_channels_and_ends_with_each_piece():
    text = printed(Delta("reasoning", "a"), Delta("content", "b"), colour=True)
    assert text == "\x1b[2mthinking: \x1b[0m\x1b[2ma\x1b[0m\nb\n"


def test_controls_of_the_model_do_not_reach_the_terminal():
    assert visible("a\x1b[2Jb\x07\x7f\x9bc\td\né🙂") == "a�[2Jb���c\td\né🙂"
    assert "\x1b" not in printed(
        Delta("content", "\x1b[31m"), Delta("call_start", name="\x1bx"), Delta("reasoning", "\x1b")
    )


@pytest.mark.parametrize(
    ("stream", "environment", "colour"),
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(monkeypatch, stream, environment, colour):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Style.of(stream).colour is colour


@pytest.mark.parametrize(
    ("tokens", "seconds", "text"),
    [
        (300, 1.0, "300 tokens/s"),
        (7, 2.0, "3.5 tokens/s"),
        (1, 3.0, "0.333 tokens/s"),
        (0, 3.0, "– tokens/s"),
        (5, 0.0, "– tokens/s"),
    ],
)
def test_rate_has_three_digits(tokens, seconds, text):
    assert rate(tokens, seconds) == text


def test_real_reply_prints_the_same_at_once_and_token_by_token(text_model):
    tokenizer = text_model.tokenizer
    ids = tokenizer.encode_control(
        "Ünder<|close|>think<|sep|><|open|>response<|sep|>🙂 ok<|close|>response<|sep|>"
    )
    parser = OutputParser(tokenizer)
    pieces = [parser.push(token) for token in ids] + [parser.finish()]
    out = io.StringIO()
    printer = ReplyPrinter(out, Style(False))
    printer.show([delta for piece in pieces for delta in piece])
    printer.end()
    assert out.getvalue() == printed(*[delta for piece in pieces for delta in piece])
    assert out.getvalue() == "thinking: Ünder\n🙂 ok\n"
