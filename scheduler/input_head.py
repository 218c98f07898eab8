"""The input's head: what a file is by its first bytes, and the advice where it is no file of prompts.

Looked at when a file is opened, so that a mistake costs no pass over it. What each line says is for `line_form.py`.
"""

from __future__ import annotations

from llmq.scheduler.errors import InputFileError

#: What people hand over by mistake, by its first bytes: name, and what to do.
_MAGIC = (
    (b"\x1f\x8b", "gzip data inside of compressed data", "unpack it once first: gunzip -c FILE | llmq ... -"),
    (b"\x28\xb5\x2f\xfd", "zstd data inside of compressed data", "unpack it once first: zstd -dc FILE | llmq ... -"),
    (b"BZh", "bzip2 data", "unpack it first: bzcat FILE | llmq ... -"),
    (b"\xfd7zXZ\x00", "xz data", "unpack it first: xzcat FILE | llmq ... -"),
    (b"PK\x03\x04", "a zip archive", "unpack it first: unzip -p FILE | llmq ... -"),
    (b"PAR1", "a Parquet file", "export it as JSON lines first"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
)

#: Where a tar archive says that it is one.
_TAR_MAGIC, _TAR_PLACE = b"ustar", 257


def check_head(name: str, head: bytes) -> None:
    """Raise InputFileError where the beginning of a file, unpacked, says that it holds no lines of JSON."""
    if not head:
        raise InputFileError(f"{name}: is empty; expected one JSON object a line")
    for magic, kind, advice in _MAGIC:
        if head.startswith(magic):
            raise InputFileError(f"{name}: is {kind}; {advice}")
    if head.startswith(_TAR_MAGIC, _TAR_PLACE):
        raise InputFileError(f"{name}: is a tar archive; unpack it first: tar -xOf FILE | llmq ... -")
    if b"\0" in head:
        raise InputFileError(f"{name}: is binary (it holds NUL bytes); expected UTF-8 text, one JSON object a line")
    text = head.decode(errors="replace")
    # A few wrong bytes are the fault of their lines; many mean that the whole is something else.
    if text.count("\N{REPLACEMENT CHARACTER}") * 10 > len(text):
        raise InputFileError(f"{name}: is not UTF-8 text; expected one JSON object a line")
