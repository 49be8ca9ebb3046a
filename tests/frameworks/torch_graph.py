"""A CUDA graph: captured by PyTorch, replayed on new inputs; a training step in a graph."""
from common_torch import attempt, close, finish, require, show, show_number, start, torch
from torch import nn


def network():
    torch.manual_seed(21)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()


def warm_up(step):
    """Capture needs everything that is made at first use to be there: three runs on a stream beside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)


def inference(dtype):
    name = f"inference {str(dtype).removeprefix('torch.')}"
    model, held = network().to(dtype), torch.zeros(32, 128, device="cuda", dtype=dtype)
    with torch.no_grad():
        warm_up(lambda: model(held))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(held)
        for turn in range(3):
            fresh = torch.randn(32, 128, generator=torch.Generator().manual_seed(turn)).to(dtype)
            held.copy_(fresh)
            graph.replay()
            show(f"{name}, replay {turn}", output)
            close(f"{name}, replay {turn}", output, model(fresh.cuda()).cpu(), 1e-3)


def training():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(64, 128, generator=generator).cuda()
    labels = torch.randint(0, 10, (64,), generator=generator).cuda()

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    losses = []
    for turn in range(20):
        graph.replay()
        losses.append(loss.item())
        show_number(f"training, replay {turn}", losses[-1])
    require("training", losses[-1] < 0.9 * losses[0], f"does not learn: {losses[0]:.3f} to {losses[-1]:.3f}")
    for key, value in model.state_dict().items():
        show(f"training, {key}", value)


def random_in_graph():
    """The graph's random numbers go on from replay to replay."""
    torch.cuda.manual_seed(77)
    out = torch.zeros(1000, device="cuda")
    warm_up(lambda: out.copy_(torch.rand(1000, device="cuda")))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(torch.rand(1000, device="cuda"))
    before = None
    for turn in range(3):
        graph.replay()
        show(f"random, replay {turn}", out)
        require(f"random, replay {turn}", before is None or not torch.equal(out, before), "repeats itself")
        before = out.clone()


def make_graphed():
    model = network()
    sample = torch.randn(16, 128, generator=torch.Generator().manual_seed(8)).cuda()
    graphed = torch.cuda.make_graphed_callables(model, (sample.clone().requires_grad_(),))
    x = sample.clone().requires_grad_()
    graphed(x).square().sum().backward()
    show("graphed callable, gradient", x.grad)


start()
attempt("inference fp32", lambda: inference(torch.float32))
attempt("inference bf16", lambda: inference(torch.bfloat16))
attempt("training", training)
attempt("random", random_in_graph)
attempt("graphed callable", make_graphed)
finish()
