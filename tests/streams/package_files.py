"""Files and zips to package, unpack and attack."""

from __future__ import annotations

import hashlib
import io
import stat
import textwrap
import zipfile
from pathlib import Path

PIPELINE = """
from penstock.streams.dsl.pipeline import Pipeline

p = Pipeline("demo")
p.source("queries").sink("out")
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        inside = name.replace("__", "/").replace("INIT", "__init__").replace("PYCACHE", "__pycache__")
        path = folder / f"{inside}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def a_zip(*entries: tuple[str, bytes], mode: int = stat.S_IFREG | 0o644, deflate: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED) as archive:
        for name, content in entries:
            info = zipfile.ZipInfo(name)
            info.filename = name  # ZipInfo tidies names; an attacker does not
            info.external_attr = mode << 16
            info.compress_type = archive.compression
            archive.writestr(info, content)
    return buffer.getvalue()


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
