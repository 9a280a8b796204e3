"""A store for files with holes: it keeps of large objects only the blocks that are not all zero, and holds to the limits of S3.

    with SparseServer() as server:
        subprocess.run([...], env={**os.environ, **server.env})

So files of any size go up, are copied, and come down, and cost neither memory nor disk.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote

from ckptmgr.testing.discarding import Discarded, DiscardingServer, Handler

MIB = 1 << 20
#: Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MAX_PARTS = 10_000
MIN_PART_BYTES = 5 * MIB
MAX_BYTES = 5 << 30
_BLOCK = MIB
_ZEROS = bytes(_BLOCK)
# Bytes by their offset; all that is not there is zero.
Blocks = Mapping[int, bytes]


class SparseServer(DiscardingServer):
    """See the module's docstring.

    Args:
        min_part_bytes: of every part but the last.

    Attributes:
        moved: of each request that moved an object's bytes: what it did (`put`, `part`, `copy`, `copy part`, `get`), and how many.
    """

    def __init__(self, *, min_part_bytes: int = MIN_PART_BYTES) -> None:
        self.min_part_bytes = min_part_bytes
        self.moved: list[tuple[str, int]] = []
        self.blocks: dict[str, Blocks] = {}
        self.parts: dict[str, dict[int, tuple[int, Blocks, str]]] = {}
        super().__init__()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        class Sparse(_Handler):
            server_store = sparse_store = self

        return Sparse

    def bytes_at(self, key: str, offset: int, length: int) -> bytes:
        """What the object at `bucket/key` has there."""
        found = bytearray(length)
        for at, block in self.blocks[key].items():
            first, last = max(at, offset), min(at + len(block), offset + length)
            if first < last:
                found[first - offset : last - offset] = block[first - at : last - at]
        return bytes(found)


class _Handler(Handler):
    sparse_store: SparseServer

    def do_PUT(self) -> None:
        store = self.sparse_store
        source = unquote(self.headers.get("x-amz-copy-source", self.headers.get("x-oss-copy-source", ""))).strip("/")
        if source:
            self._copy(source)
            return
        blocks, size = self._receive_blocks()
        with store.lock:
            store.moved.append(("part" if "partNumber" in self.query else "put", size))
        if size > MAX_BYTES:
            self._refuse(400, "EntityTooLarge")
        elif "partNumber" in self.query:
            self._keep_part(size, blocks, "")
        elif size <= _BLOCK:
            self._put(size, blocks.get(0, bytes(size)))
        else:
            store.blocks[self._key] = blocks
            self._put(size, None)

    def do_POST(self) -> None:
        store = self.sparse_store
        if "uploads" in self.query:
            self._receive()
            upload_id = uuid.uuid4().hex
            with store.lock:
                store.parts[upload_id] = {}
            self._document("InitiateMultipartUploadResult", f"<UploadId>{upload_id}</UploadId>")
            return
        _, body = self._receive()
        named = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body or b"")]
        with store.lock:
            parts = store.parts.get(self.query["uploadId"], {})
            if named != sorted(parts):
                self._refuse(400, "InvalidPart")
                return
            if any(parts[number][0] < store.min_part_bytes for number in named[:-1]):
                self._refuse(400, "EntityTooSmall")
                return
            del store.parts[self.query["uploadId"]]
            size, blocks = 0, dict[int, bytes]()
            for number in named:
                blocks.update({size + at: block for at, block in parts[number][1].items()})
                size += parts[number][0]
            sources = {parts[number][2] for number in named}
            # A store computes it; of a copy of a whole object it is that object's.
            original = store.objects.get(sources.pop())
            crc = self.headers.get("x-amz-checksum-crc64nvme") or (original.crc if original is not None else "")
            store.objects[self._key] = Discarded(size=size, crc=crc)
            store.blocks[self._key] = blocks
        said = f"<ChecksumCRC64NVME>{crc}</ChecksumCRC64NVME><ChecksumType>FULL_OBJECT</ChecksumType>" if crc else ""
        self._document("CompleteMultipartUploadResult", f'<ETag>"e"</ETag>{said}')

    def do_GET(self) -> None:
        store, found = self.sparse_store, self.sparse_store.objects.get(self._key)
        if found is None or found.body is not None:
            super().do_GET()
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), int(asked[2] or found.size - 1)) if asked else (0, found.size - 1)
        last = min(last, found.size - 1)
        with store.lock:
            store.moved.append(("get", last - first + 1))
        self.send_response(206 if asked else 200)
        for name, value in {
            "Content-Length": str(last - first + 1),
            "ETag": '"e"',
            "Last-Modified": "Sun, 01 Mar 2026 00:00:00 GMT",
            "x-oss-request-id": "0",
            **({"Content-Range": f"bytes {first}-{last}/{found.size}"} if asked else {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        for at in range(first, last + 1, _BLOCK):
            self.wfile.write(store.bytes_at(self._key, at, min(_BLOCK, last + 1 - at)))

    def _copy(self, source: str) -> None:
        self._receive()
        store, found = self.sparse_store, self.sparse_store.objects[source]
        is_part = "partNumber" in self.query
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("x-amz-copy-source-range", ""))
        first, last = (int(asked[1]), int(asked[2])) if asked else (0, found.size - 1)
        size = last - first + 1
        with store.lock:
            store.moved.append(("copy part" if is_part else "copy", size))
        if size > MAX_BYTES:
            self._refuse(400, "InvalidRequest")
            return
        if is_part:
            inside = {at: block for at, block in store.blocks[source].items() if first <= at <= last}
            self._keep_part(size, {at - first: block for at, block in inside.items()}, source)
            return
        with store.lock:
            store.objects[self._key], store.blocks[self._key] = found, store.blocks[source]
        self._document("CopyObjectResult", '<ETag>"e"</ETag>')

    def _keep_part(self, size: int, blocks: Blocks, source: str) -> None:
        number = int(self.query["partNumber"])
        if not 1 <= number <= MAX_PARTS:
            self._refuse(400, "InvalidArgument")
            return
        with self.sparse_store.lock:
            self.sparse_store.parts[self.query["uploadId"]][number] = size, blocks, source
        if source:
            self._document("CopyPartResult", f'<ETag>"{number}"</ETag>')
        else:
            self._answer(200, headers={"ETag": f'"{number}"'})

    def _receive_blocks(self) -> tuple[Blocks, int]:
        """The blocks of the body that are not all zero, by their offset, and its size."""
        size, at, blocks = int(self.headers.get("Content-Length", 0)), 0, dict[int, bytes]()
        while at < size:
            block = self.rfile.read(min(size - at, _BLOCK))
            if not block:
                raise ConnectionError("the client went away")
            if block != (_ZEROS if len(block) == _BLOCK else _ZEROS[: len(block)]):
                blocks[at] = block
            at += len(block)
        return blocks, size
