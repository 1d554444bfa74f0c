"""Events: what happened; handled by the core, in order."""

from typing import Literal, TypeAlias

import msgspec

from areal_async.messages.names import FinishReason, GroupId, PeerKind, SampleId, Verdict, Version
from areal_async.messages.rules import Rules


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """at: run clock in seconds when the controller took it."""

    at: float


class Joined(Event, frozen=True, kw_only=True, tag="joined"):
    """A peer is there and may be used: a server that passed the handshake, all trainer ranks, a reward worker.

    version: for the trainer, the version of the weights that it holds. Servers hold nothing until they are `Swapped`.
    """

    peer: PeerKind
    id: str
    version: Version = 0


class Lost(Event, frozen=True, kw_only=True, tag="lost"):
    """A peer is gone; why: the cause for people, with the tail of its stderr."""

    peer: PeerKind
    id: str
    why: str


class GroupRead(Event, frozen=True, kw_only=True, tag="group_read"):
    """The prompt of an admitted group has been read; prompt_tokens: its length. row: number of its line in the data."""

    group: GroupId
    row: int
    prompt_tokens: int


class DataEnded(Event, frozen=True, kw_only=True, tag="data_ended"):
    """There is no prompt at this position (and none after it): all epochs are through. Answers `ReadGroup`."""

    group: GroupId


class SampleDone(Event, frozen=True, kw_only=True, tag="sample_done"):
    """A rollout has finished one answer; its arrays are in the payload log under `sample` and `attempt`.

    oldest, newest: versions of its oldest and newest trained token (the lag is counted from `oldest`).
    prompt_tokens, length: prompt and response tokens (those that others wrote, with loss mask 0, included).
    loss_tokens: response tokens with loss mask 1. reward: set if the workflow rewarded it; then nobody scores it.
    """

    sample: SampleId
    attempt: int
    oldest: Version
    newest: Version
    prompt_tokens: int
    length: int
    loss_tokens: int
    finish: FinishReason
    reward: float | None = None


class Scored(Event, frozen=True, kw_only=True, tag="scored"):
    """A check ended. reward is None where the verdict gives none (`bad_data`, `infrastructure`, a NaN)."""

    sample: SampleId
    attempt: int
    verdict: Verdict
    reward: float | None


class Failed(Event, frozen=True, kw_only=True, tag="failed"):
    """Something that a command asked for could not be done.

    of: "sample" (a workflow raised, or its deadline passed; id: the sample), "group" (its prompt can't be used: too
    long, unreadable; id: the group), "swap" (id: the server; it goes on under its old weights, so the swap may be tried
    again: a server that could not go on is `Lost`), "server" (id: the server; its numbers are wrong, so that starting
    it again would not help), "evaluation" (id: the version), "train" (id: the step), "publish",
    "checkpoint" (id: the version; the run goes on without it).
    why: the error for people, with the traceback where there is one.
    """

    of: Literal["sample", "group", "swap", "server", "evaluation", "train", "publish", "checkpoint"]
    id: str
    why: str
    attempt: int = 0


class StepDone(Event, frozen=True, kw_only=True, tag="step_done"):
    """All ranks have done step `step`: the trainer holds version step + 1.

    metrics: sums and means over all ranks, by the names of `metrics.jsonl` (docs/metrics.md). skipped: why the update
    was left out (loss or gradient not finite), or "".

    Also each rank's answer to `Train`; with `TrainerSpec.keep_prox` there are two arrays beside it, of this rank's
    samples and tokens as `Train` has them: lengths int32 [S], and log π_prox float32 [T], NaN where no loss token is
    or nobody has it.
    """

    step: int
    branch: int
    metrics: dict[str, float]
    skipped: str = ""


class Published(Event, frozen=True, kw_only=True, tag="published"):
    """The weights of `version` can be loaded from `location` (a file in shared memory)."""

    version: Version
    branch: int
    location: str
    nbytes: int


class Swapped(Event, frozen=True, kw_only=True, tag="swapped"):
    """A server answers with the weights of `version` from now on; pause_s: how long its answers stood still."""

    server: str
    version: Version
    branch: int
    pause_s: float


class EvaluationDone(Event, frozen=True, kw_only=True, tag="evaluation_done"):
    """All held-out problems are answered by the weights of `version` and scored.

    score: mean reward of the scored answers. n: problems. tokens: response tokens that it took. seconds: wall time.
    """

    version: Version
    server: str
    score: float
    n: int
    tokens: int
    seconds: float


class CheckpointDone(Event, frozen=True, kw_only=True, tag="checkpoint_done"):
    """The checkpoint of `version` is complete and on the disk. seconds: that training stood still for it. nbytes: of
    its files."""

    version: Version
    branch: int
    seconds: float
    nbytes: int


class RolledBack(Event, frozen=True, kw_only=True, tag="rolled_back"):
    """Training goes back to version `to`, of a checkpoint or the first of the run: steps from there on are trained
    again, same batches; `Joined` of the trainer, with that version, follows.

    resumed: the rules that a new controller goes on with, from the log of one that ended; None where the trainer alone
    was lost. After a resume no server, reward worker or trainer of before is there any more: all will join anew, with a
    clean record. Which fields may differ from the rules before: `core.resuming.CHANGEABLE`.
    """

    to: Version
    why: str
    resumed: Rules | None = None


class Woke(Event, frozen=True, kw_only=True, tag="woke"):
    """The moment that `Orchestrator.next_wakeup()` named has come; also the first event of a run."""


class StopRequested(Event, frozen=True, kw_only=True, tag="stop_requested"):
    """Finish the step that is running, then leave (the first Ctrl-C)."""


AnyEvent: TypeAlias = (
    Joined
    | Lost
    | GroupRead
    | DataEnded
    | SampleDone
    | Scored
    | Failed
    | StepDone
    | Published
    | Swapped
    | EvaluationDone
    | CheckpointDone
    | RolledBack
    | Woke
    | StopRequested
)
