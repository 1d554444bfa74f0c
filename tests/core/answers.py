"""What answers a command: the event that says it was done, or that it failed.

What always holds: a function of the command and what it is given; nothing is remembered here.
"""

from areal_async.messages import (
    AnyCommand,
    AnyEvent,
    Checkpoint,
    CheckpointDone,
    DataEnded,
    Evaluate,
    EvaluationDone,
    Failed,
    GroupRead,
    Joined,
    Lost,
    Publish,
    Published,
    ReadGroup,
    Restart,
    SampleDone,
    Score,
    Scored,
    StartSample,
    StepDone,
    Swap,
    Swapped,
    Train,
    group_of,
)


def event_of(
    command: AnyCommand, outcome: float | str | None, *, at: float, prompts: int | None, versions: tuple[int, int]
) -> AnyEvent:
    """outcome: see `World.answer`. prompts: how many there are, None for no end. versions: of a sample's oldest and
    newest token."""
    match command:
        case ReadGroup(group=group, position=position):
            if prompts is not None and position >= prompts:
                return DataEnded(at=at, group=group)
            if outcome == "refused":
                return Failed(at=at, of="group", id=str(group), why="too long")
            return GroupRead(at=at, group=group, row=position, prompt_tokens=3)
        case StartSample(sample=sample, attempt=attempt):
            if outcome == "failed":
                return Failed(at=at, of="sample", id=sample, attempt=attempt, why="boom")
            length = 1 + group_of(sample) % 7
            return SampleDone(
                at=at,
                sample=sample,
                attempt=attempt,
                oldest=versions[0],
                newest=versions[1],
                prompt_tokens=3,
                length=length,
                loss_tokens=length,
                finish="stop" if (group_of(sample) + 2 * int(sample.partition(".")[2])) % 3 else "length",
                reward=1.0 if outcome == "given" else None,
            )
        case Score(sample=sample, attempt=attempt):
            reward = outcome if isinstance(outcome, float) else None
            if outcome == "mixed":
                reward = float(sample.partition(".")[2]) % 2
            return Scored(at=at, sample=sample, attempt=attempt, verdict="right", reward=reward)
        case Train(step=step) if outcome == "broken":
            return Failed(at=at, of="train", id=str(step), why="rank 1 timed out")
        case Publish(version=version) if outcome == "broken":
            return Failed(at=at, of="publish", id=str(version), why="rank 1 timed out")
        case Train(step=step, branch=branch):
            return StepDone(at=at, step=step, branch=branch, metrics={})
        case Publish(version=version, branch=branch):
            return Published(at=at, version=version, branch=branch, location=f"{branch}/{version}", nbytes=1)
        case Swap(server=server) if outcome == "failed":
            return Failed(at=at, of="swap", id=server, why="busy")
        case Swap(server=server, version=version, branch=branch):
            return Swapped(at=at, server=server, version=version, branch=branch, pause_s=0.0)
        case Restart(peer=peer, id=name):
            if outcome == "failed":
                return Lost(at=at, peer=peer, id=name, why="exit code 1")
            return Joined(at=at, peer=peer, id=name, version=versions[0] if peer == "trainer" else 0)
        case Checkpoint(version=version) if outcome == "failed":
            return Failed(at=at, of="checkpoint", id=str(version), why="no space left on device")
        case Checkpoint(version=version, branch=branch):
            return CheckpointDone(at=at, version=version, branch=branch, seconds=0.5, nbytes=1)
        case Evaluate(version=version, server=server):
            if outcome == "failed":
                return Failed(at=at, of="evaluation", id=str(version), why="no data")
            return EvaluationDone(at=at, version=version, server=server, score=0.5, n=8, tokens=80, seconds=1.0)
    raise AssertionError(command)
