"""The weights of a version of a recorded run, as a model's folder that a server can be started from.

What always holds: weights are named by their version only while that name means the same ones: those of a branch that
training left have lost it. Nothing is written into the run's folder.

At hand are version 0 (the model that the run began with), the versions of complete checkpoints (their float32 weights,
put into a folder of its own), and the last one, if the run has saved it.
"""

import shutil
from pathlib import Path
from typing import Final

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from areal_async.config import Config
from areal_async.controller import checkpoints
from areal_async.errors import ConfigError, LogError
from areal_async.messages import Version
from areal_async.replay.finished import Finished
from areal_async.replay.run_files import require_model

TRAINER_INDEX: Final = "trainer.json"
WEIGHT: Final = "weight/"  # before a parameter's name, in a checkpoint's files
MODEL_WEIGHTS: Final = (".safetensors", ".bin", ".index.json")  # the files of a model that hold its weights


class _Index(msgspec.Struct):
    """The part of `trainer.json` (engines.deepspeed.checkpoint) that is needed: how many files there are."""

    version: Version
    ranks: int


def folder_of(version: Version, model: Path | None, root: Path, config: Config, finished: Finished, work: Path) -> Path:
    """A model's folder with the weights of `version`. model: given by the user, who answers for it. root: of the run.
    work: an empty folder. Errors: ConfigError, with the versions that are at hand; LogError for a broken checkpoint."""
    if model is not None:
        if not (model / "config.json").is_file():
            raise ConfigError(f"command line: --model: {model} holds no config.json; name a model's folder")
        return model.resolve()
    if version == 0:
        require_model(Path(config.model.path), finished.about)
        return Path(config.model.path)
    if version in (at_hand := _checkpoints(root, finished)):
        return _of_checkpoint(checkpoints.folder_of(root / "checkpoints", version), Path(config.model.path), work)
    saved = root / "model"
    has_saved = (saved / "config.json").is_file()
    if has_saved and version == finished.version:
        return saved
    there = ["0 (model.path)", *(f"{v} (checkpoint)" for v in at_hand)]
    there += [f"{finished.version} ({saved})"] * has_saved
    raise ConfigError(
        f"command line: --version {version}: its weights are not at hand; those of {', '.join(there)} are; or name a "
        f"folder that has them: --model DIR"
    )


def _checkpoints(root: Path, finished: Finished) -> list[Version]:
    """Whole ones, of the branch that the run went on with."""
    found = []
    for folder in (root / "checkpoints").glob("step-*"):
        state = checkpoints.read_state(folder)
        if state is not None and finished.branches.get(state.version) == state.branch:
            found.append(state.version)
    return sorted(found)


def _of_checkpoint(checkpoint: Path, first: Path, work: Path) -> Path:
    """first: the run's first model, for all but the weights."""
    try:
        index = msgspec.json.decode((checkpoint / TRAINER_INDEX).read_bytes(), type=_Index)
        files: dict[str, str] = {}
        for rank in range(index.ranks):
            name = f"model-{rank}.safetensors"
            with safe_open(checkpoint / f"trainer-{rank}.safetensors", "np") as file:
                keys = [key for key in file.keys() if key.startswith(WEIGHT)]  # noqa: SIM118  it isn't iterable
                tensors = {key.removeprefix(WEIGHT): file.get_tensor(key) for key in keys}
            save_file(tensors, work / name, {"format": "pt"})
            files |= dict.fromkeys(tensors, name)
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise LogError(f"{checkpoint}: its weights can't be read: {error}") from error
    (work / "model.safetensors.index.json").write_bytes(msgspec.json.encode({"metadata": {}, "weight_map": files}))
    for path in first.iterdir():
        if path.is_file() and not path.name.endswith(MODEL_WEIGHTS):
            shutil.copyfile(path, work / path.name)
    return work
