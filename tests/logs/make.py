"""The recorded logs in this folder, made anew: only where a rule of the core was changed on purpose.

    python -m tests.logs.make        from the top of the repository

Each is the decision log of a run with scripted peers (`tests/replay/runs.py`), as it was recorded by the areal-async of
its day. They must replay for ever: whoever changes what the core decides, and so what old runs can be resumed by, finds
out here.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Final

from ..replay.runs import make

KEPT: Final = {
    "wait-gone-back-resumed": "wait, gone back and resumed",
    "drop-requeue-gone-back": "drop and requeue, gone back",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        logs = make(tuple(KEPT.values()), Path(scratch), "uvloop")
        for folder, name in KEPT.items():
            place = Path(__file__).parent / folder
            place.mkdir(exist_ok=True)
            shutil.copy(logs[name] / "decisions.log", place)


if __name__ == "__main__":
    main()
