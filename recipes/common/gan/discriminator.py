"""A projection discriminator (Miyato & Koyama 2018) with spectral norm (Miyato et al. 2018) for small pictures."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


class _Block(nn.Module):
    """Residual block of two convolutions that halves the resolution."""

    def __init__(self, in_channels: int, out_channels: int, first: bool) -> None:
        super().__init__()
        self.first = first
        self.enter = spectral_norm(nn.Conv2d(in_channels, out_channels, 3, padding=1))
        self.leave = spectral_norm(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        self.skip = spectral_norm(nn.Conv2d(in_channels, out_channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        pool = nn.functional.avg_pool2d
        # The first block takes pixels: a ReLU would remove the dark half of them.
        inner = self.enter(x if self.first else x.relu())
        return pool(self.leave(inner.relu()), 2) + self.skip(pool(x, 2))


class Discriminator(nn.Module):
    """Maps pictures (B, 3, P, P) and classes (B,) to scores (B,), linear in the features h: w.h + e(class).h.

    Args:
        classes: number of classes.
        widths: channels of the blocks, each of which halves the resolution.
    """

    def __init__(self, classes: int, widths: tuple[int, ...] = (24, 48, 96)) -> None:
        super().__init__()
        sizes = zip((3, *widths), widths, strict=False)
        self.blocks = nn.Sequential(*(_Block(a, b, first=i == 0) for i, (a, b) in enumerate(sizes)))
        self.score = spectral_norm(nn.Linear(widths[-1], 1))
        self.classes = spectral_norm(nn.Embedding(classes, widths[-1]))

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Score pictures (B, 3, P, P) of classes (B,): (B,)."""
        features = self.blocks(pictures).relu().sum((2, 3))
        return self.score(features).squeeze(1) + (self.classes(labels) * features).sum(1)


def hinge_of_discriminator(real: Tensor, generated: Tensor) -> Tensor:
    """Hinge loss of the discriminator (Lim & Ye 2017; Brock et al. 2019) from scores (B,) and (B',): a scalar."""
    return torch.relu(1 - real).mean() + torch.relu(1 + generated).mean()


def hinge_of_generator(generated: Tensor) -> Tensor:
    """Hinge loss of the generator from scores (B,): a scalar."""
    return -generated.mean()


def sameness(pictures: Tensor, noise: Tensor) -> Tensor:
    """Mode-seeking loss (Mao et al. 2019, eq. 5): large if the noise changes the pictures little.

    Args:
        pictures: (2 B, 3, P, P), where pictures b and B + b have the same class.
        noise: (2 B, z_dim).
    """
    changed, moved = ((x[: len(x) // 2] - x[len(x) // 2 :]).abs().mean() for x in (pictures, noise))
    return moved / (changed + 1e-3)
