"""One worker of PyTorch's DistributedDataParallel: torch_run.py MODEL WAYS ROUNDS STEPS OUT, with TF_CONFIG set.

A way is `ddp` (no hook), `ddp:fp16` or `ddp:powersgd`. Models have the shapes of those that tfdist trains, batches the
same sizes, and the ways take turns. Without TF_CONFIG the worker is alone.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel

_EXAMPLES = {"transformer": 32, "resnet18": 8}  # of one worker in a step
_RANK, _EXACT_STEPS = 4, 2


def main(model: str, ways: list[str], rounds: int, steps: int, out: Path) -> None:
    """Writes the times of all ways as JSON, on the first worker."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    index = config.get("task", {}).get("index", 0)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index % os.cpu_count()]})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if config:
        addresses = config["cluster"]["worker"]
        dist.init_process_group("gloo", f"tcp://{addresses[0]}", rank=index, world_size=len(addresses))
    made = {way: make(model, way if config else None) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for round_number in range(rounds + 1):
        for way, run in made.items():
            seconds = run(steps if round_number else 2 * _EXACT_STEPS)
            if round_number:
                times[way].append(1e3 * seconds)
    if index == 0:
        out.write_text(json.dumps({"ms": times}))
    if config:
        dist.destroy_process_group()


def make(name: str, way: "str | None") -> Callable[[int], float]:
    """Returns a function that trains some steps and says how long one took; without a way, without DDP."""
    module: nn.Module = Transformer() if name == "transformer" else resnet18()
    if way is not None:
        module = DistributedDataParallel(module)
        if way == "ddp:fp16":
            module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif way == "ddp:powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=_RANK, start_powerSGD_iter=_EXACT_STEPS)
            module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.Adam(module.parameters())
    x, y = batch(name)

    def run(steps: int) -> float:
        step()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(module(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return run


def batch(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the examples of one worker."""
    count = _EXAMPLES[name]
    if name == "transformer":
        tokens = torch.randint(0, 256, (count, 65))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,))


class Transformer(nn.Module):
    """The shapes of `models.transformer_lm` with width 256, depth 4, heads 4, 64 positions, 256 tokens."""

    def __init__(self, vocab: int = 256, seq_len: int = 64, width: int = 256, depth: int = 4, heads: int = 4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(0.02 * torch.randn(seq_len, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits of every position."""
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


class Block(nn.Module):
    """Causal attention and a perceptron of four times the width, each after a normalisation."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of the block."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.norms[1](x))))


def resnet18(width: int = 64, classes: int = 10) -> nn.Module:
    """The shapes of `models.resnet18` for small images."""
    layers: list[nn.Module] = [conv_bn(3, width, 1), nn.ReLU()]
    channels = width
    for stage in range(4):
        for block in range(2):
            wide = width * 2**stage
            layers.append(Residual(channels, wide, 2 if stage and not block else 1))
            channels = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels: int, wide: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(conv_bn(channels, wide, stride), nn.ReLU(), conv_bn(wide, wide, 1))
        same = channels == wide and stride == 1
        self.shortcut = nn.Identity() if same else conv_bn(channels, wide, stride, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of the block."""
        return torch.relu(self.body(x) + self.shortcut(x))


def conv_bn(channels: int, wide: int, stride: int, size: int = 3) -> nn.Module:
    """A convolution without bias, and batch normalisation."""
    conv = nn.Conv2d(channels, wide, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(wide))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0], given[1].split(";"), int(given[2]), int(given[3]), Path(given[4]))
