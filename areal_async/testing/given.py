"""What scripted peers may be given to say in place of what they would make up: answers, steps.

What always holds: these are names only, and import nothing of the peers, which run as programs of their own.
"""

from typing import NamedTuple, Protocol

import msgspec

from areal_async.errors import ArealError


class NotGiven(ArealError):
    """Whoever was to give an answer, a verdict or a step has none."""


class Given(msgspec.Struct, frozen=True):
    """An answer that stands before it is asked for. seconds: that it takes, spread over its tokens."""

    token_ids: list[int]
    logprobs: list[float]
    finish: str
    seconds: float


class Answers(Protocol):
    """For a server."""

    def answer(self, request_id: str, asked: list[int]) -> Given | None:
        """What comes after the tokens `asked`; None: it is drawn. Raises NotGiven: the request is refused (404)."""
        ...


class Step(NamedTuple):
    """metrics, skipped: as of `StepDone`. seconds: from its command to its end."""

    metrics: dict[str, float]
    skipped: str
    seconds: float


class Steps(Protocol):
    """For a trainer's rank. publish_s, checkpoint_s: how long these take, of a version."""

    def step(self, step: int) -> Step:
        """Raises NotGiven: the step is answered with an error."""
        ...

    def publish_s(self, version: int) -> float: ...

    def checkpoint_s(self, version: int) -> float: ...
