"""Staging: exact copies in memory that is used again, never in memory that somebody still reads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.core.errors import CheckpointError, ConfigError
from ckptmgr.training import buffers
from ckptmgr.training.staging import Stager, state_bytes
from ckptmgr.training.state import Snapshot, restore, write

DEADLINE_S = 60.0
PAGES = 1 << 16  # bytes of a storage that is worth a buffer


def floats(count: int = PAGES // 4) -> torch.Tensor:
    return torch.randn(count)


def addresses(tree: Any) -> list[int]:
    """Where the storages of a tree's tensors are."""
    if isinstance(tree, torch.Tensor):
        return [tree.untyped_storage().data_ptr()]
    items = tree.values() if isinstance(tree, dict) else tree
    return [address for item in items for address in addresses(item)]


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(5, 256)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def equal(one: Any, other: Any) -> bool:
    """Whether two trees are the same, to the last bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and one.size() == other.size() and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def copy_of(tree: Any) -> Any:
    return Stager().capture({"tree": tree}, rng=False).pieces["tree"]


def pooled(tree: Any) -> int:
    """Bytes of the storages of `tree` that are worth a buffer."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tree}
    return sum(size for size in sizes.values() if size > buffers.SMALL_BYTES)


def test_a_snapshot_does_not_change_with_the_training_after_it(tmp_path: Path) -> None:
    """Also the second one, in memory that the first one had."""
    state = trained()
    stager = Stager()
    for number in range(2):
        snapshot = stager.capture(state)
        before = copy_of({name: piece.state_dict() for name, piece in state.items()})
        step(state["model"], state["optimizer"])
        assert not equal(state["model"].state_dict(), before["model"])
        write(snapshot, tmp_path / str(number))
        snapshot.release()
        restore(tmp_path / str(number), state)
        assert equal({name: piece.state_dict() for name, piece in state.items()}, before)


def test_the_next_save_goes_where_the_last_one_was() -> None:
    """Each tensor's bytes at the same place, and nothing allocated but what is small."""
    state = trained()
    stager = Stager()
    first = stager.capture(state)
    places = addresses(first.pieces["model"])
    assert stager.reused_bytes == 0
    assert stager.allocated_bytes == first.size_bytes
    first.release()
    second = stager.capture(state)
    assert addresses(second.pieces["model"])[::2] == places[::2]  # the weights; biases are small
    assert stager.reused_bytes == 6 * 256 * 256 * 4
    assert stager.allocated_bytes == second.size_bytes - stager.reused_bytes
    assert stager.last_stage_s > 0


def test_five_saves_take_no_more_memory_than_one() -> None:
    """As the system counts it, and as the stager does."""
    state = {"a": {i: torch.ones(1 << 20) for i in range(16)}}

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    stager = Stager()
    stager.capture(state).release()
    before = resident()
    for _ in range(5):
        snapshot = stager.capture(state)
        assert stager.free_bytes == 0
        snapshot.release()
        assert stager.free_bytes == 64 << 20
    assert resident() - before < 8 << 20


def test_two_snapshots_at_once_share_nothing() -> None:
    """The second does not take what the first one has not released; when both are, one state's size is kept."""
    stager = Stager()
    tensor = torch.zeros(PAGES)
    first = stager.capture({"t": {"t": tensor}})
    tensor.fill_(1)
    second = stager.capture({"t": {"t": tensor}})
    assert not first.pieces["t"]["t"].any()
    assert second.pieces["t"]["t"].all()
    second.release()
    first.release()
    assert stager.free_bytes == PAGES * 4


def test_release_again_is_nothing_and_then_no_snapshot_is_there(tmp_path: Path) -> None:
    """A buffer is given back once, from whatever thread; a released snapshot is not written, for its memory is another's."""
    stager = Stager()
    snapshot = stager.capture({"t": {"t": floats()}})
    snapshot.ready()
    threads = [threading.Thread(target=snapshot.release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert stager.free_bytes == PAGES
    one, other = (stager.capture({"t": {"t": floats()}}) for _ in range(2))
    assert addresses(one.pieces["t"]) != addresses(other.pieces["t"])
    with pytest.raises(RuntimeError, match="released"):
        write(snapshot, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def test_a_state_of_other_sizes_takes_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the new state has no use for is given back before more is taken; then what it did not use."""
    live: dict[int, int] = {}
    most = 0
    make, end = buffers.Slab.__init__, buffers.Slab.__del__

    def init(self: buffers.Slab, size_bytes: int, pinner: Any) -> None:
        nonlocal most
        make(self, size_bytes, pinner)
        live[id(self)] = size_bytes
        most = max(most, sum(live.values()))

    def delete(self: buffers.Slab) -> None:
        live.pop(id(self), None)
        end(self)

    monkeypatch.setattr(buffers.Slab, "__init__", init)
    monkeypatch.setattr(buffers.Slab, "__del__", delete)
    stager = Stager()
    stager.capture({"t": [torch.zeros(PAGES + 8 * i) for i in range(8)]}).release()
    assert stager.free_bytes == most == sum(4 * (PAGES + 8 * i) for i in range(8))
    snapshot = stager.capture({"t": [torch.zeros(PAGES + 8 * i) for i in range(4, 12)]})
    assert stager.reused_bytes == sum(4 * (PAGES + 8 * i) for i in range(4, 8))
    assert most == sum(4 * (PAGES + 8 * i) for i in range(4, 12))
    snapshot.release()
    del snapshot
    stager.capture({"t": [torch.zeros(PAGES)]}).release()
    assert stager.free_bytes == sum(live.values()) == 4 * PAGES


def test_tied_weights_are_copied_once_and_stay_tied_across_pieces(tmp_path: Path) -> None:
    """K034: in the snapshot, in the file of each piece, and after the restore."""
    table = torch.randn(100, 1024)
    state = {"tree": {"embed": table, "head": table, "row": table[3:], "turned": table.T}, "other": {"again": table}}
    stager = Stager()
    for _ in range(2):
        snapshot = stager.capture(state, rng=False)
        assert snapshot.size_bytes == table.untyped_storage().nbytes() == state_bytes(state)
        assert len(set(addresses(snapshot.pieces))) == 1
        assert equal(snapshot.pieces["tree"], state["tree"])
        write(snapshot, tmp_path)
        snapshot.release()
    loaded = restore(tmp_path, {"tree": None}, rng=False).values["tree"]
    assert equal(loaded, state["tree"])
    loaded["embed"].zero_()
    assert not any(tensor.any() for tensor in loaded.values())
    assert table.any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: floats().bfloat16(),
        lambda: torch.randn(PAGES, dtype=torch.complex64),
        lambda: torch.randn(PAGES, dtype=torch.complex64).conj(),
        lambda: torch.randn(PAGES, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(300, 400).T,
        lambda: torch.randn(300, 400)[10:200:3, 5::7],
        lambda: torch.randn(8, 16, 16, 16).to(memory_format=torch.channels_last),
        lambda: torch.randn(1, 300).expand(500, 300),
        lambda: torch.randn(PAGES + 3, requires_grad=True),
        lambda: torch.nn.Parameter(torch.randn(300, 300)),
        lambda: torch.randint(0, 255, (PAGES + 5,), dtype=torch.uint8),
        lambda: torch.randint(0, 255, (PAGES + 5,), dtype=torch.uint8)[3:],
        lambda: torch.frombuffer(bytearray(os.urandom(PAGES + 1)), dtype=torch.uint8, offset=1),
        lambda: torch.randn(300, 300, dtype=torch.float64) > 0,
        lambda: torch.tensor(1.5),
        lambda: torch.empty(0, 3),
        lambda: torch.eye(300).to_sparse(),
        lambda: torch.eye(300).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(floats(), 0.1, 3, torch.qint8),
    ],
    ids=[
        *("bf16", "complex", "conj", "neg", "turned", "strided", "channels last", "expanded", "leaf", "parameter"),
        *("odd size", "offset", "odd address", "bool", "scalar", "empty", "sparse", "csr", "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(sparse|Sparse|quantiz|Quantiz|deprecated)")
def test_tensors_of_every_kind_come_back_as_they_were(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    """In fresh memory and in used one: bytes, type, shape and strides; and what was counted beforehand is what was copied."""
    stager = Stager()
    for number in range(2):
        tensor = make()
        snapshot = stager.capture({"t": [tensor]}, rng=False)
        assert snapshot.size_bytes == state_bytes({"t": [tensor]})
        expected = tensor.detach().resolve_conj().resolve_neg().clone()
        if tensor.is_leaf and tensor.layout is torch.strided and not tensor.is_quantized:
            tensor.detach().zero_()
        write(snapshot, tmp_path / str(number))
        snapshot.release()
        (loaded,) = restore(tmp_path / str(number), {"t": None}, rng=False).values["t"]
        assert loaded.dtype is expected.dtype
        assert loaded.layout is expected.layout
        assert not loaded.requires_grad
        if loaded.layout is torch.strided:
            assert loaded.stride() == tensor.resolve_conj().resolve_neg().stride()
        plain = [t.dequantize() if t.is_quantized else t.to_dense() for t in (loaded, expected)]
        assert torch.equal(plain[0], plain[1])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_views_share_what_they_shared_and_hold_what_they_held(data: st.DataObject) -> None:
    """Any views of a few storages, under several types, saved three times with other values: exact, and tied by storage and type."""
    sizes = data.draw(st.lists(st.sampled_from([64, 4096, 40_000, 80_000]), min_size=1, max_size=3))
    storages = [torch.zeros(size // 4) for size in sizes]
    views = []
    for _ in range(data.draw(st.integers(1, 6))):
        base = data.draw(st.sampled_from(storages))
        start = data.draw(st.integers(0, base.numel() // 2))
        view = base[start : start + data.draw(st.integers(1, base.numel() // 2))]
        views.append(view.view(data.draw(st.sampled_from([torch.float32, torch.int32, torch.int16]))))
    stager = Stager()
    for _ in range(3):
        for storage in storages:
            storage.copy_(torch.randint(0, 1000, storage.shape).float())
        snapshot = stager.capture({"v": views}, rng=False)
        copies = snapshot.pieces["v"]
        assert all(map(torch.equal, copies, views))
        for i, one in enumerate(views):
            for j, other in enumerate(views):
                tied = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
                assert (addresses(copies[i]) == addresses(copies[j])) == (tied and one.dtype is other.dtype)
        snapshot.release()


@pytest.mark.parametrize("first", [True, False], ids=["first capture", "later one"])
@pytest.mark.parametrize("kind", ["a value", "a state_dict", "memory"])
def test_a_failed_capture_leaves_the_buffers_free(kind: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is as without a stager; the next save is as if this one had not been."""
    good = {"a": {"t": floats()}, "b": {"t": floats()}}
    bad: dict[str, Any] = dict(good)
    stager = Stager()
    places: list[int] = []
    if not first:
        snapshot = stager.capture(good)
        places = addresses(snapshot.pieces["a"]) + addresses(snapshot.pieces["b"])
        snapshot.release()
    if kind == "a value":
        bad["c"] = {"deep": [0, object()]}
        error: type[Exception] = ConfigError
    elif kind == "a state_dict":
        bad["c"] = torch.nn.Linear(1, 1)
        monkeypatch.setattr(torch.nn.Linear, "state_dict", lambda *args, **kwargs: 1 / 0)
        error = CheckpointError
    else:
        bad["c"] = {"t": floats(2 * PAGES)}
        real = buffers.Slab.__init__

        def init(self: buffers.Slab, size_bytes: int, pinner: Any) -> None:
            if size_bytes == 8 * PAGES:
                self._pinner = None
                raise OSError(12, "Cannot allocate memory")
            real(self, size_bytes, pinner)

        monkeypatch.setattr(buffers.Slab, "__init__", init)
        error = CheckpointError
    with pytest.raises(error, match=r"c\.deep\[1\]|'c'|no memory for a copy of 524288 bytes"):
        stager.capture(bad)
    assert stager.free_bytes == (0 if first else 2 * PAGES)
    snapshot = stager.capture(good)
    assert equal(snapshot.pieces["a"], good["a"])
    if not first:
        assert addresses(snapshot.pieces["a"]) + addresses(snapshot.pieces["b"]) == places


def test_capturing_draws_no_random_number_and_follows_no_graph() -> None:
    """Nor does it need autograd, whatever mode it is called in; and it can be called in another one the next time."""
    state = {"p": {"w": torch.nn.Parameter(torch.randn(300, 300))}}
    stager = Stager()
    seed = torch.get_rng_state()
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode(), torch.device("meta"):
            snapshot = stager.capture(state, rng=False)
        copy = snapshot.pieces["p"]["w"]
        assert torch.equal(copy, state["p"]["w"])
        assert (copy.device.type, copy.requires_grad, copy.grad_fn, copy.is_inference()) == ("cpu", False, None, False)
        snapshot.release()
    assert torch.equal(torch.get_rng_state(), seed)


def test_state_bytes_is_of_distinct_storages() -> None:
    """As a snapshot counts them: views of one are one, each type of it is one more, plain values are nothing."""
    table = torch.zeros(1000)
    tree = {"a": table, "b": (table[3:], [table.view(torch.int32)]), "n": 3, "sparse": torch.eye(3).to_sparse()}
    found = state_bytes({"tree": tree, "linear": torch.nn.Linear(10, 10)})
    assert found == 4000 + 4000 + 3 * (2 * 8 + 4) + 440
    assert found == Stager().capture({"tree": tree, "linear": torch.nn.Linear(10, 10)}, rng=False).size_bytes


FORKING = """
import os, sys, torch
from ckptmgr.training.staging import Stager
torch.set_num_threads(1)  # OpenMP does not survive a fork
stager = Stager()
state = {"t": {"t": torch.ones(1 << 20)}}
snapshot = stager.capture(state)
address = snapshot.pieces["t"]["t"].data_ptr()

def is_mapped():
    ranges = [line.split()[0].split("-") for line in open("/proc/self/maps")]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)

assert is_mapped()
snapshot.release()
pid = os.fork()
if pid == 0:
    assert not is_mapped()
    again = stager.capture(state)
    assert bool((again.pieces["t"]["t"] == 1).all()) and stager.reused_bytes == 0
    again.release()
    os._exit(42)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
state["t"]["t"].fill_(2)
assert bool((stager.capture(state).pieces["t"]["t"] == 2).all()) and stager.reused_bytes == 4 << 20
"""


def test_a_fork_costs_the_next_save_nothing() -> None:
    """A forked child (a DataLoader worker) does not get the buffers, so that they stay this process's own; it can save all the same."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr


def test_a_snapshot_of_its_own_memory_needs_no_release() -> None:
    """What `state.capture` returns."""
    snapshot = Snapshot(pieces={}, size_bytes=0)
    snapshot.ready()
    snapshot.release()
    snapshot.ready()
