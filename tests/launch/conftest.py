"""Children are watched through the loop's own descriptors: every test here runs on both loops."""

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    uvloop.new_event_loop().close()  # libuv opens its signal pipe with the first loop, and keeps it
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
