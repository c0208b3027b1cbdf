"""`k3jax chat` keeps the conversation, shows it, and obeys commands, errors and Ctrl-C."""

import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from k3jax.chat import ChatOptions
from k3jax.cli import main
from k3jax.cli.chat_loop import HELP, ChatLoop, summary
from k3jax.cli.conversation import Conversation, Turn
from k3jax.engine.request import MAX_SEED, SamplingParams
from k3jax.text_model import TextModel
from tests.cli.scripted import Script, called, said

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


class Chat:
    """A chat over a scripted model: `lines` go in, `out` and `log` come out."""

    def __init__(self, model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.monkeypatch = model, monkeypatch
        self.options = ChatOptions(thinking=False)
        self.out, self.log = io.StringIO(), io.StringIO()

    def run(self, lines: str, *replies: str, keyboard: bool = False, **changes) -> list[str]:
        """The prompts that the model was given."""
        script = Script(self.model, list(replies), changes.pop("interrupt_after", None))
        self.script = script
        self.monkeypatch.setattr("sys.stdin", (Keyboard if keyboard else io.StringIO)(lines))
        self.conversation = Conversation(
            self.model,
            script,
            SamplingParams(seed=MAX_SEED),
            self.options,
            clock=iter(range(10_000)).__next__,
        )
        ChatLoop(self.conversation, out=self.out, log=self.log, **changes).run()
        return script.prompts


@pytest.fixture
def chat(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> Chat:
    return Chat(text_model, monkeypatch)


def test_replies_are_printed_and_remembered(chat: Chat):
    prompts = chat.run("Hello\n\nAgain\n", said("Hi!"), said("Yes?"))
    assert chat.out.getvalue() == "Hi!\nYes?\n"
    assert "Hello" in prompts[1] and "Hi!" in prompts[1] and "Again" in prompts[1]
    assert "Again" not in prompts[0]
    roles = [message["role"] for message in chat.conversation.messages]
    assert roles == ["user", "assistant", "user", "assistant"]


def test_every_turn_has_its_own_seed(chat: Chat):
    chat.run("a\nb\n", said("1"), said("2"))
    assert [sampling.seed for sampling in chat.script.sampling] == [MAX_SEED, 0]


def test_thinking_is_shown_apart(chat: Chat):
    chat.options = ChatOptions()
    chat.run("2+2?\n", said("4", "Easy."))
    assert chat.out.getvalue() == "thinking: Easy.\n4\n"
    assert chat.conversation.messages[-1]["reasoning_content"] == "Easy."


def test_cost_of_a_turn_is_one_line_on_stderr(chat: Chat):
    chat.run("Hello\n", said("Hi!"))
    assert re.fullmatch(
        r"\[\d+ prompt tokens, \d+ generated, first after 1\.00 s, 1 tokens/s\]\n",
        chat.log.getvalue(),
    )


def test_compiling_is_told_apart():
    turn = Turn(prompt_tokens=7, tokens=[1, 2, 3], first=0.5, seconds=1.5)
    assert summary(turn, 0.0) == "[7 prompt tokens, 3 generated, first after 0.50 s, 2 tokens/s]"
    assert summary(turn, 2.25).endswith(", 2 tokens/s, 2.2 s compiling]")
    assert summary(Turn(prompt_tokens=7), 0.0) == "[7 prompt tokens, 0 generated]"


def test_reply_cut_off_by_length_says_so(chat: Chat):
    chat.run("Hello\n", "Once upon")
    assert re.fullmatch(r"Once upon\n\(cut off after \d+ tokens\)\n", chat.out.getvalue())


def test_results_of_calls_are_asked_for_and_told_to_the_model(chat: Chat):
    chat.options = ChatOptions(tools=[WEATHER])
    lines = 'Weather?\n{"sky": "clear"}\nThanks\n'
    replies = [called("get_weather", "I call.", city="Oslo"), said("Clear.", "Ok."), said("!", "")]
    prompts = chat.run(lines, *replies)
    assert '→ get_weather {"city": "Oslo"}\n' in chat.out.getvalue()
    assert '{"sky": "clear"}' in prompts[1] and "Thanks" in prompts[2]
    result = chat.conversation.messages[2]
    assert (result["role"], result["content"]) == ("tool", '{"sky": "clear"}')
    assert result["tool_call_id"] == chat.conversation.messages[1]["tool_calls"][0]["id"]


def test_input_that_ends_at_a_result_ends_the_chat(chat: Chat):
    chat.options = ChatOptions(tools=[WEATHER])
    assert len(chat.run("Weather?\n", called("get_weather"))) == 1


def test_ctrl_c_stops_the_reply_and_not_the_chat(chat: Chat):
    prompts = chat.run("a\nb\n", said("One two three"), said("ok"), interrupt_after=3)
    assert chat.out.getvalue().count("(stopped)\n") == 2
    kept = chat.conversation.messages[1]["content"]
    assert kept and "One two three".startswith(kept)
    assert kept in prompts[1]


def test_ctrl_c_at_the_prompt_leaves(chat: Chat, monkeypatch: pytest.MonkeyPatch):
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert chat.run("", keyboard=True) == []


def test_commands_on_the_conversation(chat: Chat):
    lines = "a\n/reset\nb\n/system Be kind.\nc\n/reset\nd\n/system\ne\n/exit\nf\n"
    prompts = chat.run(lines, *[said("x")] * 5)
    assert [re.findall('"user"<[|]sep[|]>(.)<', prompt) for prompt in prompts] == [
        *map(list, "abcde")
    ]
    assert [("Be kind." in prompt) for prompt in prompts] == [False, False, True, True, False]
    assert not any("x<|close|>response" in prompt for prompt in prompts)


def test_commands_on_thinking(chat: Chat):
    replies = [said("1"), said("2", "t"), said("3", "t"), said("4"), said("5", "t")]
    lines = "a\n/think on\nb\n/effort low\nc\n/think off\nd\n/effort max\ne\n"
    prompts = chat.run(lines, *replies)
    efforts = [re.findall(r"invoked with `thinking_effort=(\w+)`", prompt) for prompt in prompts]
    assert efforts == [[], ["max"], ["low"], [], ["max"]]


def test_help_lists_every_command(chat: Chat):
    chat.run("/help\n")
    assert chat.out.getvalue() == HELP + "\n"


def test_image_is_shown_with_the_next_message_only(chat: Chat, tmp_path: Path):
    Image.new("RGB", (28, 56)).save(tmp_path / "a b.png")
    prompts = chat.run(f"/image {tmp_path}/a b.png\nWhat?\n/reset\nMore\n", *[said("x")] * 2)
    assert "a b.png, 28x56, 2 tokens" in chat.out.getvalue()
    assert [prompt.count("<|media_pad|>") for prompt in prompts] == [2, 0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/nonsense", "unknown command '/nonsense'; /help shows the commands"),
        ("/think maybe", "unknown command '/think maybe'"),
        ("/effort medium", "unknown command '/effort medium'"),
        ("/image", "unknown command '/image'"),
        ("/image nothing.png", "image nothing.png does not exist"),
        ("word " * 900, "prompt has "),
    ],
)
def test_error_goes_on_at_a_terminal_and_ends_a_script(chat: Chat, line: str, problem: str):
    prompts = chat.run(f"Hello\n{line}\nAgain\n", said("1"), said("2"), keyboard=True)
    assert f"error: {problem}" in chat.out.getvalue()
    assert "Hello" in prompts[1] and "word" not in prompts[1]
    with pytest.raises(ValueError, match=re.escape(problem)):
        chat.run(f"{line}\nAgain\n", said("2"))


def run_main(monkeypatch: pytest.MonkeyPatch, lines: str, *argv: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", *argv])


def test_real_model_answers_piped_lines(text_folder: Path, monkeypatch, capsys):
    options = ["--max-tokens", "1", "--temperature", "0", "--no-thinking"]
    assert run_main(monkeypatch, "Hi\n", str(text_folder), *options) == 0
    printed = capsys.readouterr()
    assert "(cut off after 1 tokens)" in printed.out
    cost = r"\[\d+ prompt tokens, 1 generated, first after \d+\.\d\d s(, \d+\.\d s compiling)?\]\n"
    assert re.fullmatch(cost, printed.err)


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("[", "tools.json is not valid JSON: "),
        ('[{"type": "browser"}]', "tools[0].type must be 'function', not 'browser'"),
        ("{}", "tools must be a list, not dict"),
    ],
)
def test_broken_tools_are_an_error_before_loading(
    text_folder: Path, tmp_path: Path, monkeypatch, capsys, tools: str, problem: str
):
    file = tmp_path / "tools.json"
    file.write_text(tools)
    assert run_main(monkeypatch, "", str(text_folder), "--tools", str(file)) == 2
    printed = capsys.readouterr()
    assert problem in printed.err and printed.err.count("\n") == 1


def test_tools_of_the_file_are_declared(text_model: TextModel, tmp_path: Path):
    from k3jax.cli.chat import _read_tools

    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    assert _read_tools(str(tmp_path / "tools.json")) == [WEATHER]
    assert _read_tools(None) is None
