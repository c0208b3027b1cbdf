"""The bundled model behind worker and gateway, through the real client."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest
from openai import OpenAI

import k3jax
from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from k3jax.engine.request import SamplingParams
from serving.client import Client
from serving.readiness import Limits, ProbeFailed, Probes
from tests.serving.running import RunningWorker, nano, running_gateway, running_worker

CONTEXT = 1024
ROWS = 4
MODEL = nano(max_context=CONTEXT)
PRICE = {
    "type": "function",
    "function": {
        "name": "get_price",
        "description": "Get the price of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
}


@pytest.fixture(scope="module")
def worker() -> Iterator[RunningWorker]:
    """One prefill and one decode shape, so that two programs are compiled."""
    params, config = k3jax.load_model(MODEL.text.folder)
    sizes = EngineConfig(
        max_rows=ROWS,
        max_context=CONTEXT,
        prefill_shapes=((1, 256),),
        decode_rows=(ROWS,),
        contexts=(CONTEXT,),
    )
    with running_worker(
        lambda: Engine(params, config, sizes), model=MODEL, max_rows=ROWS
    ) as running:
        yield running


@pytest.fixture(scope="module")
def api(worker: RunningWorker) -> Iterator[OpenAI]:
    with running_gateway(worker) as gateway:
        yield OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=600)


def ask(api: OpenAI, messages: str | Sequence[Any], **options: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    chosen = {"temperature": 0, "max_completion_tokens": 200, **options}
    return api.chat.completions.create(model="nano", messages=messages, **chosen)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_answer_is_the_librarys_own_however_it_is_asked_for(worker: RunningWorker, api: OpenAI):
    question = [{"role": "user", "content": "What is 28+85?"}]
    with Client(worker.address) as client:
        native = "".join(
            delta.text
            for delta in client.chat(question, None, SamplingParams(max_tokens=200))
            if delta.kind == "content"
        )

    whole = ask(api, question).choices[0].message
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in ask(api, question, stream=True)
    )

    assert native == whole.content == streamed == "28+85=113"
    assert whole.reasoning_content


def test_tool_call_and_the_answer_from_its_result(api: OpenAI):
    messages: list[Any] = [{"role": "user", "content": "What does the violin cost?"}]

    first = ask(api, messages, tools=[PRICE]).choices[0]
    (call,) = first.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"price": 88}'}
    last = ask(api, [*messages, first.message.model_dump(), result], tools=[PRICE]).choices[0]

    assert first.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"item": "violin"}
    assert "88" in last.message.content


def test_required_tool_is_called_whatever_is_said(api: OpenAI):
    choice = ask(api, "Hello!", tools=[PRICE], tool_choice="required", seed=3, temperature=1)

    (call, *_) = choice.choices[0].message.tool_calls
    assert call.function.name == "get_price"
    assert set(json.loads(call.function.arguments)) == {"item"}


@pytest.mark.parametrize("effort", ["none", "max"])
def test_schema_is_kept_even_when_drawing_wildly(api: OpenAI, effort: str):
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["age", "ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}

    for seed in range(3):
        choice = ask(
            api,
            "My name is Emma. I am 33 years old.",
            response_format=wanted,
            reasoning_effort=effort,
            temperature=2,
            seed=seed,
            max_completion_tokens=700,
        ).choices[0]
        if choice.finish_reason == "stop":
            value = json.loads(choice.message.content)
            assert set(value) == {"age", "ok"} and isinstance(value["ok"], bool)


def test_follow_up_turn_resumes_from_the_cache(worker: RunningWorker, api: OpenAI):
    notes = "Notes: " + ", ".join(f"item{i}={i * 7 % 90 + 10}" for i in range(60))
    messages: list[Any] = [{"role": "user", "content": f"{notes}. What is item7?"}]

    first = ask(api, messages, reasoning_effort="none", max_completion_tokens=20)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "What is item8?"},
    ]
    second = ask(api, messages, reasoning_effort="none", max_completion_tokens=20)

    cached = second.usage.prompt_tokens_details.cached_tokens
    assert not first.usage.prompt_tokens_details.cached_tokens
    assert cached > 0.8 * first.usage.prompt_tokens


def test_same_seed_draws_the_same_and_choices_differ(api: OpenAI):
    options: dict[str, Any] = {"temperature": 2, "top_p": 1, "seed": 11, "n": 3}

    first, second = (
        [
            (choice.message.content, choice.message.reasoning_content)
            for choice in ask(api, "Tell me more.", **options).choices
        ]
        for _ in range(2)
    )

    assert first == second
    assert len(set(first)) > 1


def test_streams_beside_each_other_equal_their_solo_results(worker: RunningWorker):
    with Client(worker.address) as client:
        prompts = [
            client.model.chat_prompt([{"role": "user", "content": f"What is {i}+{2 * i}?"}])
            for i in range(11, 11 + 2 * ROWS)
        ]
        sampling = SamplingParams(max_tokens=24)

        def run(prompt: Any) -> list[int]:
            return list(client.generate(prompt, sampling))

        solo = [run(prompt) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(run, prompts))

    assert together == solo


def test_probes_pass_and_leave_nothing(worker: RunningWorker):
    limits = Limits(
        max_context=CONTEXT,
        max_rows=ROWS,
        page_size=64,
        prefix_cache=True,
        vocab_size=MODEL.text.config.vocab_size,
    )
    probes = Probes(worker.worker.loop, worker.worker.constraints, limits)

    names = worker.run(probes.run(), timeout=600)

    stats = worker.worker.loop.stats
    assert names == ["longest prompt", "largest batch", "prefix hit", "structured output"]
    assert stats.pages_free == stats.pages_total
    assert stats.slots_free == stats.slots_total


def test_probe_names_what_failed(worker: RunningWorker):
    limits = Limits(
        max_context=CONTEXT + 10,
        max_rows=ROWS,
        page_size=64,
        prefix_cache=True,
        vocab_size=MODEL.text.config.vocab_size,
    )

    with pytest.raises(ProbeFailed, match=r"longest prompt: .*context"):
        worker.run(Probes(worker.worker.loop, worker.worker.constraints, limits).run())


def test_nothing_compiles_after_the_first_requests(worker: RunningWorker, api: OpenAI):
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    ask(api, "What is 1+2?", presence_penalty=0.5, n=2)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        ask(api, "What is 13+20?", presence_penalty=0.5, n=3)
        ask(api, "Hello!", logprobs=True, tools=[PRICE], tool_choice="required")
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)

    assert not compiled


def test_metrics_tell_what_was_done(worker: RunningWorker, api: OpenAI):
    async def serve() -> int:
        return worker.worker.metrics.serve(0, "127.0.0.1")

    ask(api, "What is 2+3?")
    port = worker.run(serve())
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    found = {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }

    assert found["vllm:time_to_first_token_seconds_count"] > 0
    assert found["vllm:request_queue_time_seconds_count"] > 0
    assert found["vllm:e2e_request_latency_seconds_count"] > 0
    assert found["vllm:inter_token_latency_seconds_count"] > 0
    assert found["vllm:generation_tokens_total"] > 0
    assert found["vllm:prefix_cache_queries_total"] > found["vllm:prefix_cache_hits_total"] >= 0
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert 0 <= found["vllm:kv_cache_usage_perc"] <= 1
    assert found["k3jax:step_seconds_count"] > 0
    assert "k3jax:prefix_cache_misses_total" in found
