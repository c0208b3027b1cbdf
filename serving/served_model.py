"""What the service says about its model: names, limits, defaults, and the tokenizer's files."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from k3jax import __version__
from k3jax.text_model import TextModel
from serving.wire import Limits

TOKENIZER_FILES = (
    "tiktoken.model",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
)

CHUNK_BYTES = 1 << 20

_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the same files give the same bytes


@dataclass(frozen=True)
class ServedModel:
    """A model folder under the name that clients call it by.

    `max_context` bounds prompt and answer together; it is at most the model's own. `dtype` is what
    the weights are stored in, as clients are told.
    """

    text: TextModel
    name: str
    max_context: int
    dtype: str = "float32"

    @property
    def limits(self) -> Limits:
        """For checking requests."""
        return Limits(self.text.config.vocab_size, self.max_context, self.text.sampling)

    @property
    def takes_images(self) -> bool:
        """The model has a vision tower."""
        return self.text.config.vision is not None

    @cached_property
    def _config(self) -> dict[str, Any]:
        return json.loads((self.text.folder / "config.json").read_bytes())

    def info(self) -> pb.GetModelInfoResponse:
        """As GetModelInfo answers.

        The paths are absolute: the gateway asks a hub on the internet for any other name before it
        asks the worker, whose GetTokenizer serves a gateway that does not see the folder.
        """
        config, sampling = self.text.config, self.text.sampling
        defaults = {
            name: getattr(sampling, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        }
        return pb.GetModelInfoResponse(
            model_path=str(self.text.folder.resolve()),
            tokenizer_path=str(self.text.folder.resolve()),
            served_model_name=self.name,
            model_type=str(self._config.get("model_type", "")),
            architectures=self._config.get("architectures") or [],
            max_context_length=self.max_context,
            max_req_input_len=self.max_context - 1,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            pad_token_id=config.pad_token_id or 0,
            bos_token_id=config.bos_token_id or 0,
            weight_version=f"k3jax-{__version__}",
            default_sampling_params_json=json.dumps(defaults),
            supports_vision=self.takes_images,
            supports_multimodal=self.takes_images,
            supported_modalities=[common.IMAGE] if self.takes_images else [],
            model_dtype=self.dtype,
            multimodal_encoder_dtype="float32",
        )

    @cached_property
    def tokenizer_zip(self) -> bytes:
        """The tokenizer's files that the folder has, without compression."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name in TOKENIZER_FILES:
                file = Path(self.text.folder) / name
                if file.is_file():
                    archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), file.read_bytes())
        return buffer.getvalue()

    def tokenizer_chunks(self) -> Iterator[common.GetTokenizerChunk]:
        """`tokenizer_zip` in pieces, the last of them with its SHA-256."""
        data = self.tokenizer_zip
        digest = hashlib.sha256(data).hexdigest()
        for start in range(0, len(data), CHUNK_BYTES):
            last = start + CHUNK_BYTES >= len(data)
            yield common.GetTokenizerChunk(
                data=data[start : start + CHUNK_BYTES], sha256=digest if last else ""
            )
