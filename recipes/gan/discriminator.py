"""A projection discriminator (Miyato & Koyama 2018) with spectral norm (Miyato et al. 2018), for small pictures."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


class _Block(nn.Module):
    """Residual block of two convolutions that halves the picture."""

    def __init__(self, before: int, after: int, first: bool) -> None:
        super().__init__()
        self.first = first
        self.enter = spectral_norm(nn.Conv2d(before, after, 3, padding=1))
        self.leave = spectral_norm(nn.Conv2d(after, after, 3, padding=1))
        self.skip = spectral_norm(nn.Conv2d(before, after, 1))

    def forward(self, x: Tensor) -> Tensor:
        pool = nn.functional.avg_pool2d
        # The first block sees pixels, of which a ReLU would take away the dark half.
        inner = self.enter(x if self.first else x.relu())
        return pool(self.leave(inner.relu()), 2) + self.skip(pool(x, 2))


class Discriminator(nn.Module):
    """Pictures (B, 3, P, P) and classes (B,) -> scores (B,): linear in the features h, w.h + e(class).h.

    Args:
        widths: channels of the blocks, each of which halves the picture.
    """

    def __init__(self, classes: int, widths: tuple[int, ...] = (24, 48, 96)) -> None:
        super().__init__()
        sizes = zip((3, *widths), widths, strict=False)
        self.blocks = nn.Sequential(*(_Block(a, b, first=i == 0) for i, (a, b) in enumerate(sizes)))
        self.score = spectral_norm(nn.Linear(widths[-1], 1))
        self.classes = spectral_norm(nn.Embedding(classes, widths[-1]))

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks(pictures).relu().sum((2, 3))
        return self.score(features).squeeze(1) + (self.classes(labels) * features).sum(1)


def hinge_of_discriminator(real: Tensor, generated: Tensor) -> Tensor:
    """Hinge loss of the discriminator (Lim & Ye 2017; Brock et al. 2019): scores (B,), (B',) -> ()."""
    return torch.relu(1 - real).mean() + torch.relu(1 + generated).mean()


def hinge_of_generator(generated: Tensor) -> Tensor:
    return -generated.mean()


def sameness(pictures: Tensor, noise: Tensor) -> Tensor:
    """How little the noise changes the pictures (Mao et al. 2019, "Mode seeking", eq. 5): large where it is ignored.

    Args:
        pictures: (2 B, 3, P, P), where b and B + b are of one class.
        noise: (2 B, z_dim).
    """
    away, moved = ((x[: len(x) // 2] - x[len(x) // 2 :]).abs().mean() for x in (pictures, noise))
    return moved / (away + 1e-3)
