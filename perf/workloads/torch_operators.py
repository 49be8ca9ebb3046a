"""Small and large operators of PyTorch, and copies: what a launch, a wait and a byte cost."""
import time

BEGIN = time.perf_counter()
import torch

from measuring import WORKLOADS, main, workload

begin = time.perf_counter()
torch.zeros(1, device='cuda').item()
print(f'torch-first-cuda-call {time.perf_counter() - begin:.6e}', flush=True)


@workload
def torch_add_1024():
    a = torch.zeros(1024, device='cuda')
    return lambda: a.add_(1), 2000


@workload
def torch_item():
    a = torch.zeros(1024, device='cuda')
    return lambda: a[0].item(), 300


def copy(name, pinned, to_device):
    def prepare():
        device = torch.empty(256 << 20, dtype=torch.uint8, device='cuda')
        host = torch.ones(256 << 20, dtype=torch.uint8, pin_memory=pinned)
        return (lambda: device.copy_(host)) if to_device else (lambda: host.copy_(device)), 1
    WORKLOADS[name] = prepare


for kind in ('pinned', 'pageable'):
    copy(f'torch-h2d-256MiB-{kind}', kind == 'pinned', True)
    copy(f'torch-d2h-256MiB-{kind}', kind == 'pinned', False)


@workload
def torch_sgemm_4096():
    a = torch.randn(4096, 4096, device='cuda')
    return lambda: a @ a, 5


@workload
def torch_fft2_4096():
    a = torch.randn(4096, 4096, device='cuda')
    return lambda: torch.fft.fft2(a), 20


main(torch.cuda.synchronize)
