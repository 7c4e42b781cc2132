"""BigGAN-deep's generator, whose attention layer takes every rectangular attention method.

Brock, Donahue and Simonyan 2019, "Large Scale GAN Training for High Fidelity Natural Image Synthesis", appendix B.
"""

import contextlib
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from tqdm import tqdm
from transformers import GradientCheckpointingLayer, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.vit.modeling_vit import eager_attention_forward
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_efficient_attn.errors import check_positive
from hf_efficient_attn.models.biggan import layers
from hf_efficient_attn.models.biggan.configuration_biggan import REDUCTION, START_CHANNELS, START_SIZE, BigGANConfig
from hf_efficient_attn.models.biggan.layers import BigGANBatchNorm, Lookup, check_truncation, look_up
from hf_efficient_attn.ops.backends.devices import float64_device
from hf_efficient_attn.ops.tracing import nothing, replaced_in_graphs


@replaced_in_graphs(nothing)  # reading the values would break a graph, where the embedding's own check remains
def _check_classes(labels: Tensor, num_classes: int) -> None:
    if not ((labels >= 0) & (labels < num_classes)).all():
        raise ValueError(f"classes are numbered from 0 to {num_classes - 1}, not {labels.tolist()}")


@dataclass
class BigGANOutput(ModelOutput):
    """Images (B, 3, height, width), in [-1, 1]."""

    images: torch.Tensor | None = None


class BigGANAttention(nn.Module):
    """Non-local block with one head: each pixel is a query, and a quarter as many keys remain after pooling.

    At 512 pixels there are 4096 queries of 64 channels, and 1024 keys with values of 256 channels.
    """

    attention_layer, num_heads, scaling = 0, 1, 1.0
    is_causal, is_rectangular = False, True

    def __init__(self, config: BigGANConfig) -> None:
        super().__init__()
        self.config = config
        channels, half = config.attention_channels, config.attention_resolution // 2
        self.head_dim, self.value_head_dim, self.max_tokens = channels // 8, channels // 2, half**2
        conv_1x1 = functools.partial(nn.Conv2d, kernel_size=1, bias=False)
        self.theta, self.phi = conv_1x1(channels, self.head_dim), conv_1x1(channels, self.head_dim)
        self.g, self.o = conv_1x1(channels, self.value_head_dim), conv_1x1(self.value_head_dim, channels)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, C, height, width)."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        # Pooling leaves a quarter of the keys (section B of the paper, as in Zhang et al. 2019).
        parts = self.theta(x), functional.max_pool2d(self.phi(x), 2), functional.max_pool2d(self.g(x), 2)
        tokens = (part.flatten(2).transpose(1, 2)[:, None] for part in parts)  # (B, 1, Nq or Nk, C / 8 or C / 2)
        out, _ = attend(self, *tokens, None, scaling=self.scaling, dropout=0.0)
        return x + self.gamma * self.o(out[:, :, 0].transpose(1, 2).unflatten(2, x.shape[2:]))


class BigGANBlock(GradientCheckpointingLayer):
    """Residual bottleneck block of four convolutions (figure 16 of the paper)."""

    def __init__(self, config: BigGANConfig, up_sample: bool, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.up_sample, self.out_channels = up_sample, out_channels
        middle = in_channels // REDUCTION
        self.bn_0, self.conv_0 = BigGANBatchNorm(config, in_channels), nn.Conv2d(in_channels, middle, kernel_size=1)
        self.bn_1, self.conv_1 = BigGANBatchNorm(config, middle), nn.Conv2d(middle, middle, kernel_size=3, padding=1)
        self.bn_2, self.conv_2 = BigGANBatchNorm(config, middle), nn.Conv2d(middle, middle, kernel_size=3, padding=1)
        self.bn_3, self.conv_3 = BigGANBatchNorm(config, middle), nn.Conv2d(middle, out_channels, kernel_size=1)

    def forward(self, x: Tensor, condition: Tensor, lookup: Lookup) -> Tensor:
        """(B, in_channels, height, width) -> (B, out_channels, ...), with height and width doubled if `up_sample`.

        `condition` is (B, 2 z_dim), and `lookup` selects the statistics of batch normalization.
        """
        out = self.conv_0(functional.relu(self.bn_0(x, lookup, condition)))
        out = functional.relu(self.bn_1(out, lookup, condition))
        skip = x[:, : self.out_channels]
        if self.up_sample:
            out, skip = (functional.interpolate(part, scale_factor=2, mode="nearest") for part in (out, skip))
        out = self.conv_1(out)
        out = self.conv_2(functional.relu(self.bn_2(out, lookup, condition)))
        return self.conv_3(functional.relu(self.bn_3(out, lookup, condition))) + skip


class BigGANGenerator(nn.Module):
    """From the condition, which is the noise beside the class embedding, to an image."""

    def __init__(self, config: BigGANConfig) -> None:
        super().__init__()
        channels = config.channel_width
        self.gen_z = nn.Linear(2 * config.z_dim, START_SIZE**2 * START_CHANNELS * channels)
        blocks: list[nn.Module] = [BigGANBlock(config, *block) for block in config.blocks]
        blocks.insert(config.attention_layer_position, BigGANAttention(config))
        self.layers = nn.ModuleList(blocks)
        self.bn = BigGANBatchNorm(config, channels, conditional=False)
        # As in the published weights, this convolution keeps the number of channels, and only three are used.
        self.conv_to_rgb = nn.Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, condition: Tensor, lookup: Lookup) -> Tensor:
        """Condition (B, 2 z_dim) -> images (B, 3, height, width)."""
        # The weights of gen_z were trained in TensorFlow, with channels last.
        x = self.gen_z(condition).unflatten(1, (START_SIZE, START_SIZE, -1)).permute(0, 3, 1, 2).contiguous()
        for layer in self.layers:
            x = layer(x) if isinstance(layer, BigGANAttention) else layer(x, condition, lookup)
        return torch.tanh(self.conv_to_rgb(functional.relu(self.bn(x, lookup)))[:, :3])


class BigGANModel(PreTrainedModel):
    """BigGAN-deep's generator.

    `from_pretrained` also loads folders of pytorch-pretrained-biggan: `config.json` and `pytorch_model.bin` (or
    `model.safetensors`) under the package's names, with the spectral norm kept or folded in; and, with
    `from_pretrained(None, config=config, state_dict=state_dict)`, the state dict of a model of that package.
    `save_pretrained` writes the names of this class.
    """

    config_class = BigGANConfig
    config: BigGANConfig
    base_model_prefix = "biggan"
    main_input_name = "z"
    input_modalities: str | list[str] = "image"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BigGANBlock", "BigGANAttention"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: BigGANConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Linear(config.num_classes, config.z_dim, bias=False)
        self.generator = BigGANGenerator(config)
        if config.spectral_norm:
            layers.add_spectral_norm(self.generator, config.eps)
        self.post_init()

    @can_return_tuple
    def forward(
        self, z: Tensor, class_label: Tensor | Sequence[int] | int, truncation: float = 1.0, **kwargs: Any
    ) -> BigGANOutput:
        """Generate images.

        Args:
            z: (B, z_dim), noise such as `truncated_noise` gives, sampled at the same truncation.
            class_label: weights of classes (B, num_classes), one-hot or mixed; or indices (B,); or one index for all.
            truncation: in (0, 1]; selects the statistics of batch normalization, those of the batch in training.
            **kwargs: return_dict=False returns a tuple.

        Returns:
            images (B, 3, height, width), in [-1, 1].

        Raises:
            ValueError: a shape is wrong, a class index is out of range, or `truncation` is outside (0, 1].
        """
        check_truncation(truncation)
        if z.ndim != 2 or z.shape[1] != self.config.z_dim:
            raise ValueError(f"z must be (batch, {self.config.z_dim}), not {tuple(z.shape)}")
        z = z.to(self.embeddings.weight.dtype)
        condition = torch.cat((z, self._embed(class_label, z)), dim=1)
        return BigGANOutput(images=self.generator(condition, look_up(truncation, self.config.n_stats, z)))

    def _embed(self, class_label: Tensor | Sequence[int] | int, z: Tensor) -> Tensor:
        """Class embeddings (B, z_dim), in the dtype of z (B, z_dim)."""
        batch, num_classes = len(z), self.config.num_classes
        labels = torch.as_tensor(class_label, device=z.device)
        if labels.shape == (batch, num_classes):
            return self.embeddings(labels.to(z.dtype))
        if labels.ndim == 0:
            labels = labels.expand(batch)
        if labels.shape != (batch,) or labels.is_floating_point() or labels.dtype == torch.bool:
            raise ValueError(
                f"class_label must be ({batch}, {num_classes}) weights of classes or ({batch},) integers, not "
                f"{tuple(labels.shape)} of {labels.dtype}"
            )
        _check_classes(labels, num_classes)
        return functional.embedding(labels.long(), self.embeddings.weight.t())

    @torch.no_grad()
    def set_statistics(
        self,
        truncations: Sequence[float] | None = None,
        *,
        num_samples: int = 10_000,
        batch_size: int = 50,
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        """Measure the statistics of batch normalization again, in place. This is necessary after training.

        All layers are measured together, while each of them normalizes by the statistics of the batch (the paper's
        "standing statistics", appendix D). `batch_size` should therefore be that of training.

        Args:
            truncations: the truncations to measure. Each replaces the rows of the tables that the forward uses at this
                truncation; other rows stay unchanged. None measures all rows, which takes `n_stats` times as long.
            num_samples: number of images for each truncation.
            batch_size: number of images in a batch.
            seed: seed of noise and labels; global generators stay untouched.
            progress: show a progress bar.

        Raises:
            ValueError: a truncation is outside (0, 1], two use the same row, or a count is below 1.
        """
        check_positive("num_samples", num_samples)
        check_positive("batch_size", batch_size)
        fillings = layers.rows_to_fill(truncations, self.config.n_stats)
        norms = [module for module in self.modules() if isinstance(module, BigGANBatchNorm)]
        sizes = [len(part) for part in torch.arange(num_samples).split(batch_size)]
        moments: dict[BigGANBatchNorm, Tensor] = {}  # means of the input and of its square, (2, C), float64

        def add(norm: BigGANBatchNorm, args: tuple[Any, ...]) -> None:
            x = args[0].to(float64_device(args[0].device), torch.float64)
            means = torch.stack((x.mean((0, 2, 3)), x.square().mean((0, 2, 3))))
            moments[norm] = moments.get(norm, 0) + means * (len(x) / num_samples)

        bar = tqdm(total=len(fillings) * num_samples, unit="img", desc="statistics", disable=None if progress else True)
        with bar, contextlib.ExitStack() as stack:
            for module in self.modules():
                stack.callback(setattr, module, "training", module.training)
            # Only the normalizations are in training mode, so that dropout and power iterations stay as they are.
            self.eval()
            for norm in norms:
                stack.enter_context(norm.train().register_forward_pre_hook(add))
            for truncation, rows in fillings.items():
                moments.clear()
                generator = torch.Generator().manual_seed(seed)
                for size in sizes:
                    noise_seed = int(torch.randint(2**31 - 1, (), generator=generator))
                    # At truncation 0 all noise is 0.
                    z = layers.truncated_noise(size, self.config.z_dim, truncation or 1.0, noise_seed)
                    labels = torch.randint(self.config.num_classes, (size,), generator=generator)
                    self(z.to(self.device) * bool(truncation), labels.to(self.device), truncation or 1.0)
                    bar.update(size)
                for norm, (mean, square) in moments.items():
                    norm.running_means[rows] = mean.to(norm.running_means)
                    norm.running_vars[rows] = (square - mean.square()).clamp(min=0.0).to(norm.running_vars)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std, spectral = self.config.initializer_range, parametrize.ParametrizationList
        if isinstance(module, spectral):
            init.normal_(module.original, std=std)
            layers.init_vectors(module, self.config.eps)
        elif hasattr(module, "_u"):
            # Reached before the parametrization that holds the weight and these vectors. If a checkpoint had the weight
            # but not the vectors, Transformers treats that parametrization as initialized and skips it.
            holder = next(m for m in self.modules() if isinstance(m, spectral) and m[0] is module)
            if getattr(holder.original, "_is_hf_initialized", False):
                layers.init_vectors(holder, self.config.eps)
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            if not parametrize.is_parametrized(module):
                init.normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, BigGANBatchNorm):
            init.zeros_(module.running_means)
            init.ones_(module.running_vars)
            if not module.conditional:
                init.ones_(module.weight)
                init.zeros_(module.bias)
        elif isinstance(module, BigGANAttention):
            init.zeros_(module.gamma)

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        if enable and self.config.spectral_norm:
            raise ValueError(
                "with spectral_norm=True every forward improves the estimate of the norm, so a block that is "
                "recomputed for the gradient would have other weights: train without gradient checkpointing, or with "
                "spectral_norm=False"
            )
        super()._set_gradient_checkpointing(enable, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        config: PreTrainedConfig | str | os.PathLike | None = None,
        key_mapping: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> "BigGANModel":
        """Load a model as in Transformers; names of pytorch-pretrained-biggan are replaced by those of this class."""
        known = config
        if not isinstance(known, PreTrainedConfig) and pretrained_model_name_or_path is not None:
            known = cls.config_class.from_pretrained(config or pretrained_model_name_or_path, **kwargs)
        if isinstance(known, BigGANConfig):  # which names are replaced depends on its `spectral_norm`
            key_mapping = {**layers.checkpoint_names(known.spectral_norm), **(key_mapping or {})}
        kwargs |= {"config": config, "key_mapping": key_mapping}
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(self, *args: Any, save_original_format: bool = False, **kwargs: Any) -> None:
        """Save the model as in Transformers, under the names of this class whatever names it was loaded from."""
        if save_original_format:
            raise ValueError("a BigGANModel is always saved under its own names: leave save_original_format out")
        super().save_pretrained(*args, **{**kwargs, "save_original_format": False})
