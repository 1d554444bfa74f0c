"""Runs to look at in a browser, made by scripted peers in a few seconds: one with everything in it that can go wrong.

    python -m tests.browser.recording FOLDER       from the top of the repository

FOLDER/runs gets `odd` and `plain`. In `odd` the model and the data say what no page may take for markup (`HOSTILE`),
answers are written by several versions, a trainer dies and training goes back, a server is killed, attempts fail,
an evaluation is made. `plain` is a run without any of it. Which answers are under way when new weights come is the
machine's affair: a recording in which the tests would find too little is made again.

A program of its own, since while a browser is driven no event loop can run in that thread.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import uvloop

from areal_async.config import Config
from areal_async.config_file import load_config
from areal_async.controller import Controller
from areal_async.rollout.session import Session
from areal_async.rollout.workflow import Prompt, Sample, SingleTurn
from areal_async.testing.recipes import scripted
from areal_async.testing.small_run import write_small_run
from areal_async.testing.trainer import Die, TrainerOrder
from areal_async.trace.samples import Wanted, read_samples

SCRIPT: Final = "<script>window.hostile='script'</script>"
IMAGE: Final = "<img src=x onerror=\"window.hostile='image'\">"
LINK: Final = "<a href=\"javascript:window.hostile='link'\">here</a>"
OUT: Final = "</td></table></main><h1>out</h1>"
BIDI: Final = "\u202eright to left"
ESCAPE: Final = "\x1b[31mred\x00"
OTHERS: Final = "日本語 😀 &amp; é\n\tnext line"
HOSTILE: Final = (SCRIPT, IMAGE, LINK, OUT, BIDI, ESCAPE, OTHERS)
FIRST_HOSTILE: Final = 70  # token of HOSTILE[0]; neither the prompts nor the end of an answer need it
STEPS: Final = 10
STEP_S: Final = 0.06
TOKEN_S: Final = 0.012  # an answer takes several steps
MOST_SAMPLES: Final = 50  # that fit into the page's table
TRIES: Final = 6
LIMIT_S: Final = 240  # of one
OPTIONS: Final = (
    f"train.steps={STEPS}", "rollout.retries=2", "rollout.max_new_tokens=48", "rollout.stop_token_ids=[]",
    "eval.every_steps=4", "eval.limit=4", "reward.function=own:score",
)  # fmt: skip
REWARD: Final = f'''"""Right where the sum of the characters is even. Why is said in words that must not be markup."""


def score(response: str) -> dict[str, object]:
    return {{"score": sum(map(ord, response)) % 2 == 0, "pred": response[-9:] + {IMAGE!r}, "looked_at": {SCRIPT!r}}}
'''


class Odd(SingleTurn):
    """Every third prompt's answers begin with `HOSTILE`, the second token of them isn't the model's; one attempt in
    five fails."""

    async def run(self, session: Session, prompt: Prompt) -> Sample:
        if session.attempt == 0 and prompt.position % 5 == 4:
            raise RuntimeError(f"the tool at {IMAGE} did not answer at position {prompt.position}")
        sample = await super().run(session, prompt)
        begin = sample.prompt_tokens
        if prompt.position % 3 or len(sample.token_ids) < begin + len(HOSTILE):
            return sample
        token_ids, loss_mask = sample.token_ids.copy(), sample.loss_mask.copy()
        token_ids[begin : begin + len(HOSTILE)] = np.arange(FIRST_HOSTILE, FIRST_HOSTILE + len(HOSTILE))
        loss_mask[begin + 1] = 0
        logprobs = np.where(loss_mask, sample.logprobs, 0).astype(np.float32)
        versions = np.where(loss_mask, sample.versions, -1).astype(np.int32)
        return replace(sample, token_ids=token_ids, loss_mask=loss_mask, logprobs=logprobs, versions=versions)


def hostile_files(folder: Path) -> None:
    """What `write_small_run` wrote, with texts of a hostile model and a hostile data set."""
    place = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(place.read_text())
    vocab = {token: text for text, token in tokenizer["model"]["vocab"].items()}
    vocab |= {FIRST_HOSTILE + number: text for number, text in enumerate(HOSTILE)}
    tokenizer["model"]["vocab"] = {text: token for token, text in sorted(vocab.items())}
    place.write_text(json.dumps(tokenizer))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    (folder / "train.jsonl").write_text("".join(json.dumps({**row, "tests": SCRIPT + OUT}) + "\n" for row in rows))
    (folder / "own.py").write_text(REWARD)


async def odd(config: Config, folder: Path) -> None:
    recipes = scripted(token_s=TOKEN_S, step_s=STEP_S, trainer_orders=[[TrainerOrder("train", Die(), 5)]])
    killed = False
    async with Controller(config, run_dir=folder, recipes=recipes, workflow=Odd()) as run:
        async for row in run.steps():
            if row.step == 7 and not killed:
                killed = True
                child = run._parts._servers._lives["1"].child
                assert child is not None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)


async def plain(config: Config, folder: Path) -> None:
    async with Controller(config, run_dir=folder, recipes=scripted(token_s=TOKEN_S, step_s=STEP_S)) as run:
        await run.run()


async def both(odd_one: Config, plain_one: Config, runs: Path) -> None:
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        group.create_task(odd(odd_one, runs / "odd"))
        group.create_task(plain(plain_one, runs / "plain"))


def suits(log: Path) -> bool:
    """Whether there are answers of two versions with hostile texts, and wrong ones that were cut."""
    found = list(read_samples(log, Wanted(), None, lambda torn: None, lambda nbytes: None))
    mixed = [one for one in found if len({version for version in one.versions or [] if version >= 0}) > 1]
    hostile = [one for one in mixed if (one.response_ids or [0])[0] == FIRST_HOSTILE and one.outcome == "trained"]
    wrong = [one for one in mixed if one.verdict == "wrong" and one.finish == "length"]
    return bool(hostile and wrong) and len(found) <= MOST_SAMPLES


def main(folder: Path) -> None:
    for number in range(TRIES):
        record(folder / str(number))
        if suits(folder / str(number) / "runs" / "odd" / "log"):
            (folder / "runs").symlink_to(folder / str(number) / "runs")
            return
    raise SystemExit(f"{TRIES} recordings, and in none of them what the tests look at: {folder}")


def record(folder: Path) -> None:
    folder.mkdir()
    odd_files, plain_files, runs = folder / "a", folder / "b", folder / "runs"
    for one in (odd_files, plain_files, runs):
        one.mkdir()
    path = write_small_run(odd_files)
    hostile_files(odd_files)
    odd_one = load_config(path, [*OPTIONS, f"data.eval={odd_files}/train.jsonl", f"import_path={odd_files}"])
    plain_one = load_config(write_small_run(plain_files), ["seed=8", "name=plain"])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(both(odd_one, plain_one, runs))
    with (runs / "odd" / "stderr" / "server-0.log").open("a") as file:
        file.write(f"WARNING {SCRIPT} {IMAGE} {ESCAPE}\n")
    with (runs / "odd" / "config.yaml").open("a") as file:
        file.write(f"# {IMAGE}{OUT}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
