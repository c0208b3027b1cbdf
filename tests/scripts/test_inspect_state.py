import json
import zipfile
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from k3jax.engine.inspection import describe
from k3jax.engine.request import Request, SamplingParams
from k3jax.engine.snapshot import load_snapshot, read_snapshot, save_snapshot
from scripts import inspect_state
from tests.random_weights import random_weights, two_layer_config

CONFIG = replace(two_layer_config(), eos_token_ids=())
PARAMS = random_weights(CONFIG)
PAGE, SLOTS, PAGES = 8, 6, 13


def make_engine(**changes) -> Engine:
    sizes = EngineConfig(
        max_rows=2,
        max_context=64,
        page_size=PAGE,
        num_pages=PAGES,
        num_slots=SLOTS,
        prefill_shapes=((1, 32),),
        decode_rows=(2,),
        contexts=(64,),
        host_bytes=1 << 20,
        host_least_tokens=1,
    )
    return Engine(PARAMS, CONFIG, replace(sizes, **changes))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist())


def reply(engine: Engine, tokens, name: str = "a") -> tuple[list[int | None], int]:
    engine.submit(Request(name, tokens, SamplingParams(max_tokens=3)))
    events = list(engine.run())
    return [event.token for event in events], events[0].cached_tokens


@pytest.fixture
def busy() -> Engine:
    """One finished conversation, one prefix on the host, two requests under way, one waiting."""
    engine = make_engine()
    reply(engine, prompt(11, seed=1))
    engine.store.pages.release(engine.store.take_pages(PAGES))
    reply(engine, prompt(19))
    for name, tokens in (("x", (*prompt(19), 5, 6)), ("y", prompt(9, seed=2)), ("z", prompt(30))):
        engine.submit(Request(name, tokens, SamplingParams(max_tokens=9)))
    for _ in range(3):
        engine.step()
    return engine


def test_what_is_described_adds_up(busy):
    state = describe(busy)
    for name, pool in (("pages", busy.store.pages), ("slots", busy.store.slots)):
        held = dict(state[name])
        assert held.pop("total") == pool.size == sum(held.values())
        assert held["free"] == pool.num_free
    assert state["state"]["bytes"] == busy.stats().state_bytes
    assert state["state"]["bytes"] == sum(pool["bytes"] for pool in state["state"]["pools"])
    pools = {pool["kind"]: pool for pool in state["state"]["pools"]}
    recurrent = pools["KDA matrices"]["bytes"] + pools["KDA windows"]["bytes"]
    assert recurrent == SLOTS * state["state"]["slot_bytes"]
    assert pools["MLA pages"]["bytes"] == PAGES * state["state"]["page_bytes"]
    tree_pages, tree_slots = busy.store.tree.held()
    runs = state["tree"]
    tails = [tail for run in runs for tail in run["tails"]]
    assert sorted(tree_pages) == sorted(
        {*(page for run in runs for page in run["pages"]), *(tail["page"] for tail in tails)}
    )
    found = [run["slot"] for run in runs if run["slot"] is not None]
    assert sorted(tree_slots) == sorted([*found, *(tail["slot"] for tail in tails)])
    assert [one["request"] for one in state["sequences"]] == ["x", "y", "z"]
    assert state["sequences"][0]["cached"] == 16
    assert state["host"]["bytes"] == busy.stats().host_bytes > 0
    assert sum(entry["bytes"] for entry in state["host"]["entries"]) == state["host"]["bytes"]


def test_nothing_described_is_a_token_of_a_prompt(busy):
    secret = make_engine()
    reply(secret, tuple(range(60, 79)))
    other = make_engine()
    reply(other, tuple(range(30, 49)))
    assert json.dumps(describe(secret)) == json.dumps(describe(other))


def test_the_table_shows_every_part(busy):
    text = inspect_state.table(describe(busy))
    for line in ("KDA matrices", "MLA pages", "one slot", "prefix tree: ", "host tier: ", "steps;"):
        assert line in text
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("  x ")] == [
        ["x", "decode"]
    ]
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "host tier: off" in inspect_state.table(describe(make_engine(host_bytes=0)))


def test_a_snapshot_is_what_was_described(busy, tmp_path, capsys, monkeypatch):
    save_snapshot(busy, tmp_path / "state.npz")
    state = json.loads(json.dumps(describe(busy)))
    assert read_snapshot(tmp_path / "state.npz") == state
    for options, expected in (([], inspect_state.table(state)), (["--json"], json.dumps(state))):
        arguments = ["inspect_state.py", str(tmp_path / "state.npz"), *options]
        monkeypatch.setattr("sys.argv", arguments)
        assert inspect_state.main() == 0
        assert capsys.readouterr().out == expected + "\n"


def test_another_engine_goes_on_from_a_snapshot(busy, tmp_path):
    count = save_snapshot(busy, tmp_path / "state.npz", arrays=True)
    fresh = make_engine()
    fresh.state = jax.tree.map(lambda x: jnp.asarray(np.full(x.shape, 7, x.dtype)), fresh.state)
    assert load_snapshot(fresh, tmp_path / "state.npz") == count > 2
    fresh.scheduler.check()
    known = {entry.tokens for entry in busy.store.tree.entries()}
    known |= {entry.tokens for entry in busy.host.entries()}
    assert {entry.tokens for entry in fresh.store.tree.entries()} == known
    longest = max(known, key=len)
    follow_up = (*longest, 1, 2)
    tokens, cached = reply(fresh, follow_up)
    assert cached == len(longest)
    assert tokens == reply(make_engine(prefix_cache=False), follow_up)[0]


def test_a_snapshot_that_has_no_room_leaves_the_most_recent_prefixes(busy, tmp_path):
    save_snapshot(busy, tmp_path / "state.npz", arrays=True)
    newest = list(busy.store.tree.entries())[-2:]
    small = make_engine(num_slots=2)
    assert load_snapshot(small, tmp_path / "state.npz") == 2
    assert [e.tokens for e in small.store.tree.entries()] == [e.tokens for e in newest]
    small.scheduler.check()


def test_a_snapshot_of_another_model_is_refused(busy, tmp_path):
    save_snapshot(busy, tmp_path / "state.npz", arrays=True)
    other = Engine(random_weights(CONFIG, seed=1), CONFIG, busy.settings)
    with pytest.raises(ValueError, match="made with other weights"):
        load_snapshot(other, tmp_path / "state.npz")
    with pytest.raises(ValueError, match="made with other weights"):
        load_snapshot(make_engine(page_size=16), tmp_path / "state.npz")


def test_a_file_that_is_no_snapshot_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 nothing")
    (tmp_path / "b.npz").write_text("{}")
    np.savez(tmp_path / "c.npz", x=np.zeros(3))
    for name in "abcd":
        path = tmp_path / f"{name}.npz"
        monkeypatch.setattr("sys.argv", ["inspect_state.py", str(path)])
        with pytest.raises(SystemExit) as stopped:
            inspect_state.main()
        assert stopped.value.code == 1
        assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["x.npz", "--demo"], ["x.npz", "--save", "y.npz"]])
def test_options_that_do_not_go_together_are_refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["inspect_state.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        inspect_state.main()
    assert stopped.value.code == 2
    assert "--" in capsys.readouterr().err


@pytest.mark.parametrize(
    "numbers, text",
    [([], ""), ([4], "4"), ([7, 8, 9, 4], "7..9, 4"), ([9, 8, 7, 8], "9..7, 8")],
)
def test_runs_of_ids_are_shortened(numbers, text):
    assert inspect_state._ranges(numbers) == text


def damage(path, entry, change):
    """The snapshot with the array `entry` changed; None takes it out."""
    with np.load(path) as data:
        content = {name: data[name] for name in data.files}
    changed = change(content.pop(entry))
    if changed is not None:
        content[entry] = changed
    np.savez(path, **content)


@pytest.mark.parametrize(
    ("entry", "change"),
    [
        ("0/matrices", lambda x: None),
        ("0/matrices", lambda x: x[:-1]),
        ("0/windows", lambda x: x[..., :-1]),
        ("0/pages/0", lambda x: None),
        ("0/pages/0", lambda x: x[:, :0]),
        ("0/tokens", lambda x: x[:0]),
        ("model", lambda x: None),
    ],
)
def test_a_damaged_snapshot_is_refused_and_takes_nothing(busy, tmp_path, entry, change):
    path = tmp_path / "state.npz"
    save_snapshot(busy, path, arrays=True)
    damage(path, entry, change)
    engine = make_engine()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"state\.npz is a damaged snapshot"):
            load_snapshot(engine, path)
        engine.scheduler.check()


def test_a_flipped_bit_is_found_and_takes_nothing(busy, tmp_path):
    path = tmp_path / "state.npz"
    save_snapshot(busy, path, arrays=True)
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("0/matrices.npy").header_offset
    raw = bytearray(path.read_bytes())
    raw[start + 400] ^= 1
    path.write_bytes(raw)
    engine = make_engine()
    with pytest.raises(ValueError, match=r"state\.npz is a damaged snapshot: Bad CRC"):
        load_snapshot(engine, path)
    engine.scheduler.check()
    assert reply(engine, (1, 2, 3))[0]
