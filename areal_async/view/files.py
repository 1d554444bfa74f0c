"""The page's own files, as they are sent: from this package, and Plotly from its own.

What always holds: a name from a request is looked up among the files that there are, never joined to a path; a file is
packed once, in short pieces, when it is first sent; what was changed on the disk is sent as it is now. No thread (which
is why aiohttp's own static files aren't used).
"""

import asyncio
import hashlib
import zlib
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from areal_async.errors import ArealError

INDEX: Final = "index.html"
PLOTLY: Final = "plotly.min.js"
PIECE_BYTES: Final = 1 << 18  # packing one takes about 10 ms
GZIP: Final = 16 + zlib.MAX_WBITS
FAST: Final = 1  # for answers, which are made anew each time
BEST: Final = 6  # for files, which are packed once
TYPES: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}


class File:
    """version: of its content, for an ETag. kind: content type."""

    def __init__(self, body: bytes, kind: str) -> None:
        self.body = body
        self.kind = kind
        self.version = hashlib.sha256(body).hexdigest()[:16]
        self._packed = b""
        self._packing = asyncio.Lock()

    async def packed(self) -> bytes:
        """As gzip."""
        async with self._packing:
            if not self._packed:
                self._packed = await pack(self.body, BEST)
        return self._packed


class Files:
    """Keeps what was asked for."""

    def __init__(self) -> None:
        self._kept: dict[str, File] = {}

    def file(self, name: str) -> File | None:
        """None: there is no such file. Errors: ArealError: plotly isn't installed."""
        if name == PLOTLY:
            if name not in self._kept:
                self._kept[name] = File(plotly_path().read_bytes(), TYPES[".js"])
            return self._kept[name]
        found = {entry.name: entry for entry in resources.files("areal_async.view").joinpath("static").iterdir()}
        kind = TYPES.get(Path(name).suffix)
        if name not in found or kind is None:
            return None
        body = found[name].read_bytes()
        kept = self._kept.get(name)
        if kept is None or kept.body != body:
            kept = self._kept[name] = File(body, kind)
        return kept


async def pack(body: bytes, level: int) -> bytes:
    """gzip; others get their turn between the pieces."""
    packer = zlib.compressobj(level, wbits=GZIP)
    pieces = []
    for begin in range(0, len(body), PIECE_BYTES):
        pieces.append(packer.compress(body[begin : begin + PIECE_BYTES]))
        await asyncio.sleep(0)
    return b"".join([*pieces, packer.flush()])


def plotly_path() -> Path:
    """Found without importing plotly, which takes longer than all of the rest. Errors: ArealError: it isn't there."""
    spec = find_spec("plotly")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / "package_data" / PLOTLY
        if path.is_file():
            return path
    raise ArealError("the package plotly isn't installed, so there are no figures: pip install plotly")
