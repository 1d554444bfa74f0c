"""The configurations of a run, the newest first, each with the steps that it was in force for.

What always holds: a run that never resumed changed has the text of its `config.yaml` and nothing else; which steps a
configuration was in force for is told where the log tells it (an older areal-async didn't write it down).
"""

from collections.abc import Iterable
from pathlib import Path

from areal_async.messages import Note, Version
from areal_async.runfiles import CONFIG, earlier_configs


class Configs:
    """Follows a log: which configuration, by its number (`runfiles`), is in force from which step on."""

    def __init__(self) -> None:
        self._number = 0  # 0: the log doesn't say. In force once training has gone back to where it goes on
        self._since: list[tuple[Version, int]] = [(0, 0)]

    def note(self, notes: Iterable[Note]) -> None:
        for note in notes:
            if note.what in ("run", "resumed"):
                number = note.data.get("config")
                self._number = number if isinstance(number, int) else 0
                if note.what == "run":
                    self._since = [(0, self._number)]

    def back(self, to: Version) -> None:
        """Training goes back there, with the configuration that is in force now."""
        self._since = [(since, number) for since, number in self._since if since < to]
        if not self._since or self._since[-1][1] != self._number:
            self._since.append((to, self._number))

    def in_words(self, number: int, newest: int) -> str:
        """For which steps it was in force; "" where the log doesn't say, or wasn't read as far as the newest one."""
        last, present = self._since[-1]
        if present != newest or any(not known for _, known in self._since):
            return ""
        ends = [since for since, _ in self._since[1:]]
        parts = [
            f"steps {since} to {end - 1}" if end - since > 1 else f"step {since}"
            for (since, of), end in zip(self._since, ends, strict=False)
            if of == number
        ]
        if number == newest:
            parts.append(f"step {last} and all after it" if last else "all steps")
        return f", in force for {' and '.join(parts)}" if parts else ", in force for no step that is left"


def configurations(folder: Path, configs: Configs) -> str:
    """As one text, of several YAML documents where there were several. Errors: OSError: one can't be read."""
    newest = (folder / CONFIG).read_text(encoding="utf-8", errors="replace")
    earlier = earlier_configs(folder)
    if not earlier:
        return newest
    last = max(earlier) + 1
    parts = [f"# {CONFIG}, the newest{configs.in_words(last, last)}\n{newest}"]
    for number, path in reversed(earlier.items()):
        text = path.read_text(encoding="utf-8", errors="replace")
        parts.append(f"# {path.name}, before a resume{configs.in_words(number, last)}\n{text}")
    return "---\n".join(parts)
