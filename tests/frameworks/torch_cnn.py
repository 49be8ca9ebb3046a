"""A small convolutional network, trained 20 steps in fp32 and under bf16 autocast."""
from common_torch import attempt, finish, require, show, show_number, start, torch
from torch import nn

STEPS = 20


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1, groups=2), nn.ReLU(), nn.AvgPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.1),
                                        nn.Linear(128, 10))

    def forward(self, images):
        return self.classifier(self.features(images))


def train(name, autocast, channels_last=False):
    torch.manual_seed(7)
    network = Network().cuda()
    if channels_last:
        network = network.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 10, (64,), generator=generator)
    # Images that can be learnt: noise with a pattern of the class in it.
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    images = patterns[labels] + 0.5 * torch.randn(64, 3, 32, 32, generator=generator)
    images, labels = images.cuda(), labels.cuda()
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        show_number(f"{name}, step {step}", losses[-1])
    require(name, losses[-1] < 0.5 * losses[0], f"does not learn: {losses[0]:.3f} to {losses[-1]:.3f}")
    for key, value in network.state_dict().items():
        show(f"{name}, {key}", value)


start()
attempt("fp32", lambda: train("fp32", False))
attempt("bf16 autocast", lambda: train("bf16 autocast", True))
attempt("bf16 autocast, channels last", lambda: train("bf16 autocast, channels last", True, True))
finish()
