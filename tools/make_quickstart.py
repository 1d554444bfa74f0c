"""Makes everything `make quickstart` trains on: problems, a tokenizer and a small base model, from nothing.

    python tools/make_quickstart.py          # writes configs/quickstart/{train,eval}.jsonl and model/

The task is `start + step * times`, worked out one term at a time with the terms counted down: `37+6*3:` is answered
`3=43,2=49,1=55>55`. An answer is right when the text after its last `>` is the result and the model stopped by itself.
The number of terms has a long tail (3 to 20), and so has the length of the answers: 14 to 137 tokens.

The base model is supervised on solutions by a lazy solver: after any term it may stop and give what it has so far. So
it knows the way but seldom walks it to the end, above all on long problems; reinforcement learning teaches it to
persevere, and its answers grow longer.

Always: problems of eval.jsonl are never in train.jsonl nor in the supervised data. Data, tokenizer and configuration
are the same bits everywhere; the weights are the same on one kind of machine with one version of torch only.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

OUTPUT: Final = Path(__file__).resolve().parent.parent / "configs" / "quickstart"

TRAIN_PROBLEMS: Final = 6000
EVAL_PROBLEMS: Final = 500
DATA_SEED: Final = 20250524
PRETRAIN_SEED: Final = 1

STARTS: Final = range(1, 200)
STEPS: Final = range(2, 10)  # one digit, so that one term is one easy sum
TIMES: Final = range(3, 21)  # 20 terms are at most 137 tokens, which fit CONTEXT_TOKENS with their prompt
TAIL: Final = 0.80  # how likely n + 1 terms are beside n: 7 terms on average, 1 problem in 22 has 16 or more
PRETRAIN_TAIL: Final = 0.95  # flatter, since few lazy solutions get through many terms

STOP_EARLY: Final = 0.11  # after each term; brings the base model to about one half right

CONTEXT_TOKENS: Final = 256
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS: Final = "0123456789+-*=,:> "  # '-' and ' ' are spare: for variations of the task with the same tokenizer

PRETRAIN_STEPS: Final = 4800
BATCH_TOKENS: Final = 600  # small batches: the number of updates is what makes this task learnt, not the tokens
LEARNING_RATE: Final = 2e-3
WARMUP_STEPS: Final = 100
POOL_PROBLEMS: Final = 256  # sorted by length before they are cut into batches, so that little is padding
IGNORED: Final = -100  # the label that cross-entropy skips


@dataclass(frozen=True)
class Problem:
    """start + step * times."""

    start: int
    step: int
    times: int

    @property
    def prompt(self) -> str:
        return f"{self.start}+{self.step}*{self.times}:"

    @property
    def answer(self) -> str:
        return str(self.start + self.step * self.times)


def draw_problem(rng: random.Random, tail: float) -> Problem:
    """A random problem; one with n + 1 terms is `tail` times as likely as one with n."""
    times = rng.choices(TIMES, [tail**n for n in TIMES])[0]
    return Problem(rng.choice(STARTS), rng.choice(STEPS), times)


def draw_data() -> tuple[list[Problem], list[Problem]]:
    """The (train, eval) problems: all different, the same ones on every call."""
    rng = random.Random(DATA_SEED)
    problems: dict[Problem, None] = {}
    while len(problems) < TRAIN_PROBLEMS + EVAL_PROBLEMS:
        problems[draw_problem(rng, TAIL)] = None
    # Late draws repeat more often where few problems exist (3 terms): without this, eval would have longer ones.
    shuffled = list(problems)
    rng.shuffle(shuffled)
    return shuffled[EVAL_PROBLEMS:], shuffled[:EVAL_PROBLEMS]


def solution(problem: Problem) -> str:
    """The complete and right working, up to the answer."""
    terms = (f"{problem.times + 1 - k}={problem.start + problem.step * k}" for k in range(1, problem.times + 1))
    return f"{','.join(terms)}>{problem.answer}"


def lazy_solution(problem: Problem, rng: random.Random) -> str:
    """What the base model learns from: right term by term, but may stop after any."""
    total, terms = problem.start, []
    for left in range(problem.times, 0, -1):
        total += problem.step
        terms.append(f"{left}={total}")
        if rng.random() < STOP_EARLY:
            break
    return f"{','.join(terms)}>{total}"


def write_data(folder: Path) -> None:
    """train.jsonl and eval.jsonl: one {"prompt", "answer", "terms"} a line; terms grows with the answer's length."""
    for name, problems in zip(("train", "eval"), draw_data(), strict=True):
        lines = (json.dumps({"prompt": p.prompt, "answer": p.answer, "terms": p.times}) for p in problems)
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character. Pad and eos are different tokens, and nothing is put before or after a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, EOS, UNKNOWN, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=CONTEXT_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_config() -> Qwen2Config:
    """A Qwen2 of 0.86M parameters. Input and output embeddings are untied: with 21 tokens tying would save nothing."""
    from transformers import Qwen2Config

    tokenizer = build_tokenizer()
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,  # 32 a head, the smallest that vLLM's attention has on a CPU
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def write_model(model: Qwen2ForCausalLM, folder: Path) -> None:
    """The model, its tokenizer and its sampling defaults (temperature 1, ends at eos), as Hugging Face files."""
    from transformers import GenerationConfig

    config = model.config
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def pretrain() -> Qwen2ForCausalLM:
    """The base model: supervised on lazy solutions, loss on the solution and its eos only."""
    import torch
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(PRETRAIN_SEED)
    model = Qwen2ForCausalLM(build_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / WARMUP_STEPS) * (1.0 - step / PRETRAIN_STEPS)
    )
    batches, started = supervised_batches(random.Random(PRETRAIN_SEED)), time.monotonic()
    for step in range(1, PRETRAIN_STEPS + 1):
        token_ids, labels = next(batches)
        logits = model(input_ids=token_ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 200 == 0:
            print(f"step {step}/{PRETRAIN_STEPS} loss {loss.item():.3f} {time.monotonic() - started:.0f} s", flush=True)
    return model


def supervised_batches(rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (token ids, labels), both int64 [rows, tokens], padded right; labels are IGNORED off the solution."""
    tokenizer, held_out = build_tokenizer(), set(draw_data()[1])
    while True:
        drawn = [p for p in (draw_problem(rng, PRETRAIN_TAIL) for _ in range(POOL_PROBLEMS)) if p not in held_out]
        encoded = [(tokenizer.encode(p.prompt), tokenizer.encode(lazy_solution(p, rng) + EOS)) for p in drawn]
        batches = list(cut_by_length(encoded))
        rng.shuffle(batches)
        for batch in batches:
            yield pad_batch(batch, tokenizer.convert_tokens_to_ids(PAD))


def cut_by_length(encoded: list[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Sorted by length and cut into batches of about BATCH_TOKENS; the last few rows may be left out."""
    batch = []
    for prompt, answer in sorted(encoded, key=lambda row: len(row[0]) + len(row[1])):
        batch.append((prompt, answer))
        if len(batch) * (len(prompt) + len(answer)) >= BATCH_TOKENS:
            yield batch
            batch = []


def pad_batch(rows: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, labels) of one batch; see supervised_batches."""
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    token_ids = torch.full((len(rows), width), pad_id)
    labels = torch.full((len(rows), width), IGNORED)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        token_ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return token_ids, labels


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make the quickstart's problems, tokenizer and base model (about 4 minutes on 2 cores).",
        epilog="example: python tools/make_quickstart.py --out /tmp/quickstart",
    )
    parser.add_argument("--out", type=Path, default=OUTPUT, metavar="DIR", help="folder to write to (%(default)s)")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    write_data(out)
    write_model(pretrain(), out / "model")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
