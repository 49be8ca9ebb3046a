"""A transformer block with scaled-dot-product attention, forward and backward, in fp32 and bf16, by every backend."""
from common_torch import attempt, close, finish, require, show, show_number, start, torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, HEADS, LENGTH, BATCH = 256, 4, 128, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (part.view(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)
                   for part in self.qkv(self.before(x)).chunk(3, dim=-1))
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.mlp(self.after(x))


def block(name, backend, dtype, tolerance):
    torch.manual_seed(11)
    on_cpu, on_gpu = Block(), Block()
    on_gpu.load_state_dict(on_cpu.state_dict())
    on_gpu = on_gpu.to("cuda", dtype)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    input_cpu, input_gpu = x.clone().requires_grad_(), x.to("cuda", dtype).requires_grad_()
    with sdpa_kernel(backend):
        output = on_gpu(input_gpu)
        loss = output.float().square().mean()
        loss.backward()
    show(f"{name}, output", output)
    show_number(f"{name}, loss", loss.item())
    show(f"{name}, gradient of the input", input_gpu.grad)
    for key, parameter in on_gpu.named_parameters():
        show(f"{name}, gradient of {key}", parameter.grad)
    expected = on_cpu(input_cpu)
    expected.square().mean().backward()
    close(f"{name}, output", output, expected, tolerance)
    close(f"{name}, gradient", input_gpu.grad, input_cpu.grad, tolerance)


def cudnn_attention(name, dtype, tolerance):
    """Forward alone: PyTorch counts cuDNN's backward among the algorithms that are not deterministic."""
    torch.manual_seed(13)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, 64).to(dtype) for _ in range(3))
    torch.use_deterministic_algorithms(False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = nn.functional.scaled_dot_product_attention(q.cuda(), k.cuda(), v.cuda(), is_causal=True)
    torch.use_deterministic_algorithms(True)
    show(name, output)
    close(name, output, nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True),
          tolerance)


def training(name, dtype):
    """Some steps of AdamW under autocast, as language models are trained."""
    torch.manual_seed(12)
    network = Block().cuda()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    x, target = torch.randn(BATCH, LENGTH, WIDTH).cuda(), torch.randn(BATCH, LENGTH, WIDTH).cuda()
    losses = []
    for step in range(10):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss = nn.functional.mse_loss(network(x), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        show_number(f"{name}, step {step}", losses[-1])
    require(name, losses[-1] < losses[0], "does not learn")


start()
for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 1e-1), (torch.float16, 2e-2)):
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION):
        if dtype == torch.float32 and backend == SDPBackend.FLASH_ATTENTION:
            continue  # it has no fp32
        name = f"{backend.name.lower()} {str(dtype).removeprefix('torch.')}"
        attempt(name, lambda: block(name, backend, dtype, tolerance))
    if dtype != torch.float32:
        name = f"cudnn_attention {str(dtype).removeprefix('torch.')}"
        attempt(name, lambda: cudnn_attention(name, dtype, tolerance))
attempt("training fp32", lambda: training("training fp32", torch.float32))
attempt("training bf16", lambda: training("training bf16", torch.bfloat16))
finish()
