"""K074: torch files of others, with NumPy's values in them, load without unrestricted loading."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptmgr.core.errors import IncompatibleStateError, IntegrityError
from ckptmgr.training.state import load_file

MODULES = {"NumPy 1": b"numpy.core", "NumPy 2": b"numpy._core"}


def under(module: bytes, path: Path) -> None:
    """Rename NumPy's modules in a torch file to what the other major version calls them."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            if name.endswith("data.pkl"):
                assert b"cnumpy._core." in data or b"cnumpy.core." in data
                data = data.replace(b"cnumpy._core.", b"c" + module + b".").replace(
                    b"cnumpy.core.", b"c" + module + b"."
                )
            archive.writestr(name, data)


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_k074_random_states_of_the_hugging_face_trainer(module: bytes, tmp_path: Path) -> None:
    """Its `rng_state.pth`: NumPy's is a tuple with an array of uint32. The next numbers are those that would have come."""
    path = tmp_path / "rng_state.pth"
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    torch.save(states, path)
    under(module, path)
    expected = random.random(), np.random.rand(3).tobytes(), torch.rand(3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    loaded = load_file(path)
    random.setstate(loaded["python"])
    np.random.set_state(loaded["numpy"])
    torch.random.set_rng_state(loaded["cpu"])
    found = random.random(), np.random.rand(3).tobytes(), torch.rand(3)
    assert found[:2] == expected[:2]
    assert torch.equal(found[2], expected[2])
    assert loaded["numpy"][1].dtype == np.uint32


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_k074_optimizers_with_numbers_of_numpy(module: bytes, tmp_path: Path) -> None:
    """As DeepSpeed's files and schedulers with metrics have them: types and bits come back."""
    tree = {
        "optimizer_state_dict": {
            "state": {0: {"step": np.int64(7), "exp_avg": torch.ones(2)}},
            "loss_scale": np.float32(0.1),
        },
        "best": np.float64("nan"),
        "flags": [np.bool_(True), np.float16(2.5), np.uint8(3), np.str_("x")],
        "history": np.arange(6, dtype=np.float64).reshape(2, 3),
        "names": np.array(["ab", "c"]),
        "milestones": Counter({4: 1}),
    }
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save(tree, path)
    under(module, path)
    loaded = load_file(path)
    assert repr(loaded) == repr(tree)
    assert loaded["history"].tobytes() == tree["history"].tobytes()  # type: ignore[attr-defined]


def test_a_file_of_the_old_format(tmp_path: Path) -> None:
    """That of torch before 1.6, which some trainers still write."""
    torch.save({"a": torch.ones(2), "b": np.float32(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    loaded = load_file(tmp_path / "old.bin")
    assert (loaded["a"].tolist(), loaded["b"]) == ([1.0, 1.0], np.float32(3))


class Planted:
    """Runs what it is made of when it is loaded with pickle."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("inside", ["tree", "array"])
def test_code_is_not_run(inside: str, tmp_path: Path) -> None:
    """Nor when it hides in an array of objects; the file and what was met are named."""
    planted: Any = Planted(tmp_path / "ran")
    torch.save({"a": np.array([planted]) if inside == "array" else planted}, tmp_path / "rng_state.pth")
    with pytest.raises(IncompatibleStateError, match=r"rng_state\.pth holds Python objects") as caught:
        load_file(tmp_path / "rng_state.pth", piece="rng")
    assert caught.value.piece == "rng"  # type: ignore[attr-defined]
    assert not (tmp_path / "ran").exists()


def test_classes_may_be_let_through_by_name(tmp_path: Path) -> None:
    """For this file alone: the next one is refused as before."""
    torch.save(Fraction(1, 3), tmp_path / "x.pt")
    assert load_file(tmp_path / "x.pt", allow=[Fraction]) == Fraction(1, 3)
    with pytest.raises(IncompatibleStateError, match=r"not loaded: .*fractions\.Fraction.{0,60} - "):
        load_file(tmp_path / "x.pt")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" + bytes(50), b"\x80\x02.", pickle.dumps([1])[:-3], b"\x80\x02J"])
def test_what_is_no_file_of_torch_is_an_error_of_ours(data: bytes, tmp_path: Path) -> None:
    """Whatever torch and pickle make of the bytes."""
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises((IntegrityError, IncompatibleStateError), match=r"x\.pt"):
        load_file(tmp_path / "x.pt")


def test_no_flipped_bit_is_an_error_of_others(tmp_path: Path) -> None:
    """Digests find them before a restore; for whoever reads a file alone: an error of ours, or a value."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(3), "b": [np.float32(1), ("x", {2: None})]}, path)
    data = path.read_bytes()
    raised = 0
    for bit in random.Random(0).sample(range(8 * len(data)), 300):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            load_file(path)
        except (IntegrityError, IncompatibleStateError):
            raised += 1
    assert raised > 20
