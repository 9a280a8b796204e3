"""One transfer of one file, measured without its imports: `python _oss_action.py ACTION FILE KEY MIB`, with the store in the environment. What comes down are
so many MiB of zeros.

up                     ckptmgr: what a save writes down of the file, BLAKE3 and both CRCs, and then the upload
put, down              ckptmgr: the upload, or the download, alone, with its CRC
oss2-up, oss2-down     oss2's resumable_upload and resumable_download, with its CRC
oss2-up-bare           likewise, without
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import oss2  # type: ignore[import-untyped, unused-ignore]
from _clock import measured
from _null_oss import BUCKET

from ckptmgr.backends.localfile import SourceFile
from ckptmgr.backends.registry import open_store
from ckptmgr.core.checksums import Digester, Digests

MIB = 1 << 20
PART_BYTES = 32 << 20
THREADS = 4


def digests_of(path: Path) -> Digests:
    """Read once, in blocks."""
    with SourceFile(path) as source:
        for _ in source.blocks(MIB):
            pass
        return source.finish()


def digests_of_zeros(size_mib: int) -> Digests:
    """What they are of what comes down."""
    digester, block = Digester(), bytes(MIB)
    for _ in range(size_mib):
        digester.update(block)
    return digester.digests()


def ours(action: str, path: Path, key: str, size_mib: int) -> None:
    """Through the URL of the store, as every command does it."""
    fs, root = open_store(f"oss://{BUCKET}/{key}")
    if action == "up":
        measured(lambda: fs.put_file(str(path), root, mode="create", expected=digests_of(path)))
        return
    known = digests_of(path) if action == "put" else digests_of_zeros(size_mib)
    if action == "put":
        measured(lambda: fs.put_file(str(path), root, mode="create", expected=known))
    else:
        measured(lambda: prove(fs.get_file(root, str(path), expected=known)))


def prove(is_proven: bool) -> None:
    """A download whose CRC nobody compared is no match for one that was."""
    if not is_proven:
        sys.exit("error: the download was not proven by its CRC")


def theirs(action: str, path: Path, key: str) -> None:
    """With parts and threads like ours."""
    auth = oss2.AuthV4(os.environ["OSS_ACCESS_KEY_ID"], os.environ["OSS_ACCESS_KEY_SECRET"])
    bucket = oss2.Bucket(
        auth, os.environ["OSS_ENDPOINT"], BUCKET, region=os.environ["OSS_REGION"], enable_crc=action != "oss2-up-bare"
    )
    options = {"multiget_threshold": 1 << 20} if action == "oss2-down" else {"multipart_threshold": 1 << 20}
    with tempfile.TemporaryDirectory() as records:
        transfer = oss2.resumable_download if action == "oss2-down" else oss2.resumable_upload
        kept = oss2.ResumableDownloadStore(root=records) if action == "oss2-down" else oss2.ResumableStore(root=records)
        measured(
            lambda: transfer(bucket, key, str(path), store=kept, part_size=PART_BYTES, num_threads=THREADS, **options)
        )


def main() -> None:
    """Do it and print what it took."""
    action, path, key, size_mib = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    if action.startswith("oss2"):
        theirs(action, path, key)
    else:
        ours(action, path, key, size_mib)


if __name__ == "__main__":
    main()
