"""From a GPU's data sheet and a model's shape to the times of `models`: a roofline.

What always holds: pure arithmetic, one formula a term, each with where it comes from; shares of the peak (`mfu`,
`bandwidth_share`) are the plan's, and nothing here is fitted to any result.

Sources: [KM] Kaplan et al. 2020, arXiv 2001.08361, 2.1: 2 · N arithmetic operations a token forward, twice that
backward. [RL] Williams, Waterman, Patterson 2009: a kernel takes the longer of its memory traffic and its arithmetic.
[PD] Patarasu, Yuan 2009: a ring moves 2 · (n − 1) / n of the data over each link. [AD] AdamW with float32 states reads
a gradient, a weight and two moments, and writes a weight, two moments and a weight of half the size.
"""

from dataclasses import dataclass
from typing import Final

from areal_async.simulate.models import ServerModel, SwapModel, TrainerModel

# Peak dense bfloat16 arithmetic, memory bandwidth and memory of the SXM modules, by NVIDIA's data sheets (they print
# the Hoppers' tensor arithmetic with sparsity: twice this). The H800 is an H100 whose NVLink is slower (400 GB/s in
# both directions together) and whose float64 is cut; arithmetic in bfloat16 and memory are the same.
GPUS: Final = {
    "A100": (312.0, 2039.0, 80.0),
    "H100": (989.4, 3350.0, 80.0),
    "H200": (989.4, 4800.0, 141.0),
    "H800": (989.4, 3350.0, 80.0),
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """flops: peak, 1/s. bandwidth: bytes/s. memory: bytes."""

    flops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer. parameters: embeddings included. heads: of queries. tied: input and output embeddings are one."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    @property
    def multiplied(self) -> float:
        """Parameters that each token is multiplied by: all but the input embedding, which is looked up."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def weights(self) -> float:
        """Bytes of all weights on the servers."""
        return self.parameters * self.weight_bytes

    @property
    def kv(self) -> float:
        """Bytes of the KV cache of a token: a key and a value of each layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def pair(self) -> float:
        """Arithmetic of attention for a token and one that it looks at, forward: q·k and the weighted sum of v."""
        return 4 * self.layers * self.heads * self.head_dim


# From the models' config.json; parameters as their files have them (tests make them from the shapes again).
SHAPES: Final = {
    "r1-distill-qwen-1.5b": Shape(1_777_088_000, 28, 1536, 12, 2, 128, 151_936, False),
    "r1-distill-qwen-7b": Shape(7_615_616_512, 28, 3584, 28, 4, 128, 152_064, False),
    "r1-distill-qwen-14b": Shape(14_770_033_664, 48, 5120, 40, 8, 128, 152_064, False),
    "r1-distill-qwen-32b": Shape(32_763_876_352, 64, 5120, 40, 8, 128, 152_064, False),
}


def server_model(
    gpu: Gpu, shape: Shape, *, gpus: int, context: float, bandwidth_share: float, decode_mfu: float,
    prefill_mfu: float, overhead_s: float, max_running: int, cache: int,
) -> ServerModel:  # fmt: skip
    """gpus: of the server; weights, cache and arithmetic are split evenly over them. context: tokens before a typical
    one, for the attention of prefill, whose cost a token is taken as constant."""
    bandwidth = gpu.bandwidth * gpus * bandwidth_share
    flops = gpu.flops * gpus
    read = shape.multiplied * shape.weight_bytes  # the input embedding isn't read, but for one row a token
    return ServerModel(
        overhead_s=overhead_s,
        weights_s=read / bandwidth,  # [RL]
        context_s=shape.kv / bandwidth,  # [RL]
        sequence_s=2 * shape.multiplied / (flops * decode_mfu),  # [KM]
        prefill_s=(2 * shape.multiplied + shape.pair * context) / (flops * prefill_mfu),  # [KM] and attention
        max_running=max_running,
        cache=cache,
    )


def cache_tokens(gpu: Gpu, shape: Shape, *, gpus: int, memory_share: float) -> int:
    """Tokens that fit beside the weights; 0 or less: not even the weights do."""
    return int((gpu.memory * gpus * memory_share - shape.weights) / shape.kv)


def moved_s(shape: Shape, *, gpus: int, bytes_per_s: float) -> float:
    """All weights, each GPU its part at bytes_per_s."""
    return shape.weights / (gpus * bytes_per_s)


def swap_model(load_s: float, interruptible: bool) -> SwapModel:
    return SwapModel(load_s=load_s, interruptible=interruptible)


def trainer_model(
    gpu: Gpu, shape: Shape, *, ranks: int, gpus_per_rank: int, mfu: float, minibatches: int, checkpointing: bool,
    zero: int, link: float | None, step_s: float, microbatch_s: float, publish_s: float, checkpoint_s: float,
) -> TrainerModel:  # fmt: skip
    """ranks: data parallel, of gpus_per_rank GPUs each; optimiser states are sharded over all of them (ZeRO). link:
    bytes/s of a GPU in one direction; None: gradients travel in no time. checkpointing: another forward pass. zero: the
    stage; from 2 on each micro-batch's gradients are summed over the ranks (DeepSpeed's `partition_gradients`)."""
    flops = gpu.flops * gpus_per_rank * mfu
    passes = 4.0 if checkpointing else 3.0  # forward 1, backward 2 [KM]
    causal = 0.5  # of a sequence's length² pairs half are looked at
    gpus = ranks * gpus_per_rank
    optimiser_s = shape.parameters * _ADAM_BYTES / (gpus * gpu.bandwidth)  # [AD]
    gradients_s = 0.0
    if link is not None:  # gradients are gathered and weights spread, half of a ring each [PD]
        gradients_s = 2 * (ranks - 1) / ranks * shape.parameters * _GRADIENT_BYTES / gpus_per_rank / link
    return TrainerModel(
        step_s=step_s,
        minibatch_s=optimiser_s + gradients_s,
        microbatch_s=microbatch_s,
        token_s=passes * 2 * shape.multiplied / flops,
        pair_s=passes * causal * shape.pair / flops,
        publish_s=publish_s,
        prox_share=1 / passes if minibatches > 1 else 0.0,  # a forward pass more
        checkpoint_s=checkpoint_s,
        ranks_wait="microbatch" if zero >= 2 else "minibatch",
    )


_ADAM_BYTES: Final = 4 + 3 * 4 + 3 * 4 + 2
_GRADIENT_BYTES: Final = 2
