"""Commands: what is to be done; given only by the core."""

from typing import Literal, TypeAlias

import msgspec

from areal_async.messages.names import GroupId, PeerKind, SampleId, Version


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Carried out by the shell; answered by the event that its docstring names."""


class ReadGroup(Command, frozen=True, kw_only=True, tag="read_group"):
    """Read the prompt at `position` of the run's data order (epochs one after another) -> GroupRead, DataEnded or
    Failed(of="group"). The group holds its place in the ledger from now on."""

    group: GroupId
    position: int


class StartSample(Command, frozen=True, kw_only=True, tag="start_sample"):
    """Roll out one sample of the prompt at `position`, on `server` (which holds at least version `floor`, or was lost
    like all that do: then its session waits for one that does) -> SampleDone or Failed(of="sample")."""

    sample: SampleId
    attempt: int
    position: int
    server: str
    floor: Version


class Score(Command, frozen=True, kw_only=True, tag="score"):
    """Have the answer checked -> Scored."""

    sample: SampleId
    attempt: int


class TrainSample(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a batch: its id, the attempt that is trained, its advantage (the same for all of its tokens)."""

    sample: SampleId
    attempt: int
    advantage: float


class Minibatch(msgspec.Struct, frozen=True, array_like=True):
    """One optimiser step.

    divisor: by what the sum of token losses over all ranks is divided (`token_mean`: loss-mask tokens of the minibatch;
    `sequence_mean`: sequences with a loss-mask token; `constant`: sequences × max_new_tokens; at least 1).
    ranks[r] = rank r's micro-batches, each a tuple of indices into `Train.samples`; every rank
    has the same number of them, an empty one is a dummy that takes part with zero weight.
    """

    divisor: float
    ranks: tuple[tuple[tuple[int, ...], ...], ...]


class Train(Command, frozen=True, kw_only=True, tag="train"):
    """Train version `step` into version step + 1 -> StepDone or Failed(of="train").

    Also the wire header to the ranks. Rank r gets five arrays beside it, of its own samples in the order in which
    minibatches[*].ranks[r] names them (S samples, T tokens in all): lengths int32 [S]; and, prompts and responses
    together, sample after sample: token_ids int32 [T], loss_mask uint8 [T], logprobs float32 [T] (of the sampling
    policy, at the sampling temperature; 0 where the mask is 0), versions int32 [T] (-1 where the mask is 0).

    mask_below: tokens of versions below it get no gradient, and stay in the divisor (`when_older: mask`); 0 for none.
    """

    step: int
    branch: int
    groups: tuple[GroupId, ...]
    samples: tuple[TrainSample, ...]
    minibatches: tuple[Minibatch, ...]
    mask_below: Version = 0


class Publish(Command, frozen=True, kw_only=True, tag="publish"):
    """Write the trainer's present weights, version `version`, to where servers can load them -> Published.

    free: published versions that nobody loads or will load; their memory is given back first.
    """

    version: Version
    branch: int
    free: tuple[Version, ...] = ()


class Swap(Command, frozen=True, kw_only=True, tag="swap"):
    """Bring a server to `version`, in the middle of its answers -> Swapped or Failed(of="swap")."""

    server: str
    version: Version
    branch: int
    location: str


class Restart(Command, frozen=True, kw_only=True, tag="restart"):
    """End what is left of a server, a reward worker or all trainer ranks and start it again (a server by URL: shake
    hands again) -> Joined or Lost; of the trainer RolledBack and then Joined, or Lost. why: of its loss.

    version: for the trainer, the version that it begins with: that of the newest checkpoint, or of the run's first
    weights where there is none.
    """

    peer: PeerKind
    id: str
    why: str
    version: Version = 0


class Evaluate(Command, frozen=True, kw_only=True, tag="evaluate"):
    """Have `server`, which holds `version` and gets no other until this is answered, answer the held-out problems
    -> EvaluationDone or Failed(of="evaluation")."""

    version: Version
    server: str


class Checkpoint(Command, frozen=True, kw_only=True, tag="checkpoint"):
    """Write the trainer's state of `version`, so that training can go back to it -> CheckpointDone or
    Failed(of="checkpoint"). keep: versions whose checkpoints stay beside it; all others go once it is complete."""

    version: Version
    branch: int
    keep: tuple[Version, ...]


class Cancel(Command, frozen=True, kw_only=True, tag="cancel"):
    """Stop a sample: its rollout or its check. Nothing more is heard of it."""

    sample: SampleId
    attempt: int


class Forget(Command, frozen=True, kw_only=True, tag="forget"):
    """These samples aren't asked for again unless training goes back: their arrays may leave memory."""

    samples: tuple[SampleId, ...]


class Release(Command, frozen=True, kw_only=True, tag="release"):
    """Nothing can ask for these samples again, no checkpoint that is kept either: they may leave the disk, too."""

    samples: tuple[SampleId, ...]


class Finish(Command, frozen=True, kw_only=True, tag="finish"):
    """The run is over as it should: save the model, end everything."""

    reason: Literal["steps_done", "data_ended", "stopped"]


class Fail(Command, frozen=True, kw_only=True, tag="fail"):
    """The run can't go on; why: the first cause. Everything is ended, exit code 1."""

    why: str


AnyCommand: TypeAlias = (
    ReadGroup
    | StartSample
    | Score
    | Train
    | Publish
    | Swap
    | Restart
    | Evaluate
    | Checkpoint
    | Cancel
    | Forget
    | Release
    | Finish
    | Fail
)
