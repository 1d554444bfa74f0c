"""How long everything takes that a simulated run asks for.

What always holds: pure arithmetic, without a clock or randomness of its own; all times are in seconds, all sizes in
tokens, and everything is linear in what is counted, but for one `max` (the roofline of decoding). So the same structs
are filled from a GPU's data sheet (`plan`) and from a recorded run (`fit`).
"""

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import msgspec


@dataclass(frozen=True, slots=True)
class ServerModel:
    """One rollout server (of one or several GPUs).

    A decoding step gives each running answer one token and takes

        overhead_s + max(weights_s + context_s · context, sequence_s · running)

    the first term of the maximum is memory traffic (all weights once, the KV cache of all running answers: context =
    their prompt and response tokens so far), the second one arithmetic. A prompt, or a context whose cache was cleared
    by a swap, is computed in prefill_s a token, in which nothing else is decoded.

    max_running: answers that are decoded at the same time; more wait in their order. cache: tokens that the KV cache
    holds: answers whose whole length doesn't fit wait, too. request_s: of each answer beside its tokens, in which the
    server does something else: HTTP, queues. beside_training: times as long as all this takes while the trainer trains,
    where both share cores or memory (1: they share nothing).
    """

    overhead_s: float
    weights_s: float
    context_s: float
    sequence_s: float
    prefill_s: float
    max_running: int
    cache: int
    request_s: float = 0.0
    beside_training: float = 1.0

    def step_s(self, running: int, context: float) -> float:
        """Of a decoding step. running: answers. context: their tokens so far, all together."""
        return self.overhead_s + max(self.weights_s + self.context_s * context, self.sequence_s * running)


def slowed(model: ServerModel) -> ServerModel:
    """The same server while the trainer trains; the very same model where that changes nothing."""
    times = model.beside_training
    if times == 1:
        return model
    return replace(
        model,
        overhead_s=model.overhead_s * times,
        weights_s=model.weights_s * times,
        context_s=model.context_s * times,
        sequence_s=model.sequence_s * times,
        prefill_s=model.prefill_s * times,
    )


@dataclass(frozen=True, slots=True)
class SwapModel:
    """New weights at a server. load_s: how long its answers stand still for the weights alone. answer_s: so much longer
    for each answer that is stopped (the decoding step that is under way ends first).

    interruptible: answers stop where they are, and their cache is computed again under the new weights (ServerModel.
    prefill_s a token). Without: no answer is begun any more, the running ones are finished under the old weights, and
    only then the new ones are loaded.
    """

    load_s: float
    interruptible: bool = True
    answer_s: float = 0.0

    def pause_s(self, running: int) -> float:
        """How long so many answers stand still, until their cache is computed again."""
        return self.load_s + self.answer_s * running


@dataclass(frozen=True, slots=True)
class TrainerModel:
    """All trainer ranks. A step takes

        step_s + for each minibatch: minibatch_s + the longest of its ranks: for each of its micro-batches
        microbatch_s + token_s · tokens + pair_s · Σ length²

    ranks_wait: for each other in every `microbatch` (ZeRO 2 and 3 sum gradients, or gather weights, in each: then the
    longest rank counts in each), or at the end of a `minibatch` alone (gradients are summed once).

    tokens: of prompts and responses; pair_s: of attention, for each pair of a sequence's tokens. prox_share: how much
    longer each micro-batch takes where the proximal policy's log-probabilities need a pass of their own (more than one
    minibatch). publish_s: to publish the weights. checkpoint_s: to write a checkpoint. beside_generation: times as
    long as a step takes while all servers generate, where they share cores or memory (1: they share nothing).

    microbatches: `dynamic` as the core packs them; `fixed`: each rank's part of a minibatch in `fixed_microbatches`
    micro-batches of equally many sequences, in the order of the batch.
    """

    step_s: float
    minibatch_s: float
    microbatch_s: float
    token_s: float
    pair_s: float
    publish_s: float
    prox_share: float = 0.0
    checkpoint_s: float = 0.0
    ranks_wait: Literal["microbatch", "minibatch"] = "microbatch"
    microbatches: Literal["dynamic", "fixed"] = "dynamic"
    fixed_microbatches: int = 0
    beside_generation: float = 1.0


@dataclass(frozen=True, slots=True)
class RewardModel:
    """check_s: of one check. workers: that check at the same time; more checks wait in their order."""

    check_s: float
    workers: int


@dataclass(frozen=True, slots=True)
class FailureModel:
    """server_hours: mean time between two losses of one server, 0: none is lost. restart_s: from its loss until it has
    joined again."""

    server_hours: float = 0.0
    restart_s: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    """What a sample turns out to be. length: response tokens. reward: None where the check gives none."""

    prompt_tokens: int
    length: int
    truncated: bool
    reward: float | None


class Answers(Protocol):
    """What the model answers: the same for the same sample and attempt, however often it is asked for."""

    def answer(self, group: int, member: int, attempt: int) -> Answer: ...


@dataclass(frozen=True, slots=True)
class Cluster:
    """All that a simulated run has beside its rules. servers: how many, all alike. start_s: until the servers and the
    trainer have joined. server_gpus, trainer_gpus: of all servers, of all ranks; for GPU-hours alone."""

    servers: int
    server: ServerModel
    swap: SwapModel
    trainer: TrainerModel
    rewards: RewardModel
    answers: Answers
    failures: FailureModel = FailureModel()
    start_s: float = 0.0
    server_gpus: int = 0
    trainer_gpus: int = 0
