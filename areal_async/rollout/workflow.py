"""How a sample comes about: the `Workflow` protocol and the workflow that most runs use, one question, one answer.

What always holds: a sample's arrays have one length, prompt first; tokens that the model did not sample have loss mask
0; token ids are those that the server gave, never text encoded again.
"""

import sys
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.errors import ConfigError, ServerError
from areal_async.messages import FinishReason
from areal_async.rollout.session import Session
from areal_async.rollout.types import Completion


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data, ready to be asked.

    token_ids: the rendered prompt. text: the same as text. answer: the row's right answer. columns: its other columns.
    position: place in the run's data order. row: number of its line in the file, from 0.
    """

    token_ids: list[int]
    text: str
    answer: str | None
    position: int
    row: int
    columns: dict[str, msgspec.Raw] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished answer, of one or more turns.

    token_ids int32 [n]: the prompt, then everything that followed. loss_mask uint8 [n]: 1 where the model sampled the
    token. logprobs float32 [n] and versions int32 [n]: of sampled tokens; 0 and -1 elsewhere. prompt_tokens: how many
    of the n are the prompt. finish: why the last turn ended. reward: None lets the run's reward function decide.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    prompt_tokens: int
    finish: FinishReason
    reward: float | None = None

    @classmethod
    def single(cls, prompt: list[int], completion: Completion, *, reward: float | None = None) -> "Sample":
        """The sample of one prompt and one answer."""
        before, after = len(prompt), len(completion.token_ids)
        return cls(
            token_ids=np.concatenate([np.asarray(prompt, np.int32), completion.token_ids]),
            loss_mask=np.repeat(np.array([0, 1], np.uint8), [before, after]),
            logprobs=np.concatenate([np.zeros(before, np.float32), completion.logprobs]),
            versions=np.concatenate([np.full(before, -1, np.int32), completion.versions]),
            prompt_tokens=before,
            finish=completion.finish_reason,
            reward=reward,
        )

    def check(self) -> None:
        """Raise `ServerError` where the arrays can't be trained on; workflows are user code."""
        lengths = {len(a) for a in (self.token_ids, self.loss_mask, self.logprobs, self.versions)}
        if len(lengths) != 1:
            raise ServerError(f"a sample's four arrays must have one length, not {sorted(lengths)}")
        sampled = self.loss_mask != 0
        if not sampled.any():
            raise ServerError("a sample has no token with loss mask 1: there is nothing to train")
        if sampled[: self.prompt_tokens].any() or self.prompt_tokens < 1:
            raise ServerError("a sample's prompt must have at least one token, all with loss mask 0")
        if (self.versions[sampled] < 0).any():
            raise ServerError("a sample has sampled tokens without a version")
        if not np.isfinite(self.logprobs[sampled]).all():
            raise ServerError("a sample has log-probabilities that are not finite")


class Workflow(Protocol):
    """What a user writes for rollouts of his own: turns, tools, rewards.

    `run` is called once for each attempt of each sample, many at a time, in the controller's loop: it must not block.
    An exception fails the attempt; the sample is tried again up to `rollout.retries`.
    """

    async def run(self, session: Session, prompt: Prompt) -> Sample: ...


class SingleTurn:
    """One question, one answer."""

    async def run(self, session: Session, prompt: Prompt) -> Sample:
        return Sample.single(prompt.token_ids, await session.generate(prompt.token_ids))


def load_workflow(name: str, import_path: str) -> Workflow:
    """`single_turn`, or an instance of the class at `module:Class`; import_path: a folder put on `sys.path` for it.

    Errors: ConfigError where it can't be imported or has no `run`.
    """
    if name == "single_turn":
        return SingleTurn()
    if import_path not in sys.path:
        sys.path.insert(0, import_path)
    module, _, attribute = name.partition(":")
    try:
        workflow = getattr(import_module(module), attribute)()
    except Exception as error:  # user code may raise anything
        raise ConfigError(f"rollout.workflow: {name} can't be loaded: {type(error).__name__}: {error}") from error
    if not callable(getattr(workflow, "run", None)):
        raise ConfigError(f"rollout.workflow: {name} has no method `run(session, prompt)`")
    return workflow  # type: ignore[no-any-return]
