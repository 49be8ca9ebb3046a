"""Tensors of every type to the GPU and back, indexing, reductions, sorting, random numbers, FFT, linear algebra."""
from common_torch import attempt, close, finish, require, show, start, torch

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn)


def make(dtype, *shape):
    values = torch.randn(shape) * 20
    if dtype == torch.uint8:
        values = values.abs()
    return torch.complex(values, values.flip(0)).to(dtype) if dtype.is_complex else values.to(dtype)


def equal(name, got, expected):
    got = got.cpu()
    same = got.shape == expected.shape and torch.equal(got.contiguous().view(torch.uint8),
                                                       expected.contiguous().view(torch.uint8))
    require(name, same, "differs from the CPU's")


def there_and_back():
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for count in (1, 1000, 1 << 20):
            values = make(dtype, count)
            equal(f"{name} {count}, pageable", values.cuda(), values)
            pinned = values.pin_memory().to("cuda", non_blocking=True)
            back = torch.empty(count, dtype=dtype, pin_memory=True)
            back.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()
            equal(f"{name} {count}, pinned", back, values)
        show(f"{name} there and back", values.cuda())
    empty = torch.empty(0, 3).cuda()
    require("empty", empty.cpu().shape == (0, 3))


def elementwise():
    for dtype in DTYPES[:4]:
        x, y = make(dtype, 100003), make(dtype, 100003)
        name = str(dtype).removeprefix("torch.")
        equal(f"{name} add", x.cuda() + y.cuda(), x + y)
        equal(f"{name} where", torch.where(x.cuda() > 0, x.cuda(), y.cuda()), torch.where(x > 0, x, y))
        show(f"{name} exp", torch.exp(x.cuda() / 50))
        show(f"{name} sin", torch.sin(x.cuda()))
        show(f"{name} fused", torch.addcmul(x.cuda(), x.cuda(), y.cuda(), value=0.5))
    integers = make(torch.int32, 4096)
    equal("int32 shifts", (integers.cuda() << 2) ^ 5, (integers << 2) ^ 5)
    values = make(torch.float32, 999)
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.float64):
        equal(f"cast to {dtype}", values.cuda().to(dtype), values.to(dtype))


def indexing():
    x = make(torch.float32, 300, 200)
    rows = torch.randint(0, 300, (500,))
    on_gpu = x.cuda()
    equal("rows", on_gpu[rows.cuda()], x[rows])
    equal("slices", on_gpu[10:200:3, ::2], x[10:200:3, ::2])
    equal("mask", on_gpu[on_gpu > 3], x[x > 3])
    equal("transpose", on_gpu.T.contiguous(), x.T.contiguous())
    equal("gather", on_gpu.gather(0, rows[:200].cuda().unsqueeze(0)), x.gather(0, rows[:200].unsqueeze(0)))
    changed, expected = on_gpu.clone(), x.clone()
    changed[::2] = 7
    expected[::2] = 7
    equal("assignment", changed, expected)
    changed.index_add_(0, rows.cuda(), on_gpu[rows.cuda()])
    show("index_add", changed)
    equal("cat", torch.cat([on_gpu, on_gpu[:5]]), torch.cat([x, x[:5]]))
    equal("nonzero", torch.nonzero(on_gpu > 40), torch.nonzero(x > 40))
    equal("one hot", torch.nn.functional.one_hot(rows.cuda(), 300), torch.nn.functional.one_hot(rows, 300))
    show("embedding", torch.nn.functional.embedding(rows.cuda(), on_gpu))


def reductions():
    x = make(torch.float32, 1000, 777)
    on_gpu = x.cuda()
    for name, function in (("sum", torch.sum), ("mean", torch.mean), ("amax", torch.amax), ("std", torch.std),
                           ("logsumexp", torch.logsumexp), ("prod", lambda v, dim: torch.prod(v / 20, dim))):
        for dim in (0, 1):
            result = function(on_gpu, dim)
            show(f"{name} {dim}", result)
            close(f"{name} {dim}", result, function(x.double(), dim), 1e-2)
    show("whole sum", on_gpu.sum())
    show("fp16 sum", on_gpu.half().sum())
    equal("argmax", on_gpu.argmax(1), x.argmax(1))
    equal("integer cumsum", on_gpu.to(torch.int64).cumsum(0), x.to(torch.int64).cumsum(0))
    show("softmax", torch.softmax(on_gpu, 1))
    show("layer norm", torch.nn.functional.layer_norm(on_gpu, (777,)))
    equal("any, all", torch.stack([(on_gpu > 1).any(), (on_gpu > 1).all()]), torch.stack([(x > 1).any(), (x > 1).all()]))


def sorting():
    x = make(torch.float32, 50, 20011)
    values, order = x.cuda().sort(dim=1, stable=True)
    expected_values, expected_order = x.sort(dim=1, stable=True)
    equal("sort", values, expected_values)
    equal("order", order, expected_order)
    integers = torch.randint(0, 1000, (1 << 20,))
    equal("long sort", integers.cuda().sort().values, integers.sort().values)
    equal("unique", integers.cuda().unique(), integers.unique())
    equal("topk", x.cuda().topk(10, dim=1).values, x.topk(10, dim=1).values)
    equal("searchsorted", torch.searchsorted(torch.arange(0, 1000, 10).cuda(), integers.cuda()),
          torch.searchsorted(torch.arange(0, 1000, 10), integers))


def random_numbers():
    torch.cuda.manual_seed(99)
    for name, make_values in (("rand", lambda: torch.rand(10007, device="cuda")),
                              ("randn", lambda: torch.randn(10007, device="cuda")),
                              ("randint", lambda: torch.randint(0, 1000, (10007,), device="cuda")),
                              ("randperm", lambda: torch.randperm(10007, device="cuda")),
                              ("bernoulli", lambda: torch.bernoulli(torch.full((10007,), 0.3, device="cuda"))),
                              ("dropout", lambda: torch.dropout(torch.ones(10007, device="cuda"), 0.5, True))):
        show(name, make_values())


def transforms():
    x = torch.randn(64, 1000)
    show("fft", torch.fft.fft(x.cuda()))
    close("fft", torch.fft.fft(x.cuda()), torch.fft.fft(x.double()), 1e-3)
    show("rfft2", torch.fft.rfft2(x.cuda()))
    close("irfft", torch.fft.irfft(torch.fft.rfft(x.cuda())), x, 1e-4)


def linear_algebra():
    torch.manual_seed(5)
    a = torch.randn(96, 96)
    spd = a @ a.T + 96 * torch.eye(96)
    b = torch.randn(96, 7)
    for name, function in (("solve", lambda m, d: torch.linalg.solve(m, d)),
                           ("cholesky", lambda m, d: torch.linalg.cholesky(m)),
                           ("inverse", lambda m, d: torch.linalg.inv(m)),
                           ("eigenvalues", lambda m, d: torch.linalg.eigvalsh(m)),
                           ("singular values", lambda m, d: torch.linalg.svdvals(m)),
                           ("determinant", lambda m, d: torch.linalg.slogdet(m)[1])):
        result = function(spd.cuda(), b.cuda())
        show(name, result)
        close(name, result, function(spd.double(), b.double()), 1e-3)


start()
for part in (there_and_back, elementwise, indexing, reductions, sorting, random_numbers, transforms, linear_algebra):
    attempt(part.__name__, part)
finish()
