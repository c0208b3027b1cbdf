"""Goldens: `tokenize.json` holds tiktoken's ids with the released pattern, toy vocabulary."""

import base64
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.chat import tokenizer as module
from k3jax.chat.tokenizer import Tokenizer, TokenStream
from k3jax.chat.vocabulary import read_ranks
from tests.chat.inputs import GOLDEN, golden_json, hostile_text

TOY = Tokenizer.from_dir(GOLDEN / "chat")


@pytest.mark.parametrize("case", golden_json("chat/tokenize.json"), ids=lambda c: c["text"][:12])
def test_ids_match_the_goldens(case):
    assert TOY.encode(case["text"]) == case["ids_plain"]
    assert TOY.encode_control(case["text"]) == case["ids_special"]


def test_the_config_decides_the_ids():
    assert (TOY.num_base, TOY.vocab_size) == (590, 846)
    assert TOY.special_ids["<|open|>"] == 593
    assert TOY.special_ids["<|reserved_token_598|>"] == 598
    assert (TOY.bos_id, TOY.pad_id, TOY.unk_id, TOY.eos_ids) == (590, 845, 844, (592,))


@given(hostile_text)
def test_plain_text_is_never_a_marker_and_round_trips(text):
    ids = TOY.encode(text)
    assert not any(TOY.is_special(token) for token in ids)
    assert TOY.decode(ids) == text


@given(hostile_text)
def test_control_text_round_trips(text):
    assert TOY.decode(TOY.encode_control(text)) == text


def test_every_marker_is_one_control_id():
    for name, token in TOY.special_ids.items():
        assert TOY.encode_control(name) == [token]


@given(st.lists(st.integers(0, 845), max_size=12))
def test_stream_joins_to_decode_without_the_unfinished_end(ids):
    stream = TokenStream(TOY)
    joined = "".join(map(stream.push, ids))
    whole = TOY.decode(ids)
    assert whole.startswith(joined)
    assert whole[len(joined) :] in ("", "\ufffd")


@given(st.text(max_size=8))
def test_stream_never_shows_a_split_character(text):
    stream = TokenStream(TOY)
    pieces = [stream.push(token) for token in TOY.encode(text)]
    assert "".join(pieces) == text


def test_skip_special_leaves_markers_out():
    ids = TOY.encode_control("a<|sep|>b")
    assert TOY.decode(ids, skip_special=True) == "ab"
    stream = TokenStream(TOY, skip_special=True)
    assert "".join(map(stream.push, ids)) == "ab"


@pytest.mark.parametrize("token", [-1, 846])
def test_an_id_out_of_range_is_named(token):
    with pytest.raises(ValueError, match=rf"token id {token} is outside 0\.\.845"):
        TOY.decode([token])


@given(st.text("a \n\u00a0\u2028\x1c", max_size=40), st.integers(1, 5), st.integers(1, 17))
def test_cuts_bound_runs_and_keep_the_text(text, run, whole):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_RUN_CHARS", run)
        patch.setattr(module, "MAX_ENCODE_CHARS", whole)
        pieces = list(module._cut(text))
    assert "".join(pieces) == text
    for piece in pieces:
        kinds = [char.isspace() for char in piece]
        assert max(len(list(group)) for _, group in itertools.groupby(kinds)) <= run


def test_a_run_is_cut_every_25000_characters():
    text = "b" + " " * 25_001 + "a" * 60_000
    assert [len(piece) for piece in module._cut(text)] == [25_001, 25_001, 25_000, 10_000]
    assert list(module._cut("ab " * 200_000)) == ["ab " * 133_333 + "a", "b " + "ab " * 66_666]


def test_long_input_encodes():
    for text in (" " * 500_003, "x" * 500_003):
        assert TOY.decode(TOY.encode(text)) == text


def test_a_surrogate_pair_is_one_character_and_a_lone_one_is_replaced():
    assert TOY.encode("\ud83d\ude42") == TOY.encode("🙂")
    assert TOY.decode(TOY.encode("a\ud800b")) == "a\ufffdb"


def write(folder, lines, **config):
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    config = {"added_tokens_decoder": {}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def rank_lines(count=256):
    tokens = [bytes([i]) for i in range(256)] + [b"%d" % i for i in range(100, count)]
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens[:count])]


def test_unnamed_tokens_and_object_names_are_read(tmp_path):
    entry = {"content": "<|im_end|>", "special": True}
    tokenizer = Tokenizer.from_dir(
        write(tmp_path, rank_lines(), added_tokens_decoder={"258": entry}, eos_token=entry)
    )
    assert tokenizer.eos_ids == (258,)
    assert (tokenizer.bos_id, tokenizer.pad_id) == (None, None)


@pytest.mark.parametrize("missing", ["tiktoken.model", "tokenizer_config.json"])
def test_a_missing_file_is_named(tmp_path, missing):
    (write(tmp_path, rank_lines()) / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"!!! 256", r"tiktoken.model:257: expected 'base64 rank', found '!!! 256'"),
        (b"QUI=", r"tiktoken.model:257: expected"),
        (b"QUI= x", r"tiktoken.model:257: expected"),
        (b"QUI= 256 7", r"tiktoken.model:257: expected"),
        (b"QUI= 3", r"tiktoken.model:257: duplicate rank 3, first on line 4"),
        (b"AA== 256", r"tiktoken.model:257: duplicate token AA==, first on line 1"),
        (b"QUI= 300", r"257 ranks must be exactly 0..256, but 256 is missing"),
    ],
)
def test_a_bad_rank_line_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_dir(write(tmp_path, [*rank_lines(), line]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": None}, "added_tokens_decoder is missing"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "needs an integer id"),
        ({"added_tokens_decoder": {"300": {}}}, "needs an integer id and a content"),
        ({"added_tokens_decoder": {"7": {"content": "[X]"}}}, "id 7, which collides"),
        ({"added_tokens_decoder": {"512": {"content": "[X]"}}}, "id 512, which is out of range"),
        (
            {"added_tokens_decoder": {"300": {"content": "[X]"}, "301": {"content": "[X]"}}},
            r"'\[X\]' is used by ids 300 and 301",
        ),
        ({"eos_token": ["[EOS]"]}, "eos_token must be a token name"),
        ({"eos_token": "[EOS]"}, "eos_token '.EOS.' is not among the 256 special tokens"),
    ],
)
def test_a_bad_config_is_named(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_dir(write(tmp_path, rank_lines(), **config))


def test_broken_json_names_the_file(tmp_path):
    write(tmp_path, rank_lines())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_byte_without_rank_is_named(tmp_path):
    lines = rank_lines()
    lines[65] = b"QUI= 65"
    with pytest.raises(ValueError, match="byte 0x41 has no rank"):
        Tokenizer.from_dir(write(tmp_path, lines))


def test_an_empty_rank_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no ranks"):
        read_ranks(write(tmp_path, [b""]) / "tiktoken.model")
