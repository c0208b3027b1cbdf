"""`k3jax generate` replies in order, as text or JSON, and says in one line what is wrong."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest

from k3jax.cli import main
from k3jax.text_model import TextModel
from tests.helpers import KIMI_LINEAR_TINY
from tests.weights.folders import sharded


def generate(*argv: object) -> int:
    return main(["generate", *map(str, argv)])


GREEDY = ("--temperature", "0", "--ignore-eos", "--max-tokens", "12")


@pytest.fixture(scope="module")
def replies(text_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """Four lines run in one batch of three and one of one, as JSON."""
    requests = [
        {"tokens": [5, 9, 2], "id": "first"},
        {"prompt": "ab", "max_tokens": 3, "logprobs": 2},
        {"tokens": [7], "max_tokens": 0},
        {"tokens": [5, 9, 2], "id": None},
    ]
    file = tmp_path_factory.mktemp("requests") / "r.jsonl"
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K3JAX_COMPILATION_CACHE", "0")
        out, err = io.StringIO(), io.StringIO()
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        options = ["--raw", "--json", "--batch", "3", *GREEDY]
        assert generate(text_folder, "--file", file, *options) == 0
    return file, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()


def test_json_has_one_object_per_line_in_order(replies):
    _, found, _ = replies
    assert [reply["id"] for reply in found] == ["first", 1, 2, None]
    usage = [tuple(reply["usage"].values()) for reply in found]
    assert usage == [(3, 12, 0), (2, 3, 0), (1, 0, 0), (3, 12, 0)]
    assert [reply["finish_reason"] for reply in found] == ["length"] * 4
    assert [len(reply["token_ids"]) for reply in found] == [12, 3, 0, 12]


def test_content_is_the_text_of_the_ids(replies, text_model: TextModel):
    for reply in replies[1]:
        assert reply["content"] == text_model.tokenizer.decode(reply["token_ids"])
        assert (reply["reasoning"], reply["tool_calls"]) == ("", [])


def test_logprobs_come_where_asked_for(replies):
    first, second, *_ = replies[1]
    assert "logprobs" not in first
    for token, entry in zip(second["token_ids"], second["logprobs"], strict=True):
        assert (entry["token_id"], entry["logprob"]) == (token, entry["top"][0]["logprob"])
        assert len(entry["top"]) == 2
        assert entry["top"][0]["logprob"] > entry["top"][1]["logprob"]


def test_summary_is_one_line_on_stderr(replies):
    assert re.fullmatch(
        r"4 prompts: 9 prompt tokens, 27 generated in \d+\.\d\d s and \d+\.\d s compiling: "
        r"[\d.]+ tokens/s\n",
        replies[2],
    )


def test_reply_does_not_depend_on_the_batch(replies):
    first, *_, last = replies[1]
    assert first["token_ids"] == last["token_ids"]


def test_text_output_names_the_lines_and_says_what_was_cut(replies, text_folder, capsys):
    assert generate(text_folder, "--file", replies[0], "--raw", "--batch", "3", *GREEDY) == 0
    out = capsys.readouterr().out
    assert out.index("[first]") < out.index("[1]") < out.index("[2]") < out.index("[None]")
    assert out.count("(cut off after 12 tokens)") == 2 and "(cut off after 0 tokens)" in out
    assert "\x1b" not in out


def test_prompt_from_stdin_is_that_of_the_option(text_folder: Path, monkeypatch, capsys):
    # Without the announcement of effort, which is long in the toy vocabulary.
    options = ["--json", "--max-tokens", "1", "--temperature", "0", "--no-thinking"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi there\n"))
    assert generate(text_folder, "-", *options) == 0
    piped = json.loads(capsys.readouterr().out)
    assert generate(text_folder, "--prompt", "Hi there", *options) == 0
    assert piped == json.loads(capsys.readouterr().out)


def failure(capsys, *argv: object) -> str:
    """The one line that a wrong input gives."""
    assert generate(*argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("k3jax: error: ") and printed.err.count("\n") == 1
    return printed.err.removeprefix("k3jax: error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "word " * 900], "prompt has "),
        (["--prompt", "x", "--stop-id", "846"], "stop_ids: stop id 846 is outside the vocabulary"),
        (["--prompt", "x", "--image", "nothing.png"], "image nothing.png does not exist"),
        (["--prompt", "x", "--image", __file__], "is in no known image format"),
        (["--prompt", "x", "--temperature", "-1"], "temperature = -1.0, expected in [0, 1e6]"),
        (["--prompt", "x", "--top-p", "nan"], "top_p = nan, expected in (0, 1]"),
        (["--prompt", "x", "--seed", "-1"], "seed = -1, expected in [0, "),
        (["--prompt", "x", "--logprobs", "3"], "--logprobs needs --json"),
        (
            ["--prompt", "x", "--json", "--logprobs", "21"],
            "logprobs = 21, expected None or 0 to 20",
        ),
        (["--prompt", "x", "--raw", "--effort", "low"], "--raw leaves the chat template out"),
        (["--file", "nothing.jsonl"], "nothing.jsonl: No such file or directory"),
        (["--file", "/"], "/: Is a directory"),
        (["--file", "x.jsonl", "--image", "a.png"], "--image goes with --prompt"),
    ],
)
def test_wrong_input_is_one_clear_line(text_folder: Path, capsys, argv, problem):
    assert problem in failure(capsys, text_folder, *argv)


def test_wrong_line_of_a_file_is_named_before_anything_runs(text_folder, tmp_path, capsys):
    file = tmp_path / "requests.jsonl"
    message = {"role": "critic", "content": "x"}
    file.write_text(f'{{"prompt": "good"}}\n{json.dumps({"messages": [message]})}\n')
    assert failure(capsys, text_folder, "--file", file).startswith(
        f"{file}:2: messages[0].role must be one of system, user, assistant, tool, not 'critic'"
    )


def wanted(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def test_replies_have_the_form_that_was_asked_for(text_folder: Path, tmp_path: Path, capsys):
    schema = {"enum": ["north", "south-west"]}  # an object could be filled with spaces for ever
    lines = [
        {"prompt": "x", "response_format": wanted(schema), "thinking": False, "max_tokens": 60},
        {"prompt": "free", "thinking": False, "max_tokens": 6},
        {"prompt": "any", "response_format": {"type": "json_object"}, "max_tokens": 9},
    ]
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))

    assert generate(text_folder, "--file", file, "--json", "--temperature", "2") == 0

    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert json.loads(found[0]["content"]) in schema["enum"]
    assert found[0]["finish_reason"] == "stop"
    assert [len(reply["token_ids"]) for reply in found[1:]] == [6, 9]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "array", "uniqueItems": True}, r"response_format: .*uniqueItems"),
        ({"type": "strng"}, r"response_format.json_schema.schema.type 'strng' is none of"),
    ],
)
def test_form_that_cannot_be_enforced_is_named(text_folder, tmp_path, capsys, schema, problem):
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps({"prompt": "x", "response_format": wanted(schema)}))

    assert generate(text_folder, "--file", file) == 2
    assert re.search(rf"r.jsonl:1: {problem}", capsys.readouterr().err)


def test_image_for_a_model_without_vision_is_one_clear_line(tmp_path, capsys):
    from dataclasses import replace

    from tests.random_weights import text_config, write_text_model

    blind = write_text_model(tmp_path / "blind", replace(text_config(), vision=None))
    found = failure(capsys, blind, "--prompt", "x", "--image", "a.png")
    assert found == f"the messages hold an image, but {blind} has no vision tower"


def broken(text_folder: Path, target: Path, how: str) -> Path:
    """A copy of the model with one thing wrong."""
    if how == "missing index entry":
        sharded(target, text_folder, lambda name: "a.safetensors")
        index = target / "model.safetensors.index.json"
        data = json.loads(index.read_text())
        del data["weight_map"][next(iter(data["weight_map"]))]
        index.write_text(json.dumps(data))
        for file in ("tiktoken.model", "tokenizer_config.json"):
            shutil.copy(text_folder / file, target)
        return target
    shutil.copytree(text_folder, target)
    if how == "truncated shard":
        data = (target / "model.safetensors").read_bytes()
        (target / "model.safetensors").write_bytes(data[:-100])
    elif how == "no weights":
        (target / "model.safetensors").unlink()
    elif how == "no tokenizer":
        (target / "tiktoken.model").unlink()
    elif how == "broken config":
        (target / "config.json").write_text("{")
    return target


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("truncated shard", "model.safetensors"),
        ("missing index entry", "is not in model.safetensors.index.json"),
        ("no weights", "no model in "),
        ("no tokenizer", "tiktoken.model does not exist"),
        ("broken config", "config.json is not valid JSON"),
    ],
)
def test_broken_folder_is_one_clear_line(text_folder, tmp_path, capsys, how, problem):
    folder = broken(text_folder, tmp_path / "model", how)
    assert problem in failure(capsys, folder, "--prompt", "x")


def test_wrong_folder_is_one_clear_line(tmp_path: Path, capsys):
    assert "no config.json" in failure(capsys, tmp_path, "--prompt", "x")
    assert "does not exist" in failure(capsys, tmp_path / "nothing", "--prompt", "x")
    assert "tokenizer file" in failure(capsys, KIMI_LINEAR_TINY, "--prompt", "x")


def test_debug_shows_where_it_went_wrong(text_folder: Path, capsys):
    assert generate(text_folder, "--prompt", "", "--debug") == 2
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


@pytest.mark.parametrize(
    "argv", [[], ["--prompt", "x", "--file", "y"], ["-", "--prompt", "x"], ["--batch", "0"]]
)
def test_exactly_one_source_of_prompts(text_folder: Path, capsys, argv):
    with pytest.raises(SystemExit) as exit_:
        generate(text_folder, *argv)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
