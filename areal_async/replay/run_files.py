"""What a recorded run was made of: its configuration, its data and its model, found again.

What always holds: files count by what is in them, not by where they lie; what isn't the run's any more is refused, with
what to do; options that would change nothing of what is asked here can't be given.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from areal_async import runfiles
from areal_async.config import Config
from areal_async.config_file import Sources, load_config, load_with_sources
from areal_async.controller.resuming import digest_of_data, digest_of_model
from areal_async.errors import ConfigError
from areal_async.rollout.text import Text
from areal_async.rollout.training_data import TrainingData
from areal_async.rollout.training_data import load as load_data
from areal_async.runfiles import CONFIG
from areal_async.specs import server_identity

About: TypeAlias = Mapping[str, str | int | float | bool | None]
"""The note that a run begins with; empty in a log that has none."""


def load_run_config(log: Path, overrides: Sequence[str], allowed: Sequence[str]) -> tuple[Config, Sources]:
    """The configuration beside the log, with overrides of the sections and options `allowed`. Raises ConfigError."""
    path = log.parent / CONFIG
    if not path.is_file():
        raise ConfigError(f"{path}: missing; peers are started by the run's configuration, so name its whole folder")
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(key == name or key.startswith(f"{name}.") for name in allowed):
            raise ConfigError(
                f"command line: replay: {key}: changes nothing of what is asked here; only options of "
                f"{', '.join(allowed)} do"
            )
    return load_with_sources(path, overrides)


def earlier_configs(log: Path, overrides: Sequence[str] = ()) -> list[tuple[Path, Config]]:
    """Those that the run had before a resume that changed it (`config-1.yaml`, …), the first one first."""
    return [(path, load_config(path, overrides)) for path in runfiles.earlier_configs(log.parent).values()]


def load_run_data(config: Config, about: About) -> TrainingData:
    """Its rows and their rendering. Raises ConfigError (DataError) where files are gone, or others than the run's."""
    require_model(Path(config.model.path), about)
    text = Text(config.model.path, config.data.chat_template)
    data = load_data(config, text, server_identity(config, text).context_tokens)
    now = digest_of_data(data)
    if about.get("data.train", now) != now:
        raise ConfigError(
            f"data.train: {', '.join(data.dataset.paths)}: not what the run was trained on ({about['data.train']} "
            f"then, {now} now), so its answers can't be told right from wrong; name the run's files: data.train=PATH"
        )
    return data


def require_model(folder: Path, about: About) -> None:
    """Raises ConfigError unless the model in `folder` is the one that the run began with."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {folder}: holds no config.json; name the run's first model: model.path=DIR")
    if about.get("model.path", digest_of_model(folder)) != digest_of_model(folder):
        raise ConfigError(
            f"model.path: {folder}: not the model that the run began with: its files have changed; name the run's "
            f"first model: model.path=DIR"
        )
