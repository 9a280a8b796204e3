"""Cases of uploading and naming, on artifacts: what lies in the store under which key, and what a failure leaves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import artifacts, pull_artifact, push_artifact
from ckptmgr.core.errors import AccessDeniedError, IntegrityError, ManifestError
from ckptmgr.core.manifest import Manifest, decode_manifest, encode_manifest
from ckptmgr.run import artifact_push
from ckptmgr.run.contents import describe
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.outcomes import files_in
from ckptmgr.testing.stores import Store

Tree = Callable[[str, Mapping[str, bytes]], Path]
Ask = Callable[..., Any]
MakeStore = Callable[[str], Store]


def data_keys(version_id: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """What the store must hold for one version."""
    return {f"model/checkpoints/{version_id}/{name}": data for name, data in files.items()}


def sent(store: Store) -> list[str]:
    """The data files that arrived since the log was cleared, sorted."""
    puts = [r.key for r in store.server.log if r.method == "PUT" and r.status == 200 and "/checkpoints/" in r.key]
    return sorted(key.split("/", 4)[4] for key in puts)


@pytest.mark.parametrize("kind", ["local", "oss"])
def test_k098_equal_base_names_stay_apart(make_store: MakeStore, kind: str, tree: Tree, tmp_path: Path) -> None:
    """Files of one name in several folders and versions are as many objects, each equal to its source."""
    store = make_store(kind)
    sources = [
        {f"iteration_{step}/pytorch.bin": b"weights %d" % (step + version) for step in (4000, 8000)}
        | {f"rank-{rank}/pytorch.bin": b"rank %d of %d" % (rank, version) for rank in (0, 1)}
        for version in (1, 2)
    ]
    pushed = [push_artifact(tree("final", files), f"{store.url}/model") for files in sources]
    wanted = {
        key: data
        for version, files in zip(pushed, sources, strict=True)
        for key, data in data_keys(version.manifest.id, files).items()
    }
    assert store.snapshot("model/checkpoints/") == wanted
    assert len(set(wanted.values())) == 8
    for version, files in zip(pushed, sources, strict=True):
        assert files_in(pull_artifact(version.reference, tmp_path / f"v{version.version}").path) == files


@pytest.mark.parametrize("given", ["final", "final/"])
def test_k077_a_repeated_push_does_not_nest(make_store: MakeStore, given: str, tree: Tree, ask: Ask) -> None:
    """After a failure with one file of five in the store, the repeat puts each where it belongs, whatever form the path has."""
    store = make_store("oss")
    files = {f"part-{n}.bin": b"%d" % n for n in range(4)} | {"sub/part-4.bin": b"4"}
    directory = tree("final", files)
    deny = Fault(
        method="PUT",
        match=lambda seen: "/checkpoints/" in seen.key,
        skip=1,
        times=None,
        status=403,
        code="AccessDenied",
    )
    with store.server.faults.injected(deny), pytest.raises(AccessDeniedError):
        push_artifact(directory, f"{store.url}/model")
    assert len(store.keys("model/checkpoints/")) == 1
    pushed = ask("artifact", "push", given, f"{store.url}/model")
    assert pushed["version"] == 1
    assert store.snapshot("model/checkpoints/") == data_keys(pushed["id"], files)


def test_k117_a_file_that_vanished_and_came_back(
    make_store: MakeStore, tree: Tree, monkeypatch: pytest.MonkeyPatch, cli_here: Callable[..., Any]
) -> None:
    """No version without it; once it is back, it alone is sent, and the version is whole."""
    store = make_store("oss")
    url = f"{store.url}/model"
    directory = tree("final", {f"file-{n}": b"%d" % n for n in range(6)})
    described = describe

    def then_gone(path: Path, **options: Any) -> object:
        entries = described(path, **options)
        (path / "file-3").rename(path.parent / "file-3")
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(artifact_push, "describe", then_gone)
        with pytest.raises(IntegrityError, match="file-3"):
            push_artifact(directory, url)
    assert store.keys("model/manifests/") == []
    there = {key.rsplit("/", 1)[-1] for key in store.keys("model/checkpoints/")}
    (directory.parent / "file-3").rename(directory / "file-3")
    store.server.log.clear()
    pushed = push_artifact(directory, url)
    assert pushed.version == 1
    assert sent(store) == sorted({entry.path for entry in pushed.manifest.files} - there)
    assert "file-3" in sent(store)
    verified: subprocess.CompletedProcess[str] = cli_here("verify", url)
    assert verified.returncode == 0, verified.stdout


@pytest.mark.parametrize("name", ["../outside.txt", "/abs/outside.txt", "a/../../outside.txt", "..\\outside.txt", ""])
def test_k047_names_that_lead_out_of_the_target(make_store: MakeStore, tree: Tree, tmp_path: Path, name: str) -> None:
    """A version that was tampered with is refused whole: nothing is written, inside the target or outside."""
    store = make_store("local")
    url = f"{store.url}/model"
    pushed = push_artifact(tree("final", {"safe.txt": b"safe", "placeholder": b"evil"}), url)
    key = f"model/manifests/{pushed.manifest.id}.json"
    store.put(key, forged(store.get(key), name))
    target = tmp_path / "deep" / "target"
    before = files_in(tmp_path)
    with pytest.raises(ManifestError, match=r"plain relative path|more than once|no name"):
        pull_artifact(url, target)
    assert files_in(tmp_path) == before
    assert not os.path.lexists(target)


def forged(body: bytes, name: str) -> bytes:
    """A manifest that names its file `placeholder` otherwise, with a digest to match."""
    import json

    from ckptmgr.core.checksums import blake3_hex
    from ckptmgr.core.manifest import canonical_json

    manifest = decode_manifest(body, where="here")
    assert isinstance(manifest, Manifest)
    document = json.loads(encode_manifest(manifest))
    for entry in document["files"]:
        if entry["path"] == "placeholder":
            entry["path"] = name
    del document["digest"]
    document["digest"] = "blake3:" + blake3_hex(canonical_json(document))
    return canonical_json(document)


def test_k095_the_newest_never_goes_back(make_store: MakeStore, tree: Tree) -> None:
    """The upload of a version fails, another one is committed, and the first is repeated: both are there, the higher is the latest."""
    store = make_store("oss")
    url = f"{store.url}/model"
    slow, fast = tree("slow", {"a": b"slow"}), tree("fast", {"a": b"fast"})
    with (
        store.server.faults.injected(
            Fault(method="PUT", key="*/manifests/*", status=403, code="AccessDenied", times=None)
        ),
        pytest.raises(AccessDeniedError),
    ):
        push_artifact(slow, url)
    assert artifacts(url) == []
    assert push_artifact(fast, url).version == 2
    late = push_artifact(slow, url)
    assert (late.version, late.is_latest) == (1, False)
    assert [(artifact.version, artifact.is_latest) for artifact in artifacts(url)] == [(1, False), (2, True)]
