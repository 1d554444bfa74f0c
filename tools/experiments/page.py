"""Puts docs/experiments.md together from the parts that the experiments wrote: `python tools/experiments/page.py`."""

from charts import OUTPUT, ROOT

HEAD = """# Experiments

Made by `tools/experiments/page.py` from the output of the scripts beside it; numbers, charts and sentences come from
their runs. `tools/bench/all.sh` runs them again.

"""


def main() -> None:
    parts = [path.read_text() for path in sorted(OUTPUT.glob("*.part.md"))]
    (ROOT / "docs" / "experiments.md").write_text(HEAD + "\n".join(parts))


if __name__ == "__main__":
    main()
