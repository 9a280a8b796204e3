"""One transfer by a library of others, measured without its imports: `python _libraries.py obstore|s3fs up|down DIR BUCKET PREFIX`.

Runs in the environment of the peers and needs nothing of ours. What is in DIR goes below PREFIX, or comes from there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _clock import measured

MIB = 1 << 20
PART = 32 * MIB
RANGE = 16 * MIB
SMALL = 4 * MIB


def obstore(verb: str, directory: Path, bucket: str, prefix: str) -> Callable[[], None]:
    """Parts of 32 MiB, 4 at a time and 2 files at a time, bodies unsigned; ranges of 16 MiB. 16 small files at a time."""
    import obstore
    from obstore.store import S3Store

    def store() -> S3Store:
        return S3Store(
            bucket,
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options={"allow_http": True, "timeout": "300s"},
        )

    def up() -> None:
        made, paths = store(), sorted(directory.iterdir())

        def one(path: Path) -> None:
            obstore.put(made, f"{prefix}/{path.name}", path, chunk_size=PART, max_concurrency=4)

        with ThreadPoolExecutor(16 if paths[0].stat().st_size < SMALL else 2) as pool:
            list(pool.map(one, paths))

    def down() -> None:
        made = store()
        entries = obstore.list(made, prefix + "/").collect()
        with ThreadPoolExecutor(4) as ranges, ThreadPoolExecutor(16 if entries[0]["size"] < SMALL else 2) as files:

            def one(entry: dict[str, object]) -> None:
                key, size = str(entry["path"]), int(str(entry["size"]))
                file = os.open(directory / key.rpartition("/")[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

                def piece(start: int) -> None:
                    data = obstore.get_range(made, key, start=start, end=min(size, start + RANGE))
                    os.pwrite(file, memoryview(data), start)

                if size <= RANGE:
                    piece(0)
                else:
                    list(ranges.map(piece, range(0, size, RANGE)))
                os.close(file)

            list(files.map(one, entries))

    return up if verb == "up" else down


def s3fs(verb: str, directory: Path, bucket: str, prefix: str) -> Callable[[], None]:
    """As it comes, but for 4 parts of a file at a time."""
    import s3fs

    def run() -> None:
        made = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"], max_concurrency=4)
        if verb == "up":
            paths = sorted(directory.iterdir())
            made.put([str(path) for path in paths], [f"{bucket}/{prefix}/{path.name}" for path in paths])
        else:
            keys = made.find(f"{bucket}/{prefix}")
            made.get(keys, [str(directory / key.rpartition("/")[2]) for key in keys])

    return run


if __name__ == "__main__":
    name, verb, directory, bucket, prefix = sys.argv[1:]
    measured({"obstore": obstore, "s3fs": s3fs}[name](verb, Path(directory), bucket, prefix))
