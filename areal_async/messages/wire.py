"""Wire only: between processes, not for the core."""

from typing import Literal, TypeAlias

import msgspec

from areal_async.messages.commands import Publish, Train
from areal_async.messages.events import Published, StepDone
from areal_async.messages.names import FinishReason, SampleId, Verdict, Version


class ParameterInfo(msgspec.Struct, frozen=True, array_like=True):
    """Hugging Face name, shape and dtype (as safetensors writes it: "F32", "BF16") of one published tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="hello"):
    """First message of a worker's incarnation.

    name: stays the same over restarts ("trainer.0", "rewards.1"). nonce: new for each incarnation. credits: how many
    requests may be unanswered at this worker at a time. parameters: of a trainer's rank 0, what it will publish.
    version: of the weights that a trainer's rank begins with.
    """

    protocol: int
    secret: str
    worker: Literal["trainer", "reward"]
    name: str
    nonce: str
    credits: int
    rank: int = 0
    world: int = 1
    version: Version = 0
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

    prompt: the prompt's text as rendered. answer: the data row's answer. columns: the row's other columns. response:
    the response as text where there are no tokens of it (then the array is empty); None: the array is decoded.
    """

    sample: SampleId
    attempt: int
    prompt: str
    answer: str | None
    finish: FinishReason
    columns: dict[str, msgspec.Raw]
    response: str | None = None


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="score_result"):
    """Answer to a `ScoreTask`. why: for people (a crash's traceback). extracted: what was taken as the answer.
    seconds: of the check. settled: of `infrastructure`: it isn't to be made again, since that would not be safe."""

    sample: SampleId
    attempt: int
    verdict: Verdict
    reward: float | None
    why: str = ""
    extracted: str = ""
    seconds: float = 0.0
    settled: bool = False


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="probe"):
    """Ask a rank for log-probabilities under its present weights, at the temperature that it trains with.

    Arrays: token ids, int32 [n] (one sequence).

    -> ProbeResult with one array, float32 [n]: log-prob of token t given those before it; element 0 is 0.
    """

    id: str


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="probe_result"):
    """Answer to a `Probe`. Arrays: log-probabilities, float32 [n]. version: of the weights that computed them."""

    id: str
    version: Version = 0


class JoinServers(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="join_servers"):
    """Rank 0, transport nccl: form a communicator with the workers of the servers, as its rank 0 -> ServersJoined.

    Answered while a step is trained. host, port: where rank 0 opens the meeting point. world: rank 0 and all workers of
    all servers. A communicator that is there is given up first.
    """

    host: str
    port: int
    world: int


class ServersJoined(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="servers_joined"):
    """Answer to a `JoinServers`: all workers are there."""

    seconds: float


class SendWeights(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="send_weights"):
    """Rank 0, transport nccl: broadcast the snapshot of `version`, which was published, to the servers, in the order of
    the manifest -> WeightsSent. Answered while a step is trained."""

    version: Version


class WeightsSent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="weights_sent"):
    """Answer to a `SendWeights`: everything was sent."""

    version: Version
    seconds: float


class LeaveServers(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="leave_servers"):
    """Rank 0, transport nccl: give the communicator up, also in the middle of a broadcast, which fails then
    -> ServersLeft."""


class ServersLeft(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="servers_left"):
    """Answer to a `LeaveServers`."""


class SaveModel(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="save_model"):
    """Write the present weights with configuration and tokenizer in Hugging Face form to `path` -> ModelSaved."""

    path: str


class ModelSaved(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="model_saved"):
    """Answer to a `SaveModel`."""

    path: str
    version: Version


class SaveCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="save_checkpoint"):
    """Write all that training needs to go on from the present weights, to the folder `path`, which exists; all ranks
    -> CheckpointSaved. A trainer of another number of ranks can begin with it (`TrainerSpec.checkpoint`)."""

    path: str


class CheckpointSaved(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="checkpoint_saved"):
    """Answer to a `SaveCheckpoint`: what this rank wrote is on the disk. nbytes: of its files."""

    path: str
    version: Version
    nbytes: int


class WorkerError(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="worker_error"):
    """Answer to a request that raised: the traceback."""

    why: str


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
    | JoinServers
    | ServersJoined
    | SendWeights
    | WeightsSent
    | LeaveServers
    | ServersLeft
    | SaveModel
    | ModelSaved
    | SaveCheckpoint
    | CheckpointSaved
    | WorkerError
    | Train
    | StepDone
    | Publish
    | Published
)
