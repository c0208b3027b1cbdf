"""A blocking client of one worker: ids, chat, and what a request cost, over native gRPC."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import grpc
import numpy as np
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as pb_grpc

from k3jax.chat import ChatOptions, Delta, OutputParser
from k3jax.engine.request import FinishReason, SamplingParams
from k3jax.text_model import Prompt, TextModel
from serving.wire import ConstraintText

MAX_MESSAGE_BYTES = 256 << 20


@dataclass(frozen=True)
class ClientTls:
    """PEM files: who signed the server's certificate, and what this side shows, if anything."""

    server_ca: Path
    certificate: Path | None = None
    key: Path | None = None


class Client:
    """One connection; a context manager that closes it.

    What the server refuses is ValueError, what it cannot do now is ConnectionError.
    """

    def __init__(
        self, address: str, *, token: str | None = None, tls: ClientTls | None = None
    ) -> None:
        """`HOST:PORT` of a worker; nothing is sent yet."""
        options = (
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        )
        if tls is None:
            self.channel = grpc.insecure_channel(address, options=options)
        else:
            credentials = grpc.ssl_channel_credentials(
                tls.server_ca.read_bytes(),
                tls.key.read_bytes() if tls.key else None,
                tls.certificate.read_bytes() if tls.certificate else None,
            )
            self.channel = grpc.secure_channel(address, credentials, options=options)
        self._stub = pb_grpc.TokenSpeedSchedulerStub(self.channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and what still runs over it."""
        self.channel.close()

    @cached_property
    def info(self) -> pb.GetModelInfoResponse:
        """Names, limits and defaults of the model."""
        try:
            return self._stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata)
        except grpc.RpcError as error:
            _raise(error)

    @cached_property
    def model(self) -> TextModel:
        """The model's tokenizer, defaults and chat format, fetched from the server."""
        try:
            request = common.GetTokenizerRequest()
            chunks = list(self._stub.GetTokenizer(request, metadata=self._metadata))
        except grpc.RpcError as error:
            _raise(error)
        with tempfile.TemporaryDirectory() as folder:
            archive = zipfile.ZipFile(io.BytesIO(b"".join(chunk.data for chunk in chunks)))
            archive.extractall(folder)
            return TextModel.open(folder)

    def generate(
        self,
        prompt: Prompt | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        constraint: ConstraintText | None = None,
        timeout: float | None = None,
    ) -> Generation:
        """Continue a prompt; iterate over the result for its ids.

        Without `sampling` the model's own defaults hold. Errors come with the first id.
        """
        tokens = prompt.tokens if isinstance(prompt, Prompt) else prompt
        message = pb.GenerateRequest(request_id=request_id, stream=True)
        message.tokenized.input_ids.extend(tokens)
        if sampling is not None:
            _write_sampling(message, sampling)
        if constraint is not None:
            setattr(message.sampling_params, constraint.kind, constraint.text)
        if isinstance(prompt, Prompt):
            message.mm_inputs.items.extend(self._images(prompt))
        call = self._stub.Generate(message, timeout=timeout, metadata=self._metadata)
        return Generation(call)

    def chat(
        self,
        messages: Any,
        options: ChatOptions | None = None,
        sampling: SamplingParams | None = None,
    ) -> Iterator[Delta]:
        """Answer a conversation, as deltas; ends with one that says why."""
        options = options or ChatOptions()
        generation = self.generate(self.model.chat_prompt(messages, options), sampling)
        parser = OutputParser(self.model.tokenizer, options.thinking)
        for token in generation:
            yield from parser.push(token)
        stopped = generation.finish_reason is FinishReason.STOP
        yield from parser.finish("stop" if stopped else "length")

    def _images(self, prompt: Prompt) -> Iterator[pb.MultimodalItem]:
        processor = self.model.image_processor
        for source in prompt.images:
            assert processor is not None
            image = processor.process(source)
            yield pb.MultimodalItem(
                modality=common.IMAGE,
                encoder_input=_tensor(image.pixel_values),
                model_specific_tensors={"grid_thws": _tensor(np.array([image.grid], np.int64))},
            )


class Generation:
    """The ids of one reply, as they come; the rest is known once they are all there.

    Attributes:
        finish_reason: why it ended.
        stop_id: the id that ended it, which is not among the ids.
        prompt_tokens, cached_tokens: of the prompt, and how many of them came from the cache.
        times: seconds by name, as the server measured them.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self.finish_reason: FinishReason | None = None
        self.stop_id: int | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.times: dict[str, float] = {}

    def __iter__(self) -> Iterator[int]:
        """Ids. Leaving the loop early cancels the request."""
        try:
            for response in self._call:
                if response.WhichOneof("response") == "chunk":
                    yield from response.chunk.token_ids
                else:
                    self._end(response.complete)
        except grpc.RpcError as error:
            _raise(error)
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        """Give the request up."""
        self._call.cancel()

    def _end(self, complete: pb.GenerateComplete) -> None:
        self.finish_reason = FinishReason(complete.finish_reason)
        if complete.WhichOneof("matched_stop") == "matched_token_id":
            self.stop_id = complete.matched_token_id
        self.prompt_tokens = complete.prompt_tokens
        self.cached_tokens = complete.cached_tokens
        for key, value in self._call.trailing_metadata() or ():
            if key.startswith("k3jax-") and key.endswith("-seconds"):
                name = key.removeprefix("k3jax-").removesuffix("-seconds")
                self.times[name.replace("-", "_")] = float(value)


def _write_sampling(message: pb.GenerateRequest, sampling: SamplingParams) -> None:
    message.sampling_params.MergeFrom(
        pb.SamplingParams(
            max_new_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            sampling_seed=sampling.seed,
            stop_token_ids=sampling.stop_ids,
            ignore_eos=sampling.ignore_eos,
        )
    )
    if sampling.logprobs is not None:
        message.return_logprob = True
        message.top_logprobs_num = sampling.logprobs


def _tensor(array: np.ndarray) -> pb.TensorData:
    return pb.TensorData(shape=array.shape, dtype=str(array.dtype), inline=array.tobytes())


def _raise(error: grpc.RpcError) -> NoReturn:
    code, details = error.code(), error.details()  # pyright: ignore[reportAttributeAccessIssue]
    text = f"{details} ({code.name})"
    refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    raise (ValueError(details) if code in refused else ConnectionError(text)) from None
