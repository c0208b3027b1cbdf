"""A model folder as seen by text: its tokenizer and defaults, and prompts in the model's ids."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3jax.bundled import weights_folder
from k3jax.chat import (
    ChatOptions,
    ImageProcessor,
    ProcessedImage,
    Tokenizer,
    encode_chat,
    expand_media_pads,
)
from k3jax.chat.encoder import MEDIA_PAD
from k3jax.chat.image_source import ImageSource
from k3jax.config import K3Config
from k3jax.engine.request import SamplingParams, check_prompt
from k3jax.generation_config import FILE as GENERATION_FILE
from k3jax.generation_config import GenerationConfig

if TYPE_CHECKING:
    from k3jax.engine.generate import PromptImages
    from k3jax.model.params import K3Params


@dataclass(frozen=True)
class Prompt:
    """Ids to continue, and the images behind their media tokens, in order."""

    tokens: tuple[int, ...]
    images: tuple[ImageSource, ...] = ()


@dataclass(frozen=True)
class TextModel:
    """Everything in a model folder but its weights, which take longer to read.

    Attributes:
        folder: where it was read from; `k3jax.load_model(folder)` gives the weights.
        config: its `eos_token_ids` are all that config, generation config and tokenizer declare.
        sampling: the model's own defaults.
        image_processor: None for a model without vision.
    """

    folder: Path
    config: K3Config
    tokenizer: Tokenizer
    sampling: SamplingParams
    image_processor: ImageProcessor | None

    @classmethod
    def open(cls, weights: str | Path) -> TextModel:
        """Read a folder, or the bundled model by its name.

        Raises FileNotFoundError without config or tokenizer, and ValueError naming the file that
        is malformed, or the two that contradict each other.
        """
        folder = weights_folder(weights)
        if not folder.is_dir():
            found = "is a file, not a folder" if folder.exists() else "does not exist"
            raise FileNotFoundError(f"{folder} {found}; expected a model folder")
        config = K3Config.from_hf(folder)
        tokenizer = Tokenizer.from_dir(folder)
        if tokenizer.vocab_size != config.vocab_size:
            raise ValueError(
                f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, but config.json says "
                f"vocab_size = {config.vocab_size}"
            )
        generation = GenerationConfig.from_dir(folder)
        for token in generation.eos_token_ids:
            if token >= config.vocab_size:
                raise ValueError(
                    f"{folder / GENERATION_FILE}: eos_token_id {token} is outside the vocabulary "
                    f"0..{config.vocab_size - 1}"
                )
        eos = {*config.eos_token_ids, *generation.eos_token_ids, *tokenizer.eos_ids}
        return cls(
            folder=folder,
            config=replace(config, eos_token_ids=tuple(sorted(eos))),
            tokenizer=tokenizer,
            sampling=generation.sampling,
            image_processor=_image_processor(folder, config, tokenizer),
        )

    def chat_prompt(self, messages: Any, options: ChatOptions | None = None) -> Prompt:
        """Encode a conversation in OpenAI's form; images may be paths, data URLs or contents.

        Raises ValueError naming the message or option that is wrong, the image that cannot be
        read, or the length of a prompt that leaves no room to answer.
        """
        options = options or ChatOptions()
        sources = _image_sources(messages)
        if sources and self.image_processor is None:
            raise ValueError(f"the messages hold an image, but {self.folder} has no vision tower")
        images = [self._process(source) for source in sources]
        tokens = encode_chat(
            self.tokenizer, messages, options, [image.prompt for image in images] or None
        )
        if images:
            counts = [image.num_tokens for image in images]
            tokens = expand_media_pads(self.tokenizer, tokens, counts)
        return self._checked(Prompt(tuple(tokens), tuple(sources)))

    def text_prompt(self, text: str) -> Prompt:
        """Encode text to be continued as it is, without chat markers. Raises as `chat_prompt`."""
        return self._checked(Prompt(tuple(self.tokenizer.encode(text))))

    def token_prompt(self, tokens: Sequence[int]) -> Prompt:
        """Ids as they are. Raises ValueError for an id outside the vocabulary, or too many."""
        return self._checked(Prompt(tuple(tokens)))

    def image_features(self, params: K3Params, prompt: Prompt) -> PromptImages | None:
        """Run the vision tower over the prompt's images; None if it has none."""
        if not prompt.images:
            return None
        from k3jax.engine.generate import PromptImages
        from k3jax.engine.images import image_features

        assert params.vision is not None and self.config.vision is not None
        images = [self._process(source) for source in prompt.images]
        pairs = [(image.pixel_values, image.grid) for image in images]
        return PromptImages(image_features(params.vision, self.config.vision, pairs))

    def _process(self, source: ImageSource) -> ProcessedImage:
        assert self.image_processor is not None
        return self.image_processor.process(source)

    def _checked(self, prompt: Prompt) -> Prompt:
        check_prompt(
            prompt.tokens,
            vocab_size=self.config.vocab_size,
            max_context=self.config.max_context,
            name="prompt",
        )
        return prompt


def _image_processor(folder: Path, config: K3Config, tokenizer: Tokenizer) -> ImageProcessor | None:
    if config.vision is None:
        return None
    processor = ImageProcessor.from_dir(folder)
    for name in ("patch_size", "merge_size"):
        found, expected = getattr(processor, name), getattr(config.vision, name)
        if found != expected:
            raise ValueError(
                f"{folder}: images are cut with {name} {found}, but the vision tower reads "
                f"{name} {expected}"
            )
    pad = tokenizer.special_ids.get(MEDIA_PAD)
    if pad != config.vision.media_token_id:
        raise ValueError(
            f"{folder}: the tokenizer's {MEDIA_PAD} is {pad}, but config.json says "
            f"media_placeholder_token_id = {config.vision.media_token_id}"
        )
    return processor


def _image_sources(messages: Any) -> list[ImageSource]:
    """The images of well-formed messages, in order; `encode_chat` refuses the other ones."""
    sources = []
    for index, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for number, part in enumerate(content if isinstance(content, list | tuple) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in ("image", "image_url"):
                where = f"messages[{index}].content[{number}]"
                sources.append(_image_source(part.get(kind), f"{where}.{kind}"))
    return sources


def _image_source(value: Any, where: str) -> ImageSource:
    """A path, the bytes of a data URL, or decoded contents as they are."""
    if isinstance(value, Mapping):
        value, where = value.get("url"), f"{where}.url"
    if value is None:
        raise ValueError(f"{where} is missing; expected a path or a data URL")
    if not isinstance(value, ImageSource):
        raise ValueError(f"{where} must be a path or a data URL, not {type(value).__name__}")
    if not isinstance(value, str):
        return value
    scheme, _, rest = value.partition(":")
    if scheme in ("http", "https"):
        raise ValueError(f"{where}: images are not downloaded; give a path or a data URL")
    if scheme == "file":
        return Path(rest.removeprefix("//"))
    if scheme != "data":
        return Path(value)
    header, comma, payload = rest.partition(",")
    try:
        if not comma or not header.endswith(";base64"):
            raise ValueError("expected data:image/…;base64,…")
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where} is no data URL that can be read: {error}") from None
