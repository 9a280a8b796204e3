"""Capture, write and restore: exact, torn by nothing, and without pickle."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.backends.atomic import digest_file
from ckptmgr.core.errors import (
    CheckpointError,
    ConfigError,
    DiskFullError,
    IncompatibleStateError,
    IntegrityError,
    PermanentBackendError,
)
from ckptmgr.training.rng import capture_rng, restore_rng
from ckptmgr.training.state import capture, restore, write
from ckptmgr.training.trees import from_json, to_json


def round_trip(directory: Path, **values: Any) -> Mapping[str, Any]:
    """Plain values through capture, files and restore."""
    write(capture(values, rng=False), directory / "ckpt")
    return restore(directory / "ckpt", values, rng=False).values


def next_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5])
    step(model, optimizer)
    scheduler.step()
    return model, optimizer, scheduler


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def bytes_of(tree: Any) -> Any:
    """A tree with tensors as their dtype and bytes, to compare exactly."""
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype), tuple(tree.shape), tree.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(tree, dict):
        return {key: bytes_of(value) for key, value in tree.items()}
    return [bytes_of(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def test_a_snapshot_does_not_change_with_the_training(tmp_path: Path) -> None:
    """A step between capture and write does not tear it: what is restored is the state of the capture."""
    model, optimizer, scheduler = trained()
    pieces = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    snapshot = capture(pieces)
    before = bytes_of({name: piece.state_dict() for name, piece in pieces.items()})  # type: ignore[attr-defined]
    step(model, optimizer)
    scheduler.step()
    assert bytes_of(model.state_dict()) != before["model"]
    write(snapshot, tmp_path / "ckpt")
    report = restore(tmp_path / "ckpt", pieces)
    assert bytes_of({name: piece.state_dict() for name, piece in pieces.items()}) == before  # type: ignore[attr-defined]
    assert report.restored == ("model", "optimizer", "scheduler", "rng")
    assert (report.missing, report.unexpected, report.notes) == ((), (), ())


def test_written_files_are_those_reported(tmp_path: Path) -> None:
    """One file per piece, JSON where that is exact, with the digests of their bytes."""
    model, _, _ = trained()
    written = write(capture({"model": model, "notes": {"a": [1, "x", None, True]}}), tmp_path / "a" / "ckpt")
    assert [file.path for file in written] == ["model.safetensors", "notes.json", "rng.pt"]
    assert sorted(os.listdir(tmp_path / "a" / "ckpt")) == ["model.safetensors", "notes.json", "rng.pt"]
    for file in written:
        assert file.digests == digest_file(tmp_path / "a" / "ckpt" / file.path)
    assert json.loads((tmp_path / "a" / "ckpt" / "notes.json").read_bytes()) == {"a": [1, "x", None, True]}


def test_every_file_loads_without_pickle(tmp_path: Path) -> None:
    """With torch alone, which refuses anything but data; the random states included."""
    model, optimizer, scheduler = trained()
    write(capture({"model": model, "optimizer": optimizer, "scheduler": scheduler, "plain": (1, {2: 3})}), tmp_path)
    for path in tmp_path.glob("*.pt"):
        torch.load(path, weights_only=True)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["optimizer.pt", "plain.pt", "rng.pt", "scheduler.pt"]


def test_k074_random_states_come_back(tmp_path: Path) -> None:
    """K074: the next numbers of Python, NumPy and torch are those that would have come, a cached Gaussian included."""
    random.gauss(0, 1), np.random.randn()
    snapshot = capture({})
    expected = (random.gauss(0, 1), np.random.randn(), *next_numbers())
    write(snapshot, tmp_path)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    restore(tmp_path, {})
    assert (random.gauss(0, 1), np.random.randn(), *next_numbers()) == expected


def test_random_states_come_back_in_a_fresh_process(tmp_path: Path) -> None:
    """Not by anything left in this one."""
    write(capture({}), tmp_path)
    expected = next_numbers()
    code = (
        "import random, sys, pathlib, numpy as np, torch\n"
        "from ckptmgr.training.state import restore\n"
        "restore(pathlib.Path(sys.argv[1]), {})\n"
        "print([random.random(), float(np.random.rand()), float(torch.rand(()))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout) == list(expected)


def test_capturing_draws_no_random_number() -> None:
    """A run that saves and one that does not are the same."""
    state = capture_rng()
    expected = next_numbers()
    restore_rng(state)
    capture({"x": torch.ones(3), "model": torch.nn.Identity()})
    assert next_numbers() == expected


def test_random_states_are_set_last(tmp_path: Path) -> None:
    """A piece that draws numbers while it is loaded does not shift them."""

    class Draws:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            next_numbers()

    write(capture({"draws": Draws()}), tmp_path)
    expected = next_numbers()
    restore(tmp_path, {"draws": Draws()})
    assert next_numbers() == expected


def test_random_states_may_be_left_out(tmp_path: Path) -> None:
    """At capture, which a restore reports, or at restore."""
    write(capture({"a": 1}, rng=False), tmp_path / "without")
    assert restore(tmp_path / "without", {"a": 0}).missing == ("rng",)
    write(capture({"a": 1}), tmp_path / "with")
    expected = next_numbers()
    write(capture({"a": 1}), tmp_path / "later")
    restore(tmp_path / "with", {"a": 0})
    restore(tmp_path / "later", {"a": 0}, rng=False)
    assert next_numbers() == expected


def test_another_bit_generator_of_numpy_is_an_error_that_says_so(tmp_path: Path) -> None:
    """Random states of a foreign kind are not half set in silence."""
    state = capture_rng()
    state["numpy"]["bit_generator"] = "PCG64"
    with pytest.raises(IncompatibleStateError, match="random states") as caught:
        restore_rng(state)
    assert caught.value.piece == "rng"  # type: ignore[attr-defined]


def test_k034_tied_weights_stay_tied_and_are_stored_once(tmp_path: Path) -> None:
    """K034: tensors that share a storage share it after the restore, views included; each storage is copied once."""
    table = torch.randn(100, 8)
    tree = {"embed": table, "head": table, "row": table[3], "turned": table.T}
    snapshot = capture({"tree": tree}, rng=False)
    assert snapshot.size_bytes == table.untyped_storage().nbytes()
    write(snapshot, tmp_path)
    assert (tmp_path / "tree.pt").stat().st_size < 2 * snapshot.size_bytes
    loaded = restore(tmp_path, {"tree": None}, rng=False).values["tree"]
    assert bytes_of(loaded) == bytes_of(tree)
    loaded["embed"].zero_()
    assert not any(tensor.any() for tensor in loaded.values())
    assert table.any()


def test_k034_a_tied_model_stays_tied(tmp_path: Path) -> None:
    """K034: strict loading passes, changing the embedding changes the head, bf16 stays bf16 with equal bytes."""

    def make() -> torch.nn.ModuleDict:
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(7, 4), "head": torch.nn.Linear(4, 7, bias=False)})
        model["head"].weight = model["embed"].weight
        return model.to(torch.bfloat16)

    model = make()
    write(capture({"model": model}), tmp_path)
    other = make()
    restore(tmp_path, {"model": other})
    assert bytes_of(other.state_dict()) == bytes_of(model.state_dict())
    assert other["embed"].weight.dtype is torch.bfloat16
    with torch.no_grad():
        other["embed"].weight.fill_(2)
    assert torch.equal(other.state_dict()["head.weight"], torch.full((7, 4), 2.0, dtype=torch.bfloat16))


def test_one_storage_under_two_types_is_saved(tmp_path: Path) -> None:
    """torch.save refuses such a pair; each type gets its own bytes."""
    floats = torch.randn(4)
    tree = {"floats": floats, "ints": floats.view(torch.int32)}
    assert bytes_of(round_trip(tmp_path, tree=tree)["tree"]) == bytes_of(tree)


def test_a_temporary_tensor_is_not_taken_for_another() -> None:
    """State dicts made on the fly free their tensors; an address used again must not be taken for the same storage."""

    class Fresh:
        def __init__(self, value: float) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"t": torch.full((1000,), self.value)}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise AssertionError("not restored here")

    snapshot = capture({f"p{i}": Fresh(float(i)) for i in range(50)}, rng=False)
    assert [float(snapshot.pieces[f"p{i}"]["t"].sum()) for i in range(50)] == [1000.0 * i for i in range(50)]


def test_values_of_all_plain_types_come_back_as_they_were(tmp_path: Path) -> None:
    """Types too: a tuple stays a tuple, an int key an int, NumPy's numbers theirs."""
    tree = {
        "tuple": (1, (2.5, "x")),
        3: {None: b"bytes", (1, 2): True},
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter({5: 2}),
        "set": {1, 2},
        "numpy": [np.float32(1.5), np.float64(2.5), np.int64(3), np.bool_(True)],
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "torch": [torch.float16, torch.Size([2, 3]), torch.device("cpu")],
        "complex": 1 + 2j,
        "nan": float("nan"),
    }
    loaded = round_trip(tmp_path, tree=tree)["tree"]
    assert repr(loaded) == repr(tree)
    assert loaded["array"].dtype == np.uint32
    assert list(loaded["ordered"]) == ["b", "a"]


def test_named_numbers_and_dict_subclasses_become_plain(tmp_path: Path) -> None:
    """They compare equal to what they become."""

    class Color(IntEnum):
        RED = 1

    loaded = round_trip(tmp_path, tree={"enum": Color.RED, "default": defaultdict(int, a=1)})["tree"]
    assert loaded == {"enum": 1, "default": {"a": 1}}
    assert type(loaded["enum"]) is int
    assert (tmp_path / "ckpt" / "tree.json").exists()


def test_sparse_and_conjugated_tensors_come_back(tmp_path: Path) -> None:
    """Tensors without plain strides of their own."""
    sparse = torch.eye(3).to_sparse()
    conjugated = torch.tensor([1 + 2j]).conj()
    loaded = round_trip(tmp_path, tree=[sparse, conjugated])["tree"]
    assert torch.equal(loaded[0].to_dense(), torch.eye(3))
    assert torch.equal(loaded[1], torch.tensor([1 - 2j]))


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        Pair(1, 2),
        object(),
        lambda: 0,
        frozenset({1}),
        np.array([object()]),
        np.ma.array([1.0, 2.0], mask=[False, True]),
        torch.empty(2, device="meta"),
    ],
    ids=["namedtuple", "object", "function", "frozenset", "objects", "masked", "meta"],
)
def test_what_could_not_be_loaded_is_refused_when_it_is_captured(value: Any) -> None:
    """With the place it was found at; not weeks later at the restore."""
    with pytest.raises(ConfigError, match=r"^mine\.deep\[1\] is a "):
        capture({"mine": {"deep": [0, value]}})


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: list[Any] = [1]
    tree.append(tree)
    with pytest.raises(ConfigError, match=r"^mine is nested too deeply to be saved, or holds itself"):
        capture({"mine": tree})


def test_arrays_keep_their_order_and_leave_their_file(tmp_path: Path) -> None:
    """Columns that lie together stay so; what lay in a file comes back in memory."""
    mapped = np.memmap(tmp_path / "mapped", dtype=np.int16, shape=(3,), mode="w+")
    columns = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    loaded = round_trip(tmp_path, tree={"columns": columns, "mapped": mapped})["tree"]
    assert loaded["columns"].flags.f_contiguous
    assert loaded["columns"].tolist() == columns.tolist()
    assert type(loaded["mapped"]) is np.ndarray


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "sp ace", "x" * 101, "rng"])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    """`rng` is taken."""
    with pytest.raises(ConfigError):
        capture({name: 1})


def test_a_state_dict_that_raises_is_a_failed_save() -> None:
    """An error of ours that names the piece, whatever the user's code raised."""

    class Broken(torch.nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError("oh")

    with pytest.raises(CheckpointError, match=r"'model'.*ZeroDivisionError"):
        capture({"model": Broken()})


def test_a_missing_piece_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """What is there and what is not are named; without `strict` it is reported."""
    model, optimizer, _ = trained()
    write(capture({"optimizer": optimizer, "extra": 1}), tmp_path)
    before = bytes_of(optimizer.state_dict())
    step(model, optimizer)
    after = bytes_of(optimizer.state_dict())
    with pytest.raises(IncompatibleStateError, match="no state for 'model'; it holds extra, optimizer, rng") as caught:
        restore(tmp_path, {"optimizer": optimizer, "model": model})
    assert caught.value.piece == "model"  # type: ignore[attr-defined]
    assert bytes_of(optimizer.state_dict()) == after
    report = restore(tmp_path, {"optimizer": optimizer, "model": model}, strict=False)
    assert (report.restored, report.missing, report.unexpected) == (("optimizer", "rng"), ("model",), ("extra",))
    assert bytes_of(optimizer.state_dict()) == before


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Piece, parameter and both shapes are in the one line."""
    write(capture({"model": torch.nn.Linear(4, 3)}), tmp_path)
    with pytest.raises(IncompatibleStateError, match=r"'model' does not fit.*weight.*\[3, 4\].*\[3, 5\]") as caught:
        restore(tmp_path, {"model": torch.nn.Linear(5, 3)})
    assert caught.value.piece == "model"  # type: ignore[attr-defined]
    assert "\n" not in str(caught.value)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """torch itself loads momenta of any shape, and fails, or broadcasts, at a later step."""
    _, optimizer, _ = trained()
    write(capture({"optimizer": optimizer}), tmp_path)
    other = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(
        IncompatibleStateError, match=r"exp_avg of parameter 0 is \(3, 4\) in the checkpoint, .* \(2, 4\)"
    ):
        restore(tmp_path, {"optimizer": torch.optim.AdamW(other.parameters())})


def test_python_objects_are_not_loaded(tmp_path: Path) -> None:
    """A file with a planted object is refused, and its code is not run."""
    mark = tmp_path / "ran"

    class Planted:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(mark),)

    torch.save({"a": Planted()}, tmp_path / "model.pt")
    with pytest.raises(IncompatibleStateError, match="Python objects"):
        restore(tmp_path, {"model": torch.nn.Linear(1, 1)}, rng=False)
    assert not mark.exists()
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Planted(), protocol=2))
    with pytest.raises((IncompatibleStateError, IntegrityError)):
        restore(tmp_path, {"model": torch.nn.Linear(1, 1)}, rng=False)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "flat.pt", "notes.json"])
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    """Cut in half, it is an integrity error, not a traceback of a parser."""
    pieces = {"model": torch.nn.Linear(4, 4), "flat": [torch.ones(9)], "notes": {"a": list(range(100))}}
    write(capture(pieces), tmp_path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(IntegrityError, match=name):
        restore(tmp_path, pieces)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With what to give instead."""
    with pytest.raises(IncompatibleStateError, match=r"nowhere.*ckptmgr resume"):
        restore(tmp_path / "nowhere", {})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is needed and what is free, and as the disk said it: not as torch's complaint about positions in a file."""
    monkeypatch.setattr("ckptmgr.training.output.open_target", lambda path: os.open("/dev/full", os.O_WRONLY))
    snapshot = capture({"model": torch.nn.Linear(300, 300)}, rng=False)
    with pytest.raises(DiskFullError, match=r"cannot write .*model\.safetensors.*bytes free") as caught:
        write(snapshot, tmp_path)
    assert caught.value.needed_bytes == snapshot.size_bytes  # type: ignore[attr-defined]
    assert caught.value.free_bytes > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("failing", [0, 1, 2], ids=["first", "second", "third"])
def test_nothing_is_written_after_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """One error, of the write that failed; a short file does not become a long one with a hole."""
    sizes: list[int] = []
    real = os.write

    def failing_write(fd: int, data: memoryview) -> int:
        if len(sizes) == failing:
            sizes.append(-1)
            raise OSError(errno.EIO, "Input/output error")
        assert -1 not in sizes, "a write after the failed one"
        sizes.append(real(fd, data))
        return sizes[-1]

    snapshot = capture({"model": [torch.zeros(5 << 20, dtype=torch.uint8) for _ in range(3)]}, rng=False)
    monkeypatch.setattr(os, "write", failing_write)
    with pytest.raises(PermanentBackendError, match=r"cannot write .*model\.pt.*Input/output error"):
        write(snapshot, tmp_path)
    assert sizes[-1] == -1
    assert (tmp_path / "model.pt").stat().st_size == sum(sizes) + 1


def test_a_failed_fsync_fails_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is synced: bytes that the disk did not take are not reported as written, and no second try makes them so."""
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        if synced[-1].endswith("b.pt"):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    snapshot = capture({"a": torch.ones(1), "b": torch.ones(1)}, rng=False)
    tmp_path.joinpath("ckpt").mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(PermanentBackendError, match=r"cannot fsync .*b\.pt.*Input/output error"):
        write(snapshot, tmp_path / "ckpt")
    assert synced == [str(tmp_path / "ckpt" / "a.pt"), str(tmp_path / "ckpt" / "b.pt")]


JSONABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.just("$float"), inner, max_size=4),
    max_leaves=12,
)


@given(JSONABLE)
def test_json_is_used_only_where_it_is_exact(tree: Any) -> None:
    """What comes back is the same tree, order, types and non-finite floats included, in JSON that any reader takes."""
    data = to_json(tree)
    if data is None:
        assert "$float" in repr(tree)
        return
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert repr(from_json(data)) == repr(tree)


@pytest.mark.parametrize(
    "tree", [(1,), {1: 2}, [b"x"], {"a": (1,)}, OrderedDict(a=1), [torch.ones(1)], [np.float64(1)]]
)
def test_json_is_not_used_where_it_is_not_exact(tree: Any) -> None:
    """Tuples, keys that are no strings, and other types."""
    assert to_json(tree) is None
