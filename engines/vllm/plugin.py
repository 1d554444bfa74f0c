"""The vLLM plug-in `areal_file`: weights come to the server through a safetensors file, in shared memory or on a
shared disk.

vLLM loads it in each of its processes through the entry point group `vllm.general_plugins`; the server is started with
`--weight-transfer-config '{"backend": "areal_file"}'`. Requests, in order:
  `/init_weight_transfer_engine {"init_info": {"path": P}}`  compare P's header with the model; touches no weight
  `/start_weight_update`, `/update_weights {"update_info": {"path": P}}`, `/finish_weight_update`

What always holds: a file is compared by names, shapes and dtypes before anything of it is loaded; one file holds the
whole model; after the finish every layer, the output layer included, computes with the new weights; the file is not
needed any more once `/finish_weight_update` has answered.

With tensor parallelism each worker maps the same file and loads its shard. On a GPU the copy to the device is done by
the model's own weight loaders.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from safetensors import safe_open
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from areal_async.engines.vllm import cpu_seeds
from areal_async.engines.vllm.manifest import Expected, ManifestError, compare, expected_by, manifest_of

BACKEND: Final = "areal_file"


def register() -> None:
    """Make `areal_file` known to vLLM. Called once by each vLLM process that loads plug-ins."""
    WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)


@dataclass
class FileInit(WeightTransferInitInfo):
    """path: the safetensors file to compare with the model."""

    path: str


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """path: the safetensors file to load; the whole model, in the server's dtype, under Hugging Face names."""

    path: str


class FileEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads the weights of a safetensors file through the model's own `load_weights`."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        """Made by vLLM in each worker, once its model is loaded."""
        super().__init__(config, vllm_config, device, model)
        if device.type == "cpu":
            cpu_seeds.install()  # swaps are what makes this happen

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Compare the file's header with the model. Raises ManifestError; the model isn't touched."""
        self._check(init_info.path)

    def start_weight_update(self) -> None:
        """Put the layers into loading state. The CPU worker has packed its weights and emptied the originals."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        # Named before the layers are opened: then a tied output layer still is the embedding, and counts once.
        self._to_load = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As in the base class, which however synchronizes an accelerator that a CPU server doesn't have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the file. Raises ManifestError if it doesn't fit, or if a parameter got no weight from it."""
        self._check(update_info.path)
        with safe_open(update_info.path, framework="pt") as file:
            loaded = self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        if loaded is not None and (left := sorted(self._to_load - set(loaded))):
            raise ManifestError(f"{update_info.path}: no weight in it for {', '.join(left)}; restart this server")

    def finish_weight_update(self) -> None:
        """Close the layers and repack what vLLM would leave as it was."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type != "cpu":
            return
        # A tied output layer gets no weight of its own, so nothing above repacks it: it would go on computing with a
        # packed copy of the old embedding, and nothing would fail.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held between two updates."""

    def _check(self, path: str) -> None:
        compare(path, manifest_of(path), self._expected)

    @cached_property
    def _expected(self) -> Expected:
        return expected_by(self.model_config.hf_config, self.model_config.dtype)
