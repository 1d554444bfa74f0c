"""Logs of runs that nobody had: finished answers with their verdicts, written as a run writes them."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal_async.config_file import load_config
from areal_async.controller.resuming import digest_of_data, digest_of_model
from areal_async.log.writer import RunLog
from areal_async.messages import GroupRead, Note, SampleDone, Scored, Verdict, Woke, group_of
from areal_async.messages.records import AnyRecord
from areal_async.rollout.text import Text
from areal_async.rollout.training_data import load
from areal_async.rollout.workflow import Sample

NOWHERE = 1 << 30


@dataclass(frozen=True)
class Said:
    """An answer to write. scored: (verdict, reward); None: it was never checked. reward: of its workflow."""

    sample: str
    tokens: Sequence[int]
    scored: tuple[Verdict, float | None] | None = ("right", 1.0)
    attempt: int = 0
    versions: Sequence[int] = (0,)
    logprobs: Sequence[float] = (-0.5,)
    prompt: Sequence[int] = (16, 10, 16, 28)
    reward: float | None = None

    def whole(self) -> Sample:
        before, after = len(self.prompt), len(self.tokens)
        return Sample(
            np.array([*self.prompt, *self.tokens], np.int32),
            np.repeat(np.array([0, 1], np.uint8), [before, after]),
            np.array([0.0] * before + list(_filled(self.logprobs, after)), np.float32),
            np.array([-1] * before + list(_filled(self.versions, after)), np.int32),
            before,
            "stop",
        )


def _filled(values: Sequence[float], n: int) -> list[float]:
    return [*values, *[values[-1]] * (n - len(values))]


def write_log(
    config: Path, run: Path, records: Sequence[Said | AnyRecord], segment_bytes: int = NOWHERE, about: bool = True
) -> Path:
    """The log folder of a run in `run`, with the configuration beside it. Groups have the row of their number."""
    settings = load_config(config)
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(config.read_text())
    with closing(RunLog(run / "log", segment_bytes)) as log:
        log.append(settings.rules)
        if about:
            data = load(settings, Text(settings.model.path, settings.data.chat_template), 512)
            known = {"model.path": digest_of_model(Path(settings.model.path)), "data.train": digest_of_data(data)}
            log.append(Note(at=0.0, what="run", data={"name": "written", **known}))
        log.append(Woke(at=0.0))
        read = set()
        for record in records:
            if not isinstance(record, Said):
                log.append(record)
                continue
            if (group := group_of(record.sample)) not in read:
                read.add(group)
                log.append(GroupRead(at=0.0, group=group, row=group, prompt_tokens=len(record.prompt)))
            _write(log, record)
        log.flush()
    return run / "log"


def _write(log: RunLog, said: Said) -> None:
    sample = said.whole()
    drawn = sample.versions[sample.loss_mask != 0]
    arrays = [sample.token_ids, sample.loss_mask, sample.logprobs, sample.versions]
    done = SampleDone(
        at=0.0, sample=said.sample, attempt=said.attempt, oldest=int(drawn.min()), newest=int(drawn.max()),
        prompt_tokens=sample.prompt_tokens, length=len(drawn), loss_tokens=len(drawn), finish="stop",
        reward=said.reward,
    )  # fmt: skip
    log.append(done, log.put(said.sample, said.attempt, arrays))
    if said.scored is not None:
        verdict, reward = said.scored
        log.append(Scored(at=0.0, sample=said.sample, attempt=said.attempt, verdict=verdict, reward=reward))
