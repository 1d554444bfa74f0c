"""Does the environment import? Run by `make` after an install; exit 1 with the reason and what to do.

The usual trap: a torchvision, torchaudio or torchcodec that was built for another torch. It fails on import, and
transformers, which tries them, then fails in places that don't name them.
"""

import importlib
import importlib.metadata
import sys

MODULES = ("torch", "transformers.models.llama", "deepspeed", "vllm.distributed.weight_transfer.base")


def main() -> int:
    plugins = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "areal_async" not in plugins:
        print(
            "areal-async is not installed here (its vLLM plug-in isn't registered): pip install -e .", file=sys.stderr
        )
        return 1
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever it is, it is what the user has to see
            print(f"{name} does not import: {type(error).__name__}: {error}", file=sys.stderr)
            print(
                "If torchvision, torchaudio or torchcodec is named above: pip uninstall torchvision torchaudio "
                "torchcodec (nothing here uses them). Otherwise: make clean && make env.",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
