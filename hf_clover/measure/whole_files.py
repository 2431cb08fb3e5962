"""Files that are written completely or not changed at all, whatever happens meanwhile.

Contract: a file is written beside its place, and moved there when it is complete. If it cannot be written, the error
names it. This module does not know what is in a file.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing_whole(path: Path) -> Iterator[Path]:
    """The file to write to; it becomes `path` at the end of the block."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> Path:
    with writing_whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return path


def not_written(path: Path | str, error: OSError) -> OSError:
    way_out = "make room there" if error.errno in _NO_ROOM else "make it writable"
    return OSError(f"{str(path)!r} could not be written ({error.strerror or error}): {way_out} and run again.")


__all__ = ["not_written", "write_whole", "writing_whole"]
