"""Matrix products in every type PyTorch multiplies on a GPU, single, batched and as a linear layer."""
from common_torch import attempt, close, finish, show, start, torch

SIZE = 2048


def matrices(dtype, *shapes):
    """Seeded on the CPU, so that both sides of a comparison have the same numbers."""
    made = []
    for shape in shapes:
        if dtype == torch.int8:
            made.append(torch.randint(-8, 9, shape, dtype=dtype))
        else:
            made.append(torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype))
    return made


def reference(a, b):
    wide = torch.complex128 if a.is_complex() else torch.float64
    return a.to(wide) @ b.to(wide)


def product(name, dtype, tolerance, size=SIZE):
    def body():
        a, b = matrices(dtype, (size, size), (size, size))
        result = a.cuda() @ b.cuda()
        show(name, result)
        close(name, result[:64], reference(a[:64], b), tolerance)
    attempt(name, body)


def tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    product("tf32", torch.float32, 1e-1)
    torch.backends.cuda.matmul.allow_tf32 = False


def integers():
    a, b = matrices(torch.int8, (SIZE, SIZE), (SIZE, SIZE))
    result = torch._int_mm(a.cuda(), b.cuda())
    show("int8", result)
    close("int8", result[:64], reference(a[:64], b), 0)


def batched(dtype, tolerance):
    name = f"batched {str(dtype).removeprefix('torch.')}"

    def body():
        a, b = matrices(dtype, (16, 256, 128), (16, 128, 192))
        result = torch.bmm(a.cuda(), b.cuda())
        show(name, result)
        close(name, result, reference(a, b), tolerance)
    attempt(name, body)


def linear(dtype, tolerance):
    name = f"linear {str(dtype).removeprefix('torch.')}"

    def body():
        x, weight, bias = matrices(dtype, (16, 768), (2304, 768), (2304,))
        result = torch.nn.functional.linear(x.cuda(), weight.cuda(), bias.cuda())
        show(name, result)
        close(name, result, torch.nn.functional.linear(x.double(), weight.double(), bias.double()), tolerance)
        activated = torch.nn.functional.gelu(result, approximate="tanh")
        show(name + ", GELU", activated)
    attempt(name, body)


def vectors():
    a, x = matrices(torch.float32, (1000, 700), (700,))
    show("matrix and vector", a.cuda() @ x.cuda())
    show("addmm", torch.addmm(torch.ones(1000, 1000, device="cuda"), a.cuda(), a.cuda().T, beta=0.5, alpha=2))
    show("einsum", torch.einsum("ij,kj->ik", a.cuda(), a.cuda()[:50]))


start()
product("fp32", torch.float32, 1e-3)
product("fp64", torch.float64, 1e-11)
attempt("tf32", tf32)
product("fp16", torch.float16, 5e-2)
product("bf16", torch.bfloat16, 2e-1)
attempt("int8", integers)
product("complex64", torch.complex64, 1e-3, 512)
product("complex128", torch.complex128, 1e-11, 256)
for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-11), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)):
    batched(dtype, tolerance)
    linear(dtype, tolerance)
attempt("vectors", vectors)
finish()
