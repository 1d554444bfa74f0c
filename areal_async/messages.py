"""Every struct that crosses a border: event = log record = wire header, one definition each.

What always holds: structs are frozen, hold only numbers, strings, tuples and dicts of these, and travel as msgpack
(msgspec, tagged by `kind`), never as pickles. Token arrays are not in here: they follow a header as raw frames on the
wire (`wire.frames`), lie in the payload segments of the log (`log.payloads`), and are named by sample.

Units: times `at` are seconds of the run clock (it starts at 0 and goes on after a resume); lengths are tokens.
"""

from typing import Final, Literal, TypeAlias

import msgspec

GroupId: TypeAlias = int
"""Running number of a group in the order of admission, from 0; never used twice in a run."""
SampleId: TypeAlias = str
"""`"<group>.<member>"`, such as `"1307.5"`."""
Version: TypeAlias = int
"""How many training steps the weights have seen; 0 is the model that the run started from."""

FinishReason: TypeAlias = Literal["stop", "length"]
"""Why an answer ended: by a stop token (end of sequence), or cut at the token limit."""
Verdict: TypeAlias = Literal["right", "wrong", "no_answer", "bad_data", "timeout", "crash", "infrastructure", "given"]
"""Outcome of a check; `given`: the reward function or the workflow returned a number of its own."""
PeerKind: TypeAlias = Literal["server", "trainer", "rewards"]

PROTOCOL: Final = 1  # grows when a struct below changes in a way that an older peer can't read


def sample_id(group: GroupId, member: int) -> SampleId:
    return f"{group}.{member}"


def group_of(sample: SampleId) -> GroupId:
    return int(sample.partition(".")[0])


class Rules(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="rules"):
    """What the core needs to know of the configuration. First record of every decision log.

    batch_groups: groups per training step (B). group_size: samples per group (n). max_staleness: η.
    max_concurrent: samples in flight over all servers. retries: further attempts of a sample that failed.
    min_group: members with a reward that a group needs to be trained. max_failures: failed groups that the run
    tolerates in all. nan_budget: steps whose update may be left out (loss or gradient not finite).
    drop_equal: filter groups whose rewards are all equal (they have no gradient under `grpo`).
    ranks: data-parallel trainer ranks. max_tokens_per_microbatch: prompt + response tokens, the capacity of packing.
    wave: how many servers swap weights at the same time. steps: training steps of the whole run.
    """

    seed: int
    steps: int
    batch_groups: int
    group_size: int
    max_staleness: int
    max_concurrent: int
    minibatches: int
    ranks: int
    max_tokens_per_microbatch: int
    when_older: Literal["wait"] = "wait"
    retries: int = 2
    min_group: int = 1
    max_failures: int = 0
    nan_budget: int = 0
    drop_equal: bool = False
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "areal_paper"] = "grpo"
    advantage_eps: float = 1e-6
    wave: int = 1


# ---------------------------------------------------------------- events: what happened; handled by the core, in order


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """at: run clock in seconds when the controller took it."""

    at: float


class Joined(Event, frozen=True, kw_only=True, tag="joined"):
    """A peer is there and may be used: a server that passed the handshake, all trainer ranks, the reward workers.

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
    long, unreadable; id: the group), "swap" (id: the server), "train" (id: the step), "publish" (id: the version).
    why: the error for people, with the traceback where there is one.
    """

    of: Literal["sample", "group", "swap", "train", "publish"]
    id: str
    why: str
    attempt: int = 0


class StepDone(Event, frozen=True, kw_only=True, tag="step_done"):
    """All ranks have done step `step`: the trainer holds version step + 1.

    metrics: sums and means over all ranks, by the names of `metrics.jsonl` (docs/metrics.md). skipped: why the update
    was left out (loss or gradient not finite), or "".
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


class RolledBack(Event, frozen=True, kw_only=True, tag="rolled_back"):
    """The trainer holds version `to` again (a checkpoint): steps from there on are trained again, same batches."""

    to: Version
    why: str


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
    | RolledBack
    | Woke
    | StopRequested
)


# ------------------------------------------------------------- commands: what is to be done; given only by the core


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Carried out by the shell; answered by the event that its docstring names."""


class ReadGroup(Command, frozen=True, kw_only=True, tag="read_group"):
    """Read the prompt at `position` of the run's data order (epochs one after another) -> GroupRead, DataEnded or
    Failed(of="group"). The group holds its place in the ledger from now on."""

    group: GroupId
    position: int


class StartSample(Command, frozen=True, kw_only=True, tag="start_sample"):
    """Roll out one sample of the prompt at `position`, on `server` (which holds at least version `floor`)
    -> SampleDone or Failed(of="sample")."""

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

    divisor: by what the sum of token losses over all ranks is divided (`token_mean`: loss-mask tokens of the
    minibatch; at least 1). ranks[r] = rank r's micro-batches, each a tuple of indices into `Train.samples`; every rank
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
    """

    step: int
    branch: int
    groups: tuple[GroupId, ...]
    samples: tuple[TrainSample, ...]
    minibatches: tuple[Minibatch, ...]


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


class Cancel(Command, frozen=True, kw_only=True, tag="cancel"):
    """Stop a sample: its rollout or its check. Nothing more is heard of it."""

    sample: SampleId
    attempt: int


class Forget(Command, frozen=True, kw_only=True, tag="forget"):
    """These samples won't be asked for again: their arrays may leave memory."""

    samples: tuple[SampleId, ...]


class Finish(Command, frozen=True, kw_only=True, tag="finish"):
    """The run is over as it should: save the model, end everything."""

    reason: Literal["steps_done", "data_ended", "stopped"]


class Fail(Command, frozen=True, kw_only=True, tag="fail"):
    """The run can't go on; why: the first cause. Everything is ended, exit code 1."""

    why: str


AnyCommand: TypeAlias = ReadGroup | StartSample | Score | Train | Publish | Swap | Cancel | Forget | Finish | Fail


class Note(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="note"):
    """Logged, not handled: what an observer needs and the core doesn't (turns, attempts, versions of libraries)."""

    at: float
    what: str
    data: dict[str, str | int | float | bool | tuple[int | str, ...] | None]


AnyRecord: TypeAlias = Rules | Note | AnyEvent | AnyCommand


# ----------------------------------------------------------------------- wire only: between processes, not for the core


class ParameterInfo(msgspec.Struct, frozen=True, array_like=True):
    """Hugging Face name, shape and dtype (as safetensors writes it: "F32", "BF16") of one published tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="hello"):
    """First message of a worker's incarnation.

    name: stays the same over restarts ("trainer.0", "rewards.1"). nonce: new for each incarnation. credits: how many
    requests may be unanswered at this worker at a time. parameters: of a trainer's rank 0, what it will publish.
    """

    protocol: int
    secret: str
    worker: Literal["trainer", "reward"]
    name: str
    nonce: str
    credits: int
    rank: int = 0
    world: int = 1
    parameters: tuple[ParameterInfo, ...] = ()


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="welcome"):
    """The controller takes the worker in."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="refused"):
    """The controller doesn't take the worker; it prints why and ends."""

    why: str


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="beat"):
    """I am alive. Both ways, from an I/O thread in workers, so that a long step isn't a death."""


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="goodbye"):
    """End by yourself: finish nothing, free what you hold."""


class ScoreTask(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="score_task"):
    """Header of a check. Arrays: response token ids, int32 [n]. The worker decodes them.

    prompt: the prompt's text as rendered. answer: the data row's answer. columns: the row's other columns.
    """

    sample: SampleId
    attempt: int
    prompt: str
    answer: str | None
    finish: FinishReason
    columns: dict[str, msgspec.Raw]


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="score_result"):
    """Answer to a `ScoreTask`. why: for people (a crash's traceback, what was extracted). seconds: of the check."""

    sample: SampleId
    attempt: int
    verdict: Verdict
    reward: float | None
    why: str = ""
    seconds: float = 0.0


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="probe"):
    """Ask a rank for log-probabilities under its present weights, at the temperature that it trains with.

    Arrays: token ids, int32 [n] (one sequence).

    -> ProbeResult with one array, float32 [n]: log-prob of token t given those before it; element 0 is 0.
    """

    id: str


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="probe_result"):
    """Answer to a `Probe`. Arrays: log-probabilities, float32 [n]."""

    id: str


class SaveModel(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="save_model"):
    """Write the present weights with configuration and tokenizer in Hugging Face form to `path` -> ModelSaved."""

    path: str


class ModelSaved(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="model_saved"):
    """Answer to a `SaveModel`."""

    path: str
    version: Version


class WorkerError(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="worker_error"):
    """Answer to a request that raised: the traceback."""

    why: str


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer rank is started with (a JSON file; the secret comes by the environment).

    dtype: of the forward and backward pass; optimiser and master weights are float32. temperature: logits are divided
    by it, as the servers do. shm_prefix: published files are `/dev/shm/<shm_prefix>-v<version>.safetensors`.
    publish_dtype: of the published tensors.
    """

    model_path: str
    dtype: Literal["bfloat16", "float32"]
    publish_dtype: Literal["bfloat16", "float32"]
    temperature: float
    seed: int
    zero_stage: int
    lr: float
    warmup_steps: int
    weight_decay: float
    betas: tuple[float, float]
    adam_eps: float
    max_grad_norm: float
    clip_eps: float
    shm_prefix: str


class RewardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward worker is started with (a JSON file; the secret comes by the environment).

    function: `exact` or `module:function`. model_path: of the tokenizer that decodes the answers. import_paths: folders
    put before `sys.path` for the user's own function.
    """

    function: str
    exact_after: str | None
    model_path: str
    concurrent: int
    timeout_s: float
    import_paths: tuple[str, ...] = ()


AnyWire: TypeAlias = (
    Hello
    | Welcome
    | Refused
    | Beat
    | Goodbye
    | ScoreTask
    | ScoreResult
    | Probe
    | ProbeResult
    | SaveModel
    | ModelSaved
    | WorkerError
    | Train
    | StepDone
    | Publish
    | Published
)
