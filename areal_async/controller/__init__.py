"""The controller: one asyncio process that carries out what the core decides, and records it."""

from areal_async.controller.controller import Controller
from areal_async.controller.metrics import StepRow
from areal_async.controller.result import RunResult

__all__ = ["Controller", "RunResult", "StepRow"]
