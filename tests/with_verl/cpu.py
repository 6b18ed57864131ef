"""verl on a CPU, for tests: a platform, the FSDP engine on it, and the rollout server of cpu_rollout.py.

Loaded in every process by VERL_USE_EXTERNAL_MODULES; uses verl's own registries only.
"""

from __future__ import annotations

import contextlib
import types

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(types.ModuleType):
    """torch.cpu, with answers to what only a GPU is asked."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name)


device = _Device("cpu_as_device")
for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all"):
    setattr(device, name, lambda *_: None)
for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "current_device"):
    setattr(device, name, lambda *_: 0)
device.set_device = device.synchronize = lambda *_: None
device.mem_get_info = lambda *_: (8 << 30, 16 << 30)
device.is_available, device.device_count = lambda: True, lambda: 1
device.get_rng_state, device.set_rng_state = (
    lambda *_: torch.get_rng_state(),
    lambda state, *_: torch.set_rng_state(state),
)
device.get_device_name = lambda *_: "cpu"


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: device)

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, index):
        pass

    def synchronize(self, index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "GPU"

    def ray_resource_options(self, count):
        return {}

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def rollout_env_vars(self):
        return {}

    @contextlib.contextmanager
    def nvtx_range(self, message):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def cudart(self):
        return None


_init_process_group = torch.distributed.init_process_group


def _with_one_backend(backend=None, *args, **options):
    """verl asks for one backend a device, and here both are the CPU."""
    return _init_process_group("gloo" if backend and "gloo" in backend else backend, *args, **options)


torch.distributed.init_process_group = _with_one_backend
torch.Tensor.pin_memory = lambda tensor, *_: tensor  # verl keeps a reference model in pinned memory


def _replica():
    from cpu_rollout import Replica

    return Replica


def _register() -> None:
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.rollout import base, replica

    base._ROLLOUT_REGISTRY[("cpu", "async")] = "cpu_rollout.Adapter"
    replica.RolloutReplicaRegistry.register("cpu", _replica)
    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)


_register()
