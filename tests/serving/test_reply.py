"""Responses: nothing is lost or sent twice, however the events arrive."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from k3jax.engine.request import FinishReason, Request, TokenEvent, TokenLogprobs
from serving.reply import Reply
from serving.wire import Delivery
from tests.serving.running import completes, nano, tokens

TOKENIZER = nano().text.tokenizer
PROMPT = (5, 6, 7)


def event(
    token: int | None, choice: int = 0, reason: FinishReason | None = None, logprob: float = 0.0
) -> TokenEvent:
    logprobs = TokenLogprobs(logprob, ((1, logprob), (2, -9.0))) if logprob else None
    return TokenEvent("r", choice, token, logprobs, reason, len(PROMPT), 2, None)


def reply(n: int = 1, prompt: tuple[int, ...] = PROMPT, **delivery: object) -> Reply:
    chosen = {"stream": True, **delivery}
    return Reply(Request("r", prompt, n=n), Delivery(**chosen), TOKENIZER)


def push_text(reply: Reply, text: str) -> list:
    """The responses to a text that comes one id at a time."""
    return [r for token in TOKENIZER.encode_control(text) for r in reply.push([event(token)])]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=12), st.data())
def test_chunks_join_to_the_complete_output_however_events_are_batched(ids: list[int], data):
    events = [event(token) for token in ids[:-1]]
    events.append(event(ids[-1], reason=FinishReason.LENGTH))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(events)))) | {0, len(events)})
    writer = reply()

    responses = [r for start, end in pairwise(cuts) for r in writer.push(events[start:end])]

    (complete,) = completes(responses)
    assert tokens(responses) == list(complete.output_ids) == ids
    assert complete.completion_tokens == len(ids)
    assert complete.finish_reason == "length"
    assert responses[0].WhichOneof("response") == "chunk"


def test_stop_id_is_counted_but_not_sent():
    responses = list(reply().push([event(9), event(7, reason=FinishReason.STOP)]))

    (complete,) = completes(responses)
    assert list(complete.output_ids) == [9]
    assert complete.completion_tokens == 2
    assert complete.matched_token_id == 7


def test_stop_id_is_kept_when_asked_for():
    writer = reply(keep_stop=True)

    (complete,) = completes(list(writer.push([event(7, reason=FinishReason.STOP)])))

    assert list(complete.output_ids) == [7]


def test_stop_id_as_first_token_still_gives_a_chunk_before_the_end():
    responses = list(reply().push([event(7, reason=FinishReason.STOP)]))

    assert [r.WhichOneof("response") for r in responses] == ["chunk", "complete"]


def test_without_streaming_there_is_one_end_for_each_choice():
    writer = reply(n=2, stream=False)

    responses = list(writer.push([event(3), event(4, 1)]))
    responses += writer.push([event(5, 1, FinishReason.LENGTH), event(6, 0, FinishReason.LENGTH)])

    assert [list(c.output_ids) for c in completes(responses)] == [[3, 6], [4, 5]]
    assert len(responses) == 2
    assert writer.done


def test_end_without_a_token_has_its_reason():
    responses = list(reply().push([event(None, reason=FinishReason.ABORT)]))

    (complete,) = completes(responses)
    assert complete.finish_reason == "abort"
    assert complete.completion_tokens == 0
    assert complete.WhichOneof("matched_stop") is None


def test_logprobs_go_with_their_tokens():
    writer = reply(logprobs=2)

    first = list(writer.push([event(3, logprob=-0.5)]))
    last = list(writer.push([event(4, reason=FinishReason.STOP, logprob=-0.25)]))

    assert list(first[0].chunk.output_logprobs.token_logprobs) == [-0.5]
    assert list(first[0].chunk.output_logprobs.top_logprobs[0].token_ids) == [1, 2]
    (complete,) = completes(last)
    assert list(complete.output_logprobs.token_ids) == [3]


def test_stop_string_split_over_tokens_ends_the_choice():
    writer = reply(stop=("lo wo", "xyz"))

    responses = push_text(writer, "Hello world, and more")

    (complete,) = completes(responses)
    assert complete.matched_stop_str == "lo wo"
    assert complete.finish_reason == "stop"
    assert TOKENIZER.decode(complete.output_ids).startswith("Hello wo")
    assert "and" not in TOKENIZER.decode(complete.output_ids)


def test_stop_string_does_not_match_thinking_markers_or_calls():
    prompt = tuple(TOKENIZER.encode_control("<|open|>think<|sep|>"))
    writer = reply(prompt=prompt, stop=("response", "Paris"))
    thought = "Is Paris in the response?<|close|>think<|sep|><|open|>response<|sep|>"
    call = (
        "Yes.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="go" index="1"<|sep|>'
        '<|open|>argument key="to" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    )

    assert not completes(push_text(writer, thought + call))
    assert completes(push_text(reply(prompt=prompt, stop=("es.",)), thought + call))


def test_nothing_is_sent_after_the_end_of_a_choice():
    writer = reply(n=2)
    list(writer.push([event(3, 0, FinishReason.LENGTH)]))

    assert list(writer.push([event(4, 0)])) == []
    assert not writer.done
