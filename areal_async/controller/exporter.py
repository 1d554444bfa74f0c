"""Prometheus text at `http://metrics.host:metrics.port/metrics`.

What always holds: it only reads, when it is asked; what is written follows the text format 0.0.4 (names and labels are
checked here, values of labels escaped), so that any scraper takes it. What there is to read is `monitor`'s.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, Literal

from aiohttp import web

from areal_async.errors import ConfigError

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
LEAVE_S: Final = 0.5  # a scrape takes milliseconds; the run's end waits for no scraper

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Family:
    """One metric with all its label sets. kind counter: it only grows, and its name ends in `_total`."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(f"{self.name} is no name of a {self.kind}")


def render(families: Iterable[Family]) -> str:
    """The text; families without a sample are left out."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines += [f"{family.name}{_labels(labels)} {_number(value)}" for labels, value in family.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    quoted = [name + '="' + _escaped(value).replace('"', '\\"') + '"' for name, value in labels.items()]
    return "{" + ",".join(quoted) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


class Exporter:
    """read: gives the families of this moment. That the port is free has been looked at by `config_check`, before
    anything was started."""

    def __init__(self, host: str, port: int, read: Callable[[], Iterable[Family]]) -> None:
        self._host = host
        self._port = port
        self._read = read

    async def start(self, stack: AsyncExitStack) -> str:
        """Listen until `stack` ends it; returns the URL. Errors: ConfigError: the port was taken meanwhile."""
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=LEAVE_S)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, self._host, self._port, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            where = f"{self._host}:{self._port}"
            raise ConfigError(f"metrics.port: {where} can't be opened by now: {error.strerror}; try another") from error
        host, port = runner.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=render(self._read()).encode(), headers={"Content-Type": CONTENT_TYPE})
