"""vLLM's worker on a CPU as verl needs it: weights stay where new ones can be copied into them. Only for tests.

vLLM's CPU build packs the weights of linear layers and throws the originals away, so that verl's transfer finds none.
"""

import torch
import vllm.model_executor.layers.utils as layers
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def _unpacked(layer, remove_weight):
    layer.cpu_linear = torch.nn.functional.linear


layers.dispatch_cpu_unquantized_gemm = _unpacked


class Extension(vLLMColocateWorkerExtension):
    """verl's own; importing this module is what matters."""
