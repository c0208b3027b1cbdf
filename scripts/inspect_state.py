"""Show what an engine's state holds: sizes per pool and kind of layer, who holds pages and slots,
the prefix tree, the host tier and counters.

  python scripts/inspect_state.py SNAPSHOT.npz         # written by k3jax.engine.snapshot
  python scripts/inspect_state.py SNAPSHOT.npz --json
  python scripts/inspect_state.py --demo               # the bundled model, in the middle of work
  python scripts/inspect_state.py --demo --save state.npz --arrays

A program with an engine calls k3jax.engine.inspection.describe(engine), which --json prints, or
k3jax.engine.snapshot.save_snapshot(engine, path) to look at it later. With arrays, a snapshot
also holds the cached prefixes, and load_snapshot puts them into another engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3jax.bundled import BUNDLED

_HOLDERS = {
    "free": "free",
    "running": "running",
    "cached": "cached",
    "running_and_cached": "both",
    "steps_in_flight": "in flight",
}


def table(state: dict[str, Any]) -> str:
    """The description of an engine as text."""
    sections = (_sizes, _occupancy, _sequences, _tree, _host, _counters)
    return "\n\n".join("\n".join(section(state)) for section in sections)


def _sizes(state: dict[str, Any]) -> Iterator[str]:
    found = state["state"]
    yield f"state: {_bytes(found['bytes'])}"
    yield f"  {'':<16} {'arrays':>6}  {'shape of each':<20} {'type':<9} {'bytes':>10}"
    for pool in found["pools"]:
        shape = " × ".join(map(str, pool["shape"]))
        yield (
            f"  {pool['kind']:<16} {pool['arrays']:>6}  {shape:<20} {pool['dtype']:<9} "
            f"{_bytes(pool['bytes']):>10}"
        )
    tokens = state["settings"]["page_size"]
    per_token = found["page_bytes"] // tokens
    yield (
        f"  one slot {_bytes(found['slot_bytes'])}; one page of {tokens} tokens "
        f"{_bytes(found['page_bytes'])}, {_bytes(per_token)} a token"
    )


def _occupancy(state: dict[str, Any]) -> Iterator[str]:
    yield f"{'held by':<8} {'total':>7} " + " ".join(f"{n:>10}" for n in _HOLDERS.values())
    for name in ("pages", "slots"):
        pool = state[name]
        yield f"{name:<8} {pool['total']:>7} " + " ".join(f"{pool[k]:>10}" for k in _HOLDERS)


def _sequences(state: dict[str, Any]) -> Iterator[str]:
    yield f"sequences: {len(state['sequences'])}"
    if state["sequences"]:
        yield (
            f"  {'request':<16} {'phase':<8} {'tokens':>7} {'computed':>8} {'cached':>7} "
            f"{'pages':>6} {'slot':>5} {'reads':>6} {'preempted':>9}"
        )
    for one in state["sequences"]:
        name = one["request"] if one["choice"] == 0 else f"{one['request']}#{one['choice']}"
        yield (
            f"  {name:<16} {one['phase']:<8} {one['tokens']:>7} {one['computed']:>8} "
            f"{one['cached']:>7} {one['pages']:>6} {_number(one['slot']):>5} "
            f"{_number(one['reads_slot']):>6} {one['preemptions']:>9}"
        )


def _tree(state: dict[str, Any]) -> Iterator[str]:
    runs = state["tree"]
    points = sum((run["slot"] is not None) + len(run["tails"]) for run in runs)
    yield f"prefix tree: {len(runs)} runs, {points} checkpoints (* in use by a sequence)"
    for run in runs:
        indent, end = "  " * (run["depth"] + 1), run["start"] + run["tokens"]
        if run["tokens"]:
            line = f"{indent}tokens {run['start']}..{end}  pages {_ranges(run['pages'])}"
            if run["pages_in_use"]:
                line += f"  {run['pages_in_use']}*"
            if run["slot"] is not None:
                line += f"  checkpoint {end} in slot {run['slot']}{'*' * run['slot_in_use']}"
            yield line
        for tail in run["tails"]:
            yield (
                f"{indent}  + {tail['tokens']} in page {tail['page']}  checkpoint "
                f"{end + tail['tokens']} in slot {tail['slot']}{'*' * tail['in_use']}"
            )


def _host(state: dict[str, Any]) -> Iterator[str]:
    host = state["host"]
    if host is None:
        yield "host tier: off"
        return
    yield (
        f"host tier: {len(host['entries'])} prefixes, {_bytes(host['bytes'])} of "
        f"{_bytes(host['max_bytes'])}; {host['offloads']} copied out, {host['hits']} brought back "
        f"({host['hit_tokens']} tokens), {host['evictions']} evicted"
    )
    for entry in host["entries"]:
        yield f"  {entry['tokens']} tokens, {entry['pages']} pages, {_bytes(entry['bytes'])}"


def _counters(state: dict[str, Any]) -> Iterator[str]:
    found = state["counters"]
    yield (
        f"{found['steps']} steps; cache: {found['hits']} hits of {found['queries']} prompts, "
        f"{found['hit_tokens']} of {found['query_tokens']} tokens; misses "
        f"{_counts(found['misses'])}; evictions {_counts(found['evictions'])}; "
        f"{found['preemptions']} preemptions"
    )


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _counts(values: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in values.items()) or "none"


def _ranges(numbers: list[int]) -> str:
    """`7, 8, 9, 4` → `7..9, 4`, `9, 8, 7` → `9..7`; long lists end in `…`."""
    parts: list[list[int]] = []
    for number in numbers:
        last = parts[-1] if parts else []
        step = last[1] - last[0] if len(last) > 1 else 1 if last and number > last[-1] else -1
        if last and number == last[-1] + step:
            last.append(number)
        else:
            parts.append([number])
    shown = [str(p[0]) if len(p) == 1 else f"{p[0]}..{p[-1]}" for p in parts]
    return ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "")


def _bytes(count: int) -> str:
    size, units = float(count), ("B", "KiB", "MiB", "GiB")
    for unit in units:
        if size < 1024 or unit == units[-1]:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def demo() -> Any:
    """An engine over the bundled model: a conversation's turns, one more request under way."""
    from k3jax.chat import ChatOptions
    from k3jax.engine.engine import Engine
    from k3jax.engine.engine_config import EngineConfig
    from k3jax.engine.request import Request, SamplingParams
    from k3jax.text_model import TextModel
    from k3jax.weights import load_model

    model = TextModel.open(BUNDLED)
    params, _ = load_model(model.folder, progress=False)
    settings = EngineConfig(
        max_rows=2,
        max_context=512,
        page_size=16,
        num_pages=40,
        num_slots=7,
        contexts=(512,),
        prefill_shapes=((1, 64),),
        decode_rows=(2,),
        host_bytes=1 << 26,
        host_least_tokens=16,
    )
    engine = Engine(params, model.config, settings)
    options = ChatOptions(thinking=False)

    def submit(name: str, messages: list[dict[str, str]], max_tokens: int) -> None:
        prompt = model.chat_prompt(messages, options).tokens
        engine.submit(Request(name, prompt, SamplingParams(max_tokens=max_tokens)))

    talk: list[dict[str, str]] = []
    for number, text in enumerate(("What is 34 + 58?", "And 7 + 12?", "Sort 5, 3, 9, 1.")):
        talk.append({"role": "user", "content": text})
        submit(f"turn {number + 1}", talk, 24)
        reply = [event.token for event in engine.run() if event.token is not None]
        talk.append({"role": "assistant", "content": model.tokenizer.decode(reply[:-1])})
    submit("another", [{"role": "user", "content": "Reverse the word lantern."}], 24)
    submit("one more", [{"role": "user", "content": "What is 1 + 1?"}], 24)
    submit("turn 4", [*talk, {"role": "user", "content": "Thank you. What is 2 + 2?"}], 24)
    for _ in range(4):
        engine.step()
    return engine


def main() -> int:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("snapshot", nargs="?", type=Path, help="a file of save_snapshot")
    parser.add_argument("--demo", action="store_true", help=f"run {BUNDLED} for a moment instead")
    parser.add_argument("--save", type=Path, metavar="FILE", help="with --demo: write a snapshot")
    parser.add_argument("--arrays", action="store_true", help="with --save: the prefixes as well")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    if args.demo == (args.snapshot is not None):
        parser.error("give a snapshot, or --demo")
    if (args.save and not args.demo) or (args.arrays and not args.save):
        parser.error("--save goes with --demo, and --arrays with --save")
    from k3jax.engine.inspection import describe
    from k3jax.engine.snapshot import read_snapshot, save_snapshot

    try:
        if args.demo:
            engine = demo()
            state = describe(engine)
            if args.save:
                save_snapshot(engine, args.save, arrays=args.arrays)
        else:
            state = read_snapshot(args.snapshot)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    print(json.dumps(state) if args.json else table(state))
    return 0


if __name__ == "__main__":
    sys.exit(main())
