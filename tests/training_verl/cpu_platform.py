"""What verl 0.9.1 lacks for a training without any GPU; imported by verl in every process (VERL_USE_EXTERNAL_MODULES).

Only for tests: a platform called "cpu", and two defaults of torch that verl overrides with ones that need a GPU.
Nothing here touches losses, weights, rollouts or checkpoints.
"""

import types
from contextlib import contextmanager

import torch
import torch.distributed.fsdp
from verl.plugin.platform import PlatformBase, PlatformRegistry

MEMORY = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")


def _device_module():
    """torch.cpu with the questions about memory that verl asks of torch.cuda."""
    module = types.ModuleType("cpu_as_device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
    module.__dict__.update({name: lambda *_: 0 for name in MEMORY})
    module.mem_get_info = lambda *_: (0, 0)
    module.get_device_name = lambda *_: "cpu"
    module.set_device = module.empty_cache = module.ipc_collect = lambda *_: None
    module.reset_peak_memory_stats = module.manual_seed = module.manual_seed_all = lambda *_: None
    module.get_rng_state, module.set_rng_state = torch.get_rng_state, torch.set_rng_state
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Ray is told of one GPU that does not exist, so that verl's placement groups stay as they are."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"  # verl moves tensors to it

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False  # weights go to vLLM through shared memory

    def cudart(self):
        return None


class _Unpinned(torch.distributed.fsdp.CPUOffloadPolicy):
    """verl keeps a reference in pinned memory, which only a GPU can give."""

    def __init__(self, pin_memory=False):
        super().__init__(pin_memory=False)


_init_process_group = torch.distributed.init_process_group


def _one_backend(backend=None, *args, **options):
    """verl asks for "cpu:gloo,cpu:gloo": torch refuses a device that is named twice."""
    return _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **options)


torch.distributed.fsdp.CPUOffloadPolicy = _Unpinned
torch.distributed.init_process_group = _one_backend
