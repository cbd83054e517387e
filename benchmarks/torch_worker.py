"""Runs one variant in PyTorch: `python -m benchmarks.torch_worker REQUEST`.

This module runs in an environment that has torch and no JAX. The models are those of
`benchmarks.models`, built from layers that Opacus and FastDP support.
"""

import os

import torch
from torch import nn

from benchmarks.serve import serve

L2_CLIP_NORM = 1.0
LEARNING_RATE = 0.1
NOISE_MULTIPLIER = 1.0


def mlp(width=256):
    """Returns a 784-width-10 ReLU network."""
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def cnn(channels=32):
    """Returns a CNN: three 3×3 convolutions with mean pooling and two dense layers."""
    sizes = [3, channels, 2 * channels, 4 * channels]
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    dense = [nn.Linear(64 * channels, 7 * channels), nn.ReLU(), nn.Linear(7 * channels, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *dense)


class Block(nn.Module):
    """A pre-norm block with causal attention of 4 heads."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            f(y).view(batch, length, 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(2, 3) / (width // 4) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, -1e9).softmax(-1) @ v
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        gelu = nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(gelu)


class Transformer(nn.Module):
    """A causal language model; its logits are (batch, length, vocabulary)."""

    def __init__(self, length=64, width=256, layers=4, vocabulary=512):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        x = self.tokens(tokens) + self.positions(positions)
        return self.output(self.norm(self.blocks(x)))


MODELS = {
    "mlp": mlp,
    "wide_mlp": lambda width=4096: mlp(width),
    "cnn": cnn,
    "transformer": Transformer,
}


def make_batch(model, size, options):
    """Returns random examples with labels."""
    if model == "transformer":
        tokens = torch.randint(
            options.get("vocabulary", 512), (size, options.get("length", 64) + 1)
        )
        # Opacus reads embedded tokens with `view`.
        return tokens[:, :-1].contiguous(), tokens[:, 1:]
    shape = (3, 32, 32) if model == "cnn" else (784,)
    return torch.randn(size, *shape), torch.randint(10, (size,))


def per_example_losses(logits, labels):
    """Returns the cross-entropy of each example, averaged over positions: (batch,)."""
    logits, flat = logits.flatten(0, -2), labels.flatten()
    losses = nn.functional.cross_entropy(logits, flat, reduction="none")
    return losses.view(len(labels), -1).mean(1)


class MeanLoss(nn.Module):
    """A loss that Opacus can wrap: Opacus sets `reduction` and reads the result."""

    reduction = "mean"

    def forward(self, logits, labels):
        losses = per_example_losses(logits, labels)
        return losses if self.reduction == "none" else losses.mean()


def non_private(model, optimizer, batch):
    """Returns a step with the mean gradient."""
    x, labels = batch

    def step():
        optimizer.zero_grad()
        per_example_losses(model(x), labels).mean().backward()
        optimizer.step()

    return step


def opacus_ghost(model, optimizer, batch):
    """Returns a step with ghost clipping in Opacus: two backward passes."""
    from opacus import PrivacyEngine

    x, labels = batch
    dataset = torch.utils.data.TensorDataset(x, labels)
    model, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(dataset, batch_size=len(x)),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=L2_CLIP_NORM,
        criterion=MeanLoss(),
        grad_sample_mode="ghost",
        poisson_sampling=False,
    )

    def step():
        optimizer.zero_grad()
        criterion(model(x), labels).backward()
        optimizer.step()

    return step


def fastdp_book_keeping(model, optimizer, batch):
    """Returns a step with hybrid book-keeping in FastDP: one backward pass."""
    from fastDP import PrivacyEngine

    x, labels = batch
    engine = PrivacyEngine(
        model,
        batch_size=len(x),
        sample_size=100 * len(x),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=L2_CLIP_NORM,
        epochs=1,
        clipping_mode="MixOpt",
        clipping_fn="Abadi",
        clipping_style="all-layer",
    )
    engine.attach(optimizer)

    def step():
        optimizer.zero_grad()
        per_example_losses(model(x), labels).mean().backward()
        optimizer.step()

    return step


CONTENDERS = {
    "torch non-private": non_private,
    "Opacus ghost": opacus_ghost,
    "FastDP book-keeping": fastdp_book_keeping,
}


def build(request):
    """Returns the step and no facts; nothing is compiled."""
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    options = request["options"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MODELS[request["model"]](**options).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batch = make_batch(request["model"], request["batch_size"], options)
    batch = tuple(x.to(device) for x in batch)
    return CONTENDERS[request["library"]](model, optimizer, batch), {}


if __name__ == "__main__":
    serve(build)
