"""Kernels that nvcc compiled, launched by their host code, run by their twins."""

import ctypes

import cuda_sim
import pytest
import torch
from ranks import Pool


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def axpy(library, x, y, a):
    bf16 = int(x.dtype == torch.bfloat16)
    n = ctypes.c_int64(x.numel())
    return library.launch_axpy(pointer(x), pointer(y), ctypes.c_float(a), n, bf16, stream())


def template_in_unnamed_namespace(path):
    library = ctypes.CDLL(path)
    cuda_sim.reset_counters()
    for dtype in (torch.float32, torch.bfloat16):
        x, y = torch.randn(10_007).to(dtype), torch.randn(10_007)
        y_cuda = y.cuda()
        assert axpy(library, x.cuda(), y_cuda, 2.0) == 0
        assert torch.equal(y_cuda.cpu(), y + 2.0 * x.float())
    return cuda_sim.counters()["launches"]


def static_kernel_with_shuffles(path):
    library = ctypes.CDLL(path)
    x = torch.randn(5000)
    x_cuda, out = x.cuda(), torch.empty(1, dtype=torch.float64, device="cuda")
    n = ctypes.c_int64(x.numel())
    assert library.launch_sum_of_squares(pointer(x_cuda), pointer(out), n, stream()) == 0
    assert abs(out.item() - x.double().square().sum().item()) < 1e-9 * x.numel()


def dynamic_shared_memory_and_barriers(path):
    library = ctypes.CDLL(path)
    x = torch.randint(0, 100, (1000,), dtype=torch.int32).cuda()
    y = torch.empty_like(x)
    assert library.launch_reverse_scan(pointer(x), pointer(y), 1000, stream()) == 0
    assert torch.equal(y.cpu().flip(0), x.cpu().cumsum(0).int())


def freed_memory(path):
    x, y = torch.ones(100).cuda(), torch.ones(100).cuda()
    address = ctypes.c_void_p(x.data_ptr())
    del x  # without the caching allocator, this is a cudaFree
    arguments = (address, pointer(y), ctypes.c_float(1), ctypes.c_int64(100), 0, stream())
    ctypes.CDLL(path).launch_axpy(*arguments)
    torch.cuda.synchronize()


def host_memory(path):
    axpy(ctypes.CDLL(path), torch.ones(100), torch.ones(100).cuda(), 1.0)
    torch.cuda.synchronize()


def plain(path):
    assert axpy(ctypes.CDLL(path), torch.ones(100).cuda(), torch.ones(100).cuda(), 1.0) == 0


def test_names_of_templates_match(both_gpus, kernels):
    launches = both_gpus(1, template_in_unnamed_namespace, kernels)[0]
    assert len(launches) == 2
    assert set(launches.values()) == {1}


@pytest.mark.parametrize("case", [static_kernel_with_shuffles, dynamic_shared_memory_and_barriers])
def test_values(both_gpus, kernels, case):
    both_gpus(1, case, kernels)


@pytest.mark.parametrize(
    ("case", "has_twin", "message"),
    [
        (freed_memory, True, "in freed device memory"),
        (host_memory, True, "in no live device or pinned allocation"),
        (plain, False, "no CPU twin of kernel"),
    ],
)
def test_wrong_launches_are_found(pool_options, kernels, capfd, case, has_twin, message):
    env = {**pool_options["env"], "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if not has_twin:
        env["CUDA_SIM_TWINS"] = ""
    pool = Pool(1, **{**pool_options, "env": env})
    assert pool.outcomes(case, kernels)[0].kind == ("died" if has_twin else "raised")
    pool.close(0.0)
    assert message in capfd.readouterr().err
