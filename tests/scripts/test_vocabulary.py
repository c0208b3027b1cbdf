"""The bundled vocabulary."""

import re

import pytest

from scripts.nano import corpus, shape, vocabulary
from scripts.nano.words import all_words
from tests.scripts.nano_model import MODEL, nano_tokenizer

TOKENIZER = nano_tokenizer()


def test_every_listed_word_is_one_token_with_and_without_a_space():
    split = [t for word in all_words() for t in (word, f" {word}") if len(TOKENIZER.encode(t)) != 1]
    assert split == []


def test_digits_never_merge():
    tokens = [TOKENIZER.decode_bytes([token]) for token in range(256, TOKENIZER.num_base)]
    assert not [token for token in tokens if re.search(rb"[0-9]", token)]


@pytest.mark.parametrize("sign", ['"', "_", "=", "`", "-"])
def test_a_word_after_a_sign_is_the_word_itself(sign):
    assert TOKENIZER.encode(f"{sign}copper")[-1:] == TOKENIZER.encode("copper")


def test_markers_have_the_offsets_of_k3():
    for offset, name in vocabulary.SPECIAL_NAMES.items():
        assert TOKENIZER.special_ids[name] == shape.NUM_BASE + offset
    assert TOKENIZER.vocab_size == shape.config_json()["text_config"]["vocab_size"]
    assert TOKENIZER.vocab_size % 64 == 0


def test_the_files_are_what_the_corpus_gives(tmp_path):
    vocabulary.write(tmp_path, vocabulary.learn(corpus.sample_texts(), shape.NUM_BASE))
    for name in vocabulary.FILES:
        assert (tmp_path / name).read_bytes() == (MODEL / name).read_bytes(), name


def test_a_size_that_is_too_small_or_too_large_is_refused():
    with pytest.raises(ValueError, match="260 ranks cannot hold 256 bytes"):
        vocabulary.learn(["alpha beta gamma"] * 3, 260)
    with pytest.raises(ValueError, match="more than there is to learn"):
        vocabulary.learn(["alpha"] * 3, 9000)


def test_text_that_was_never_seen_survives_encoding():
    text = "Zürich naïve 12345 <|open|> 漢字 🙂\n\tend"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
