"""The engine's events of one request, written as the scheduler protocol's responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from k3jax.chat.tokenizer import Tokenizer
from k3jax.engine.request import FinishReason, Request, RequestTiming, TokenEvent, TokenLogprobs
from serving.stop_strings import StopStrings
from serving.wire import Delivery


@dataclass
class _Choice:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop: StopStrings | None = None
    completion_tokens: int = 0
    sent: int = 0
    chunks: int = 0
    done: bool = False


class Reply:
    """Collects events into responses: chunks when streaming, one `complete` per choice.

    A choice's id that stopped it is counted, and left out of its output unless asked for. A stop
    string may end in the middle of the last id; whoever decodes the output cuts it there. After
    `done`, whatever the engine still produces is of no interest.
    """

    def __init__(self, request: Request, delivery: Delivery, tokenizer: Tokenizer) -> None:
        self._id, self._delivery = request.id, delivery
        self._choices = [_Choice() for _ in range(request.n)]
        if delivery.stop:
            for choice in self._choices:
                choice.stop = StopStrings(tokenizer, request.prompt, delivery.stop)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.timing: RequestTiming | None = None
        """Of the choice that ended last."""
        self.finish_reasons: list[str] = [""] * request.n

    @property
    def completion_tokens(self) -> int:
        """Generated so far, over all choices."""
        return sum(choice.completion_tokens for choice in self._choices)

    @property
    def done(self) -> bool:
        """Every choice has ended."""
        return all(choice.done for choice in self._choices)

    def push(self, events: Iterable[TokenEvent]) -> Iterator[pb.GenerateResponse]:
        """The responses to send for some events, in order: at most one chunk for each choice."""
        touched: dict[int, None] = {}
        endings: list[tuple[int, str, int | str | None]] = []
        for event in events:
            choice = self._choices[event.choice]
            if choice.done:
                continue
            self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
            touched[event.choice] = None
            reason, matched = self._take(choice, event)
            if reason is not None:
                choice.done = True
                self.timing = event.timing or self.timing
                self.finish_reasons[event.choice] = reason
                endings.append((event.choice, reason, matched))
        if self._delivery.stream:
            for index in touched:
                yield from self._chunk(index)
        for index, reason, matched in endings:
            yield self._complete(index, reason, matched)

    def _take(
        self, choice: _Choice, event: TokenEvent
    ) -> tuple[FinishReason | str | None, int | str | None]:
        """Record an event; why the choice ends, and the id or text that ended it."""
        reason = event.finish_reason
        if event.token is None:
            return reason, None
        choice.completion_tokens += 1
        matched = event.token if reason is FinishReason.STOP else None
        if matched is None or self._delivery.keep_stop:
            choice.tokens.append(event.token)
            if event.logprobs is not None:
                choice.logprobs.append(event.logprobs)
        if matched is None and choice.stop is not None:
            text = choice.stop.push(event.token)
            if text is not None:
                return FinishReason.STOP, text
        return reason, matched

    def _chunk(self, index: int) -> Iterator[pb.GenerateResponse]:
        choice = self._choices[index]
        tokens = choice.tokens[choice.sent :]
        if not tokens and choice.chunks:
            return
        chunk = pb.GenerateStreamChunk(
            token_ids=tokens,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=choice.completion_tokens,
            cached_tokens=self.cached_tokens,
            index=index,
        )
        if self._delivery.logprobs is not None:
            chunk.output_logprobs.CopyFrom(_logprobs(tokens, choice.logprobs[choice.sent :]))
        choice.sent = len(choice.tokens)
        choice.chunks += 1
        yield pb.GenerateResponse(request_id=self._id, chunk=chunk)

    def _complete(self, index: int, reason: str, matched: int | str | None) -> pb.GenerateResponse:
        choice = self._choices[index]
        complete = pb.GenerateComplete(
            output_ids=choice.tokens,
            finish_reason=str(reason),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=choice.completion_tokens,
            cached_tokens=self.cached_tokens,
            index=index,
        )
        if isinstance(matched, int):
            complete.matched_token_id = matched
        elif matched is not None:
            complete.matched_stop_str = matched
        if self._delivery.logprobs is not None:
            complete.output_logprobs.CopyFrom(_logprobs(choice.tokens, choice.logprobs))
        return pb.GenerateResponse(request_id=self._id, complete=complete)


def _logprobs(tokens: list[int], logprobs: list[TokenLogprobs]) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_logprobs=[entry.chosen for entry in logprobs],
        token_ids=tokens,
        top_logprobs=[
            pb.TopLogProbs(
                values=[value for _, value in entry.top],
                token_ids=[token for token, _ in entry.top],
            )
            for entry in logprobs
        ],
    )
