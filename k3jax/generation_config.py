"""Reads `generation_config.json`: how a model wants to be sampled, and where its answers end."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3jax.engine.request import SamplingParams

FILE = "generation_config.json"

DEFAULTS: Mapping[str, float] = {"temperature": 1.0, "top_p": 0.95}
"""K3's, where the file is absent or says nothing."""

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationConfig:
    """Defaults of a model folder.

    `sampling` has the library's `max_tokens`; lengths in the file are ignored, as are all fields
    that this project has no setting for.
    """

    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dir(cls, path: str | Path) -> "GenerationConfig":
        """Read the file of a model folder, which may lack it.

        Raises ValueError naming the file, and the field that is wrong.
        """
        file = Path(path) / FILE
        if not file.is_file():
            return cls.from_json({})
        try:
            data = json.loads(file.read_bytes())
            if not isinstance(data, dict):
                raise ValueError(f"expected a JSON object, not {type(data).__name__}")
            return cls.from_json(data)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "GenerationConfig":
        """From the parsed file; null counts as absent, `do_sample` false means temperature 0.

        Raises ValueError naming the field that is wrong.
        """
        given = {name: data[name] for name in _FIELDS if data.get(name) is not None}
        do_sample = data.get("do_sample")
        if not isinstance(do_sample, bool | None):
            raise ValueError(f"do_sample = {do_sample!r}, expected true or false")
        if do_sample is False:
            given["temperature"] = 0.0
        return cls(SamplingParams(**{**DEFAULTS, **given}), _eos_ids(data.get("eos_token_id")))


def _eos_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"eos_token_id = {value!r}, expected a token id or a list of them")
    return tuple(ids)
