"""What a run keeps in its folder for people, beside log and metrics, and how it is read.

    config.yaml              the newest configuration. They are numbered from 1 on; a resume that changes it keeps the
                             one before, of number N, as `config-N.yaml`. The log's note at the run's beginning, and at
                             each resume, has the number of the one that is in force from there on (`config`)
    checks.jsonl             a line for each check of an answer that ended: a `Check`, as JSON
    prox/step-000012.npz     log π_prox of what step 12 trained. A zip file, not compressed, as numpy.savez writes them:
                             `numpy.load(path)["17.3"]`, float32, one number for each response token of sample 17.3 (as
                             its arrays in the log without those of the prompt); NaN where nobody has it: tokens that
                             aren't trained, and with the objective `ppo` all but the first minibatch. In `about.json`
                             of the zip file: `About`, as JSON

What always holds: reading changes nothing, and may be done while the run goes on; a file of prox/ is whole or isn't
there, and its content has checksums; nothing else of a run needs these files, so a lost or damaged one harms nothing.
"""

import contextlib
import io
import re
import zipfile
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.errors import LogError
from areal_async.messages import SampleId, Verdict

CONFIG: Final = "config.yaml"
METRICS: Final = "metrics.jsonl"
EVALUATIONS: Final = "eval/results.jsonl"
CHECKS: Final = "checks.jsonl"
PROX: Final = "prox"
ABOUT: Final = "about.json"
READ_BYTES: Final = 1 << 20  # of checks.jsonl, in one call; a line has at most 32 kB

LogProbs: TypeAlias = npt.NDArray[np.float32]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """at: run clock, seconds. why: for people (of a crash the traceback's end), at most 4,000 characters. extracted:
    what was taken as the answer, at most 1,000. seconds: of the check. A check that was made again, since the run was
    resumed before its verdict was in the log, has two lines; the later one counts."""

    sample: SampleId
    attempt: int
    at: float
    verdict: Verdict
    reward: float | None
    why: str = ""
    extracted: str = ""
    seconds: float = 0.0


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Of a file in prox/. branch: on which the step was trained. attempts: of each sample of the step, in its order."""

    step: int
    branch: int
    attempts: dict[SampleId, int]


_EARLIER: Final = re.compile(r"config-([1-9][0-9]{0,8})\.yaml")
_ARRAY: Final = b"\x93NUMPY"  # how it begins
_CHECK: Final = msgspec.json.Decoder(Check)
_ABOUT: Final = msgspec.json.Decoder(About)


def earlier_configs(folder: Path) -> dict[int, Path]:
    """Those before a resume that changed it, by their numbers, in order."""
    found = {int(match[1]): path for path in folder.glob("config-*.yaml") if (match := _EARLIER.fullmatch(path.name))}
    return dict(sorted(found.items()))


def config_path(folder: Path, number: int) -> Path:
    """Of the configuration with that number; the file may not be there."""
    earlier = earlier_configs(folder)
    newest = max(earlier, default=0) < number
    return folder / CONFIG if newest else earlier.get(number, folder / f"config-{number}.yaml")


def read_checks(folder: Path, since: int = 0) -> tuple[list[Check], int]:
    """Checks from byte `since` of the run's checks.jsonl on, and the byte for the next call; that byte is `since`
    again where nothing new is there. At most READ_BYTES are read. A last line that isn't whole comes when it is; a
    line that is none (a disk lost it) is left out. Raises OSError, but not for a file that isn't there."""
    try:
        with (folder / CHECKS).open("rb") as file:
            file.seek(since)
            data = file.read(READ_BYTES)
    except FileNotFoundError:
        return [], since
    end = data.rfind(b"\n") + 1
    if not end and len(data) == READ_BYTES:
        end = READ_BYTES  # no line is as long: nothing in here is one
    found = []
    for line in data[:end].split(b"\n"):
        with contextlib.suppress(msgspec.DecodeError):
            found.append(_CHECK.decode(line))
    return found, since + end


def prox_path(folder: Path, step: int) -> Path:
    """Of the run in `folder`; the file may not be there."""
    return folder / PROX / f"step-{step:06d}.npz"


def prox_steps(folder: Path) -> list[int]:
    """Steps of which there is a file, in order."""
    names = (path.stem.removeprefix("step-") for path in (folder / PROX).glob("step-*.npz"))
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


def prox_about(folder: Path, step: int) -> About | None:
    """What the file of a step is about; None: there is none. Raises LogError: it is damaged."""
    path = prox_path(folder, step)
    data = _member(path, ABOUT)
    try:
        return None if data is None else _ABOUT.decode(data)
    except msgspec.DecodeError as error:
        raise _damaged(path, error) from None


def prox_of(folder: Path, step: int, sample: SampleId) -> LogProbs | None:
    """log π_prox of each response token of a sample that `step` trained, NaN where nobody has it; None: it wasn't kept,
    or was removed with the arrays of the step. Raises LogError: the file is damaged."""
    path = prox_path(folder, step)
    data = _member(path, f"{sample}.npy")
    if data is None:
        return None
    try:
        # of a zip file or a pickle, numpy.load would try to make something else
        found = np.load(io.BytesIO(data), allow_pickle=False) if data.startswith(_ARRAY) else None
    except (ValueError, EOFError, MemoryError) as error:
        raise _damaged(path, error) from None
    if not isinstance(found, np.ndarray) or found.dtype != np.float32 or found.ndim != 1:
        raise _damaged(path, ValueError(f"sample {sample} is no row of float32"))
    return found


def _member(path: Path, name: str) -> bytes | None:
    try:
        with zipfile.ZipFile(path) as file:
            member = file.getinfo(name)
            if member.compress_type != zipfile.ZIP_STORED:  # we write none that grows when it is read
                raise zipfile.BadZipFile(f"{name} is compressed")
            return file.read(member)
    except (FileNotFoundError, KeyError):
        return None
    except (OSError, EOFError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> LogError:
    return LogError(f"{path}: can't be read: {error}; nothing but this display needs it, so it may be deleted")
