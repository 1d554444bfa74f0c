"""areal-async: fully asynchronous reinforcement learning for language models.

`Controller` is loaded on first use, so that `import areal_async` costs nothing in a worker process.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_async.config import Config
    from areal_async.config_file import load_config
    from areal_async.controller import Controller
    from areal_async.rollout.workflow import Workflow

__version__ = "0.1.0"
__all__ = ["Config", "Controller", "Workflow", "__version__", "load_config"]

_HOMES = {
    "Config": "areal_async.config",
    "Controller": "areal_async.controller",
    "Workflow": "areal_async.rollout.workflow",
    "load_config": "areal_async.config_file",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal_async' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
