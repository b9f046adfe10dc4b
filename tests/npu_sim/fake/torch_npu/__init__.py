"""A stand-in for torch_npu: device "npu" on host memory and backend "hccl" over gloo.

`import torch` loads it by itself, as it does the real one (entry point torch.backends), when its
folder is on PYTHONPATH. NPU_SIM_LIBRARY is the compiled part; see npu_build.py.
"""

import atexit
import importlib.machinery
import importlib.util
import os
import sys
import time
import types

import torch
import torch.distributed as dist


def _load():
    loader = importlib.machinery.ExtensionFileLoader("torch_npu._C", os.environ["NPU_SIM_LIBRARY"])
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[loader.name] = module
    return module


_C = _load()
npu = types.ModuleType("torch.npu")  # also reachable as torch_npu.npu


def _autoload():  # the entry point; importing this module has done the work
    pass


def _device_index(device):
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **ids):
        if ids:
            return super().__new__(cls, priority=priority, **ids)
        device = torch.device("npu", _device_index(device))
        return super().__new__(cls, device, priority=priority)

    @property
    def npu_stream(self):
        return self.stream_id


class Event(torch.Event):
    # torch.Event.elapsed_time takes no subclass, so this makes plain ones.
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return torch.Event("npu", enable_timing=enable_timing, blocking=blocking)


class StreamContext:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self.device = torch.accelerator.current_device_index()
        if self.stream is not None:
            self.before = torch.accelerator.current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)  # also changes the device

    def __exit__(self, *exception):
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)
        torch.accelerator.set_device_index(self.device)


class device:
    def __init__(self, device):
        self.index = _device_index(device)

    def __enter__(self):
        self.before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *exception):
        torch.accelerator.set_device_index(self.before)


def current_stream(device=None):
    stream = torch.accelerator.current_stream(_device_index(device))
    return Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def default_stream(device=None):
    kind = torch.accelerator.current_stream().device_type
    return Stream(stream_id=0, device_index=_device_index(device), device_type=kind)


def get_device_properties(device=None):
    return types.SimpleNamespace(name="Ascend910B (simulated)", total_memory=64 << 30)


def _device_api():
    """What torch.npu has besides the classes above."""
    accelerator = torch.accelerator

    def of_device(function):
        return lambda device=None: function(_device_index(device))

    return dict(
        Stream=Stream,
        Event=Event,
        StreamContext=StreamContext,
        stream=StreamContext,
        device=device,
        current_stream=current_stream,
        default_stream=default_stream,
        set_stream=accelerator.set_stream,
        device_count=_C.device_count,
        current_device=accelerator.current_device_index,
        set_device=of_device(accelerator.set_device_index),
        is_available=lambda: _C.device_count() > 0,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        is_current_stream_capturing=lambda: False,
        synchronize=of_device(accelerator.synchronize),
        # Random numbers come from the CPU generator, which torch.manual_seed sets itself.
        manual_seed=torch.default_generator.manual_seed,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.default_generator.get_state(),
        set_rng_state=lambda state, device=None: torch.default_generator.set_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda: True,
        get_device_name=lambda device=None: get_device_properties().name,
        get_device_properties=get_device_properties,
        get_device_capability=lambda device=None: None,  # as in torch_npu
        mem_get_info=lambda device=None: (_free_bytes(), 2**36),
        memory_allocated=of_device(accelerator.memory_allocated),
        max_memory_allocated=of_device(accelerator.max_memory_allocated),
        reset_peak_memory_stats=of_device(accelerator.reset_peak_memory_stats),
        empty_cache=lambda: None,
    )


def _free_bytes():
    return 2**36 - torch.accelerator.memory_reserved()


def _create_hccl(options, backend_options):
    size = options.group_size
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, size, timeout=options.timeout)
    return _C.create_hccl(gloo, options.store, options.group_rank, size)


def _install():
    vars(npu).update(_device_api())
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", npu)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    sys.modules["torch_npu.npu"] = npu
    dist.Backend.register_backend("hccl", _create_hccl, extended_api=True, devices=["npu"])
    dist.is_hccl_available = lambda: True
    # Autograd's device thread drops the last references to Python objects a moment after backward()
    # has returned. If the interpreter finalises meanwhile, taking the GIL ends the thread inside a
    # noexcept frame and aborts the process.
    atexit.register(time.sleep, 0.05)


_install()
