"""What a model folder says about sampling, and what holds where it says nothing."""

import json
from pathlib import Path

import pytest

from k3jax.engine.request import SamplingParams
from k3jax.generation_config import GenerationConfig


def written(folder: Path, text: str) -> GenerationConfig:
    (folder / "generation_config.json").write_text(text)
    return GenerationConfig.from_dir(folder)


def test_folder_without_the_file_has_the_models_defaults(tmp_path: Path):
    assert GenerationConfig.from_dir(tmp_path) == GenerationConfig(
        SamplingParams(temperature=1.0, top_p=0.95)
    )


def test_every_field_is_read(tmp_path: Path):
    fields = {
        "temperature": 0.6,
        "top_p": 0.8,
        "top_k": 40,
        "min_p": 0.02,
        "repetition_penalty": 1.05,
    }
    found = written(tmp_path, json.dumps(fields | {"eos_token_id": [7, 2], "do_sample": True}))
    assert found == GenerationConfig(SamplingParams(**fields), (7, 2))


@pytest.mark.parametrize(
    ("eos", "ids"), [(5, (5,)), ([5], (5,)), ([], ()), (None, ()), (0, (0,)), ([9, 3], (9, 3))]
)
def test_end_ids_may_be_one_or_many(eos, ids):
    assert GenerationConfig.from_json({"eos_token_id": eos}).eos_token_ids == ids


def test_null_counts_as_absent_and_other_fields_are_ignored():
    data = {"top_k": None, "temperature": None, "max_length": 20, "transformers_version": "4.1"}
    assert GenerationConfig.from_json(data) == GenerationConfig.from_json({})


def test_without_sampling_the_likeliest_token_is_taken():
    found = GenerationConfig.from_json({"do_sample": False, "temperature": 0.6})
    assert found.sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected a JSON object, not list"),
        ('{"temperature": -1}', r"temperature = -1, expected in \[0, 1e6\]"),
        ('{"top_p": "high"}', "top_p = 'high', expected a number"),
        ('{"top_k": 1.5}', "top_k = 1.5, expected a whole number"),
        ('{"do_sample": 1}', "do_sample = 1, expected true or false"),
        ('{"eos_token_id": "<|end|>"}', "eos_token_id = '<|end|>', expected a token id"),
        ('{"eos_token_id": [3, -1]}', "eos_token_id = "),
        ('{"eos_token_id": true}', "eos_token_id = True"),
        ('{"eos_token_id": [3.0]}', "eos_token_id = "),
    ],
)
def test_error_names_the_file_and_the_field(tmp_path: Path, text: str, problem: str):
    with pytest.raises(ValueError, match=f"generation_config.json: {problem}".replace("|", "[|]")):
        written(tmp_path, text)
