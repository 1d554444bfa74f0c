"""Draw docs/lifecycles.md from the tables in areal_async/core/lifecycle.py.

python tools/draw_lifecycles.py            write the page
python tools/draw_lifecycles.py --check    exit 1 if the page is not what the tables say
"""

import sys
from pathlib import Path

from areal_async.core.lifecycle import GROUP, REWARD_WORKER, SAMPLE, SERVER, TRAINER, Lifecycle

PAGE = Path(__file__).resolve().parent.parent / "docs" / "lifecycles.md"
HEAD = """# Life cycles

Groups, samples, servers, reward workers and the trainer are each in exactly one state, and may only go where an arrow
leads; anything else stops the run with the story of the thing. This page is drawn from the tables in
`areal_async/core/lifecycle.py` by `tools/draw_lifecycles.py`: change those, not this.
"""


def draw(lifecycle: Lifecycle) -> str:
    """One section: the essay, and the diagram in Mermaid's notation."""
    arrows = [f"    [*] --> {lifecycle.start}"]
    for state, after in lifecycle.table.items():
        arrows += [f"    {state} --> {following}" for following in after] or [f"    {state} --> [*]"]
    diagram = "\n".join(["```mermaid", "stateDiagram-v2", *arrows, "```"])
    return f"\n## {lifecycle.name.capitalize()}\n\n{lifecycle.essay}\n\n{diagram}\n"


def main(arguments: list[str]) -> int:
    text = HEAD + "".join(draw(lifecycle) for lifecycle in (GROUP, SAMPLE, SERVER, REWARD_WORKER, TRAINER))
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE} is not what the tables say; run python tools/draw_lifecycles.py", file=sys.stderr)
        return 1
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
