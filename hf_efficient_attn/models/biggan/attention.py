"""What stands around the attention of BigGAN, whoever's module it is in."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional


def attend(attention: nn.Module, x: Tensor, projections: Sequence[nn.Module], interface: Callable) -> Tensor:
    """Queries, keys and values of pixels, and back from the output.

    Args:
        attention: the module, as the interface takes it.
        x: (B, C, H, W).
        projections: 1 x 1 convolutions theta and phi (to C/8 channels), g (to C/2) and o (from C/2 to C).
        interface: (module, query, key, value, mask, scaling=..., dropout=...) -> (B, Nq, heads, Dv), weights.

    Returns:
        (B, C, H, W), before it is scaled by gamma and added to x.
    """
    theta, phi, g, o = projections
    query = theta(x)
    # A quarter of the keys (section B of the paper; Zhang et al. 2019 do the same).
    key, value = functional.max_pool2d(phi(x), 2), functional.max_pool2d(g(x), 2)
    tokens = [part.flatten(2).transpose(1, 2)[:, None] for part in (query, key, value)]
    out, _ = interface(attention, *tokens, None, scaling=1.0, dropout=0.0)
    return o(out[:, :, 0].transpose(1, 2).unflatten(2, x.shape[2:]))
