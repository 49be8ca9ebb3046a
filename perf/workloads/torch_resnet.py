"""ResNet-50 of torchvision: training, inference at batch 1, inference with copies, replay as a CUDA graph."""
import torch
import torchvision

from measuring import main, workload


def resnet(training):
    torch.manual_seed(1)
    return torchvision.models.resnet50().cuda().train(training)


@workload
def torch_resnet50_train_b64_bf16():
    model = resnet(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(64, 3, 224, 224, device='cuda'), torch.randint(0, 1000, (64,), device='cuda')

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast('cuda', dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return step, 5


@workload
def torch_resnet50_infer_b1():
    model, image = resnet(False), torch.randn(1, 3, 224, 224, device='cuda')

    @torch.no_grad()
    def step():
        model(image)
        torch.cuda.synchronize()
    return step, 10


@workload
def torch_resnet50_infer_b32_copies():
    model, host = resnet(False), torch.randn(32, 3, 224, 224).pin_memory()

    @torch.no_grad()
    def step():
        model(host.to('cuda', non_blocking=True)).cpu()
    return step, 5


@workload
def torch_resnet50_graph_replay():
    model, image = resnet(False), torch.randn(1, 3, 224, 224, device='cuda')
    stream = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(image)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(image)
    return graph.replay, 20


main(torch.cuda.synchronize)
