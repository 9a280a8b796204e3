"""State dicts as safetensors files: read by every tool, equal to the last bit, and not used where they could not be."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptmgr.core.errors import ConfigError, IncompatibleStateError, IntegrityError
from ckptmgr.core.files import role_of
from ckptmgr.training.state import capture, restore, write
from ckptmgr.training.weights import Weights

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def raw(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that a tensor is, to compare."""
    data = tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []
    return tensor.dtype, tuple(tensor.shape), data


def raws(tree: Mapping[str, torch.Tensor]) -> list[Any]:
    """The same of a whole state dict, in its order."""
    return [(name, raw(tensor)) for name, tensor in tree.items()]


def saved(directory: Path, tree: Any) -> str:
    """Write `tree` as the piece `model`; the name of its file."""
    (written,) = write(capture({"model": tree}, rng=False), directory)
    return written.path


def loaded(directory: Path) -> Any:
    """What comes back."""
    return restore(directory, {"model": None}, rng=False).values["model"]


class Model(torch.nn.Module):
    """Tied embedding and head, batch norm with buffers of several types, all in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.to(torch.bfloat16)


def test_a_model_is_a_file_that_every_tool_reads(tmp_path: Path) -> None:
    """K034: safetensors itself reads it; tied weights are in it once; bf16 stays bf16."""
    model = Model()
    assert saved(tmp_path, model) == "model.safetensors"
    state = model.state_dict()
    theirs = load_file(tmp_path / "model.safetensors")
    assert {name: raw(tensor) for name, tensor in theirs.items()} == {
        name: raw(tensor) for name, tensor in state.items() if name != "head.weight"
    }
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    assert role_of("model.safetensors") == "weights"


def test_k034_a_tied_model_comes_back_tied(tmp_path: Path) -> None:
    """K034: strict loading passes, and changing the embedding changes the head, also of a model that was not tied itself."""
    model = Model()
    saved(tmp_path, model)
    other = Model()
    with torch.no_grad():
        other.embed.weight.zero_()
    restore(tmp_path, {"model": other}, rng=False)
    assert raws(other.state_dict()) == raws(model.state_dict())
    with torch.no_grad():
        other.embed.weight.fill_(2)
    assert bool((other.state_dict()["head.weight"] == 2).all())


def test_all_of_a_state_dict_comes_back(tmp_path: Path) -> None:
    """Its type, the order of names, which file tools sort, the versions of layers, and names that share a tensor."""
    state: Any = Model().state_dict()
    saved(tmp_path, state)
    back = loaded(tmp_path)
    versions = back._metadata
    assert (type(back), type(versions)) == (OrderedDict, OrderedDict)
    assert raws(back) == raws(state)
    assert (versions, list(versions)) == (state._metadata, list(state._metadata))
    back["embed.weight"].fill_(3)
    assert bool((back["head.weight"] == 3).all())
    assert type(loaded_dict(tmp_path / "plain")) is dict


def loaded_dict(directory: Path) -> Any:
    assert saved(directory, {"b": torch.ones(2), "a": torch.zeros(1)}) == "model.safetensors"
    back = loaded(directory)
    assert list(back) == ["b", "a"]
    return back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_comes_back_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """With NaNs of all kinds: all bytes there are. Beside a tensor of single bytes, which must not move it off its alignment."""
    values = torch.arange(256, dtype=torch.uint8).repeat(2)
    tensor = (values % 2).bool() if dtype is torch.bool else values.view(dtype)
    tree = {"odd": torch.ones(3, dtype=torch.int8), "tensor": tensor, "scalar": tensor[-1].clone()}
    assert saved(tmp_path, tree) == "model.safetensors"
    assert raws(loaded(tmp_path)) == raws(tree)
    module = torch.nn.Module()
    for name, value in tree.items():
        module.register_buffer(name, torch.zeros_like(value))
    restore(tmp_path, {"model": module}, rng=False)
    assert raws(module.state_dict()) == raws(tree)


def test_tensors_without_elements_and_names_of_all_kinds(tmp_path: Path) -> None:
    """What has no bytes has a shape; a name may be any text."""
    tree = {
        "": torch.ones(2),
        "ünï\n😀": torch.zeros(0, 3),
        'quote"\\': torch.zeros(2, 0, dtype=torch.int8),
        "$float": torch.ones(()),
    }
    assert saved(tmp_path, tree) == "model.safetensors"
    assert raws(loaded(tmp_path)) == raws(tree)


def test_views_that_lie_apart_in_one_buffer(tmp_path: Path) -> None:
    """K034: a model whose parameters are views into a shared buffer, as fused kernels make them; what is not used of it is not written."""
    buffer = torch.randn(100_000)
    tree = {"second": buffer[6:10].view(2, 2), "first": buffer[:6]}
    assert saved(tmp_path, tree) == "model.safetensors"
    assert (tmp_path / "model.safetensors").stat().st_size < 1000
    assert raws(loaded(tmp_path)) == raws(tree)


def test_k034_a_view_into_a_buffer_that_is_saved_as_well(tmp_path: Path) -> None:
    """K034: safetensors would take them apart; so it is a file of torch, and changing one changes the other after the restore."""
    table = torch.randn(5, 4).to(torch.bfloat16)
    model: Any = torch.nn.Module()
    model.register_parameter("table", torch.nn.Parameter(table))
    model.register_buffer("row", model.table.detach()[2])
    assert saved(tmp_path, model) == "model.pt"
    back = loaded(tmp_path)
    assert raws(back) == raws(model.state_dict())
    back["table"].fill_(4)
    assert bool((back["row"] == 4).all())


OVERLAPPING = torch.arange(12.0)
NOT_FLAT: dict[str, Any] = {
    "nested": {"a": {"b": torch.ones(1)}},
    "with a number": {"a": torch.ones(1), "epoch": 3},
    "a list": [torch.ones(1)],
    "numbered": {0: torch.ones(1)},
    "transposed": {"a": torch.randn(2, 3).T},
    "channels last": {"a": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)},
    "expanded": {"a": torch.ones(1).expand(4)},
    "complex": {"a": torch.ones(1, dtype=torch.complex64)},
    "overlapping": {"a": OVERLAPPING[:8], "b": OVERLAPPING[4:]},
    "in two shapes": {"a": OVERLAPPING, "b": OVERLAPPING.view(3, 4)},
    "reserved name": {"__metadata__": torch.ones(1)},
    "half a surrogate": {"\ud800": torch.ones(1)},
    "tied under the tag of floats": {"a": OVERLAPPING, "$float": OVERLAPPING},
}


@pytest.mark.parametrize("tree", NOT_FLAT.values(), ids=NOT_FLAT)
def test_what_it_cannot_express_is_a_file_of_torch(tree: Any, tmp_path: Path) -> None:
    """And comes back with its layout and its sharing."""
    assert saved(tmp_path, tree) == "model.pt"
    back = loaded(tmp_path)
    assert repr(back) == repr(tree)
    for name in tree if isinstance(tree, dict) else ():
        if isinstance(tree[name], torch.Tensor):
            assert back[name].stride() == tree[name].stride()


def test_what_is_no_tensor_is_as_it_was(tmp_path: Path) -> None:
    """Sparse tensors, attributes that torch's own loading has no idea of, and a dict without anything."""
    assert Weights.of({"a": torch.eye(2).to_sparse()}) is None
    assert Weights.of({}) is None
    state = torch.nn.Linear(1, 1).state_dict()
    state.mine = 1  # type: ignore[attr-defined]
    assert saved(tmp_path, state) == "model.pt"
    assert loaded(tmp_path).mine == 1
    assert saved(tmp_path / "empty", {}) == "model.json"


class Written:
    """What was written, and where it lay."""

    def __init__(self) -> None:
        self.views: list[memoryview] = []
        self.data = b""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self.data += data
        if isinstance(data, memoryview):
            self.views.append(data)
        return len(data)


def test_the_bytes_are_written_from_where_they_are() -> None:
    """No second copy in memory, of a state that may fill half of it."""
    tree = {"a": torch.randn(50), "b": torch.randn(3, 4)}
    weights, out = Weights.of(tree), Written()
    assert weights is not None
    weights.write(out)
    assert [torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in out.views] == [
        tensor.data_ptr() for tensor in tree.values()
    ]


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    """A checkpoint of unchanged weights is recognised as such."""
    model = Model()
    saved(tmp_path / "one", model)
    saved(tmp_path / "two", model.state_dict())
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


def test_what_was_restored_does_not_change_with_the_file(tmp_path: Path) -> None:
    """Neither what a module took nor what others keep is still in the file, which is overwritten in place here; and they do not write to it."""
    model = torch.nn.Linear(40, 40)
    saved(tmp_path, model)
    path = tmp_path / "model.safetensors"
    before = path.read_bytes()
    other, values = torch.nn.Linear(40, 40), loaded(tmp_path)
    restore(tmp_path, {"model": other}, rng=False)
    expected = raws(model.state_dict())
    with torch.no_grad():
        other.weight.add_(1)
        values["bias"].add_(1)
    assert path.read_bytes() == before
    restore(tmp_path, {"model": other}, rng=False)
    values = loaded(tmp_path)
    with open(path, "r+b") as file:
        file.write(bytes(len(before)))
    assert raws(other.state_dict()) == raws(values) == expected


def test_a_file_of_another_tool(tmp_path: Path) -> None:
    """As transformers writes it."""
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    restore(tmp_path, {"model": other}, rng=False)
    assert raws(other.state_dict()) == raws(model.state_dict())


def test_a_checkpoint_of_an_older_version(tmp_path: Path) -> None:
    """Where the model is a file of torch."""
    model, other = Model(), Model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    restore(tmp_path, {"model": other}, rng=False)
    assert raws(other.state_dict()) == raws(model.state_dict())


def test_a_file_of_a_newer_version_says_so(tmp_path: Path) -> None:
    """Nothing of it is guessed."""
    saved(tmp_path, {"a": torch.ones(1)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(rb"{\"version\": 1", rb"{\"version\": 2"))
    with pytest.raises(IncompatibleStateError, match="version 2") as caught:
        loaded(tmp_path)
    assert caught.value.piece == "model"  # type: ignore[attr-defined]


def damage(data: bytes) -> list[bytes]:
    """Files that are none."""
    header = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + header])
    document["__metadata__"]["ckptmgr"] = '{"version": 1}'
    without = json.dumps(document).encode().ljust(header)[:header]
    return [
        b"",
        data[:7],
        data[: len(data) // 2],
        data[:-1],
        data + b"x",
        b"\xff" * len(data),
        data[:8] + without + data[8 + header :],
    ]


@pytest.mark.parametrize("number", range(7))
def test_a_damaged_file_is_an_error_that_names_it(number: int, tmp_path: Path) -> None:
    """Not one of a parser."""
    saved(tmp_path, {"a": torch.ones(64)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes())[number])
    with pytest.raises(IntegrityError, match=r"model\.safetensors of 'model' cannot be read"):
        loaded(tmp_path)


@settings(deadline=None, max_examples=60)
@given(bit=st.integers(0, 8 * 400 - 1))
def test_no_flipped_bit_of_the_header_is_an_error_of_others(bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Digests find them before; but whoever restores from a directory of his own gets an error of ours, or tensors."""
    directory = tmp_path_factory.mktemp("flip")
    saved(directory, Model())
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    try:
        back = loaded(directory)
    except (IntegrityError, IncompatibleStateError):
        return
    assert all(isinstance(tensor, torch.Tensor) for tensor in back.values())


def test_without_the_library_files_are_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be read back here is not written; what needs it names what to install."""
    saved(tmp_path / "with", {"a": torch.ones(1)})
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "safetensors" else find_spec(name, *rest)
    )
    assert saved(tmp_path / "without", {"a": torch.ones(1)}) == "model.pt"
    with pytest.raises(ConfigError, match=r"safetensors.*pip install 'ckptmgr\[torch\]'"):
        loaded(tmp_path / "with")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_file_is_closed_after_the_restore(tmp_path: Path) -> None:
    """A descriptor per restore would be one too many some day."""
    saved(tmp_path, {"a": torch.ones(1000)})
    before = os.listdir("/proc/self/fd")
    kept = [loaded(tmp_path) for _ in range(3)]
    assert len(kept) == 3
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda buffer: buffer,
    lambda buffer: buffer[2:5],
    lambda buffer: buffer[5:11],
    lambda buffer: buffer[4:6],
    lambda buffer: buffer.view(3, 4),
    lambda buffer: buffer[::2],
    lambda buffer: buffer.view(3, 4).T,
    lambda buffer: buffer[3:3],
]


@settings(deadline=None, max_examples=80)
@given(
    picks=st.lists(st.tuples(st.text(max_size=3), st.integers(0, 1), st.sampled_from(VIEWS)), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool]),
)
def test_any_views_come_back_with_what_they_share(
    picks: list[tuple[str, int, Any]], dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In whichever format: equal bytes, and writing through one name shows in the others exactly as before."""
    directory = tmp_path_factory.mktemp("views")
    buffers = [torch.arange(12).to(dtype), torch.arange(12, 24).to(dtype)]
    tree = {name: view(buffers[which]) for name, which, view in picks}
    assert saved(directory, tree).startswith("model.")
    back = loaded(directory)
    assert raws(back) == raws(tree)
    for name, tensor in tree.items():
        for value in (1, 0):
            tensor.fill_(value)
            back[name].fill_(value)
            assert raws(back) == raws(tree)
