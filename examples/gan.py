"""A GAN in a small budget: python examples/gan.py.

Two Runners share one model: each updates its own network, from its own loss, in its own micro-batches.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import autobatch


class Gan(nn.Module):
    """Images of 8 x 8 from 16 random numbers, and a critic of images."""

    def __init__(self) -> None:
        super().__init__()
        up = [nn.Linear(16, 32 * 16), nn.GELU(), nn.Unflatten(1, (32, 4, 4)), nn.Upsample(scale_factor=2)]
        self.generator = nn.Sequential(*up, nn.Conv2d(32, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 1, 3, padding=1))
        down = [nn.Conv2d(1, 32, 3, 2, 1), nn.GELU(), nn.Conv2d(32, 64, 3, 2, 1), nn.GELU()]
        self.critic = nn.Sequential(*down, nn.Flatten(), nn.Linear(64 * 4, 1))


def judge(gan: Gan, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The critic's loss: real images are 1, made ones are 0."""
    with torch.no_grad():
        made = gan.generator(batch["noise"]).sigmoid()
    real = bce(gan.critic(batch["images"]), torch.ones(len(made), 1))
    return real + bce(gan.critic(made), torch.zeros(len(made), 1))


def deceive(gan: Gan, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The generator's loss: what it makes shall be taken for real."""
    return bce(gan.critic(gan.generator(batch["noise"]).sigmoid()), torch.ones(len(batch["noise"]), 1))


def distance(gan: Gan) -> float:
    """How far the mean of made images is from that of real ones, by pixel."""
    made = autobatch.map(lambda noise: gan.generator(noise).sigmoid(), torch.randn(2000, 16), progress=False)
    return float((made.mean(0) - images.mean(0)).abs().mean())


torch.manual_seed(0)
images = torch.as_tensor(load_digits().data).float().view(-1, 1, 8, 8) / 16
gan = Gan()
batch = {"images": images[:256], "noise": torch.randn(256, 16)}
options = {"batch": batch, "budget": "4MiB"}
adam = torch.optim.Adam(gan.critic.parameters(), 1e-3, (0.5, 0.9))
critic = autobatch.Runner.fit(gan, 256, step=judge, optimizer=adam, **options)
adam = torch.optim.Adam(gan.generator.parameters(), 1e-3, (0.5, 0.9))
generator = autobatch.Runner.fit(gan, 256, step=deceive, optimizer=adam, **options)
before = distance(gan)
for _ in range(150):
    batch = {"images": images[torch.randint(len(images), (256,))], "noise": torch.randn(256, 16)}
    judged = critic.step(batch)
    gan.critic.requires_grad_(False)  # its gradient is not needed here
    deceived = generator.step(batch)
    gan.critic.requires_grad_(True)
after = distance(gan)
print(
    f"micro-batches {judged.micro_batch_sizes} and {deceived.micro_batch_sizes}; distance {before:.2f} -> {after:.2f}"
)
print(f"made images came closer to real ones: {'yes' if after < 2 / 3 * before else 'no'}")
