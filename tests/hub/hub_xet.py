"""
What a xet upload brings: chunks in xorbs, and shards that say which chunks make which file.

Contract: `files_of(shard, xorbs)` gives each file of a shard by its sha256. The client must be told not to compress
and to use the first version of the protocol (`CLIENT`); then a xorb is chunk after chunk, each with a header of 8
bytes, and a shard is tables of 48-byte rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import unpack_from

CLIENT = {
    "HF_XET_XORB_COMPRESSION_POLICY": "none",
    "HF_XET_CLIENT_LEGACY_DIRECT_XORB_UPLOAD": "true",
    "HF_XET_CLIENT_SHARD_API_VERSION": "1",
    "HF_XET_DEDUPLICATION_GLOBAL_DEDUP_QUERY_ENABLED": "false",
}
_ROW = 48
_HAS_VERIFICATION, _HAS_SHA256 = 1 << 31, 1 << 30


def files_of(shard: bytes, xorbs: dict[str, bytes]) -> dict[str, bytes]:
    files, place = {}, _ROW
    while (file_hash := shard[place : place + 32]) != b"\xff" * 32:
        flags, count = unpack_from("<II", shard, place + 32)
        assert flags & _HAS_SHA256, file_hash.hex()
        content = b""
        for row in range(place + _ROW, place + _ROW * (1 + count), _ROW):
            _, size, first, end = unpack_from("<IIII", shard, row + 32)
            segment = b"".join(list(_chunks(xorbs[_hex(shard[row : row + 32])]))[first:end])
            assert len(segment) == size
            content += segment
        place += _ROW * (1 + count * (2 if flags & _HAS_VERIFICATION else 1))
        files[_hex(shard[place : place + 32])] = content
        place += _ROW
    return files


def _chunks(xorb: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(xorb):
        size = int.from_bytes(xorb[place + 1 : place + 4], "little")
        assert xorb[place + 4] == 0, "a compressed chunk"
        yield xorb[place + 8 : place + 8 + size]
        place += 8 + size


def _hex(name: bytes) -> str:
    """xet writes its names as four 64-bit numbers."""
    return "".join(f"{number:016x}" for number in unpack_from("<QQQQ", name))
