"""BigGAN-deep's generator (Brock, Donahue and Simonyan 2019, "Large Scale GAN Training for High Fidelity Natural Image
Synthesis", appendix B) with any rectangular attention method in its one attention layer."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import ModelOutput

from hf_efficient_attn.models.biggan.attention import attend
from hf_efficient_attn.models.biggan.configuration_biggan import (
    REDUCTION,
    START_CHANNELS,
    START_RESOLUTION,
    BigGANConfig,
)
from hf_efficient_attn.models.biggan.conversion_biggan import checkpoint_names, leading_vectors, register_conversion
from hf_efficient_attn.models.biggan.normalization import (
    BigGANBatchNorm,
    Lookup,
    check_counts,
    fill_statistics,
    look_up,
)
from hf_efficient_attn.models.biggan.sampling import check_truncation
from hf_efficient_attn.models.eager import eager_attention_forward

register_conversion()


@dataclass
class BigGANOutput(ModelOutput):
    """images: (B, 3, P, P), in [-1, 1]."""

    images: torch.Tensor | None = None


class BigGANAttention(nn.Module):
    """Non-local block: HW queries of width C/8 against HW/4 keys and values of width C/2, of one head.

    At 512 pixels these are 4096 queries of 64 channels, 1024 keys, and values of 256 channels.
    """

    attention_layer, num_heads, scaling = 0, 1, 1.0
    is_causal, is_rectangular = False, True

    def __init__(self, config: BigGANConfig) -> None:
        super().__init__()
        self.config = config
        channels, resolution = config.attention_channels, config.attention_resolution
        self.head_dim, self.value_head_dim, self.max_tokens = channels // 8, channels // 2, (resolution // 2) ** 2
        conv = functools.partial(_conv, config, kernel_size=1, bias=False)
        self.theta = conv(channels, self.head_dim)
        self.phi = conv(channels, self.head_dim)
        self.g = conv(channels, self.value_head_dim)
        self.o = conv(self.value_head_dim, channels)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return x + self.gamma * attend(self, x, (self.theta, self.phi, self.g, self.o), interface)


class BigGANBlock(GradientCheckpointingLayer):
    """Residual bottleneck block of four convolutions (figure 16 of the paper)."""

    def __init__(self, config: BigGANConfig, up_sample: bool, channels: int, out_channels: int) -> None:
        super().__init__()
        self.up_sample, self.out_channels = up_sample, out_channels
        middle = channels // REDUCTION
        norm = functools.partial(
            BigGANBatchNorm,
            n_stats=config.n_stats,
            eps=config.eps,
            condition=2 * config.z_dim,
            linear=functools.partial(_linear, config),
        )
        conv = functools.partial(_conv, config)
        self.bn_0, self.conv_0 = norm(channels), conv(channels, middle, kernel_size=1)
        self.bn_1, self.conv_1 = norm(middle), conv(middle, middle, kernel_size=3, padding=1)
        self.bn_2, self.conv_2 = norm(middle), conv(middle, middle, kernel_size=3, padding=1)
        self.bn_3, self.conv_3 = norm(middle), conv(middle, out_channels, kernel_size=1)

    def forward(self, x: Tensor, condition: Tensor, lookup: Lookup) -> Tensor:
        """x (B, C, H, W), condition (B, 2 z_dim) -> (B, C', H, W), or (B, C', 2H, 2W)."""
        out = self.conv_0(functional.relu(self.bn_0(x, lookup, condition)))
        out = functional.relu(self.bn_1(out, lookup, condition))
        skip = x[:, : self.out_channels]
        if self.up_sample:
            out, skip = (functional.interpolate(part, scale_factor=2, mode="nearest") for part in (out, skip))
        out = self.conv_1(out)
        out = self.conv_2(functional.relu(self.bn_2(out, lookup, condition)))
        return self.conv_3(functional.relu(self.bn_3(out, lookup, condition))) + skip


class BigGANGenerator(nn.Module):
    """From the condition, noise beside the class embedding, to an image."""

    def __init__(self, config: BigGANConfig) -> None:
        super().__init__()
        width = config.channel_width
        self.gen_z = _linear(config, 2 * config.z_dim, START_RESOLUTION**2 * START_CHANNELS * width)
        blocks = [BigGANBlock(config, up, width * into, width * out) for up, into, out in config.layers]
        blocks.insert(config.attention_layer_position, BigGANAttention(config))
        self.layers = nn.ModuleList(blocks)
        self.bn = BigGANBatchNorm(width, config.n_stats, config.eps)
        # The published weights have as many channels here as before, of which three are used.
        self.conv_to_rgb = _conv(config, width, width, kernel_size=3, padding=1)

    def forward(self, condition: Tensor, lookup: Lookup) -> Tensor:
        """(B, 2 z_dim) -> (B, 3, P, P)."""
        # Channels last, as they were in TensorFlow.
        x = self.gen_z(condition).unflatten(1, (START_RESOLUTION, START_RESOLUTION, -1)).permute(0, 3, 1, 2)
        x = x.contiguous()
        for layer in self.layers:
            x = layer(x) if isinstance(layer, BigGANAttention) else layer(x, condition, lookup)
        return torch.tanh(self.conv_to_rgb(functional.relu(self.bn(x, lookup)))[:, :3])


def _linear(config: BigGANConfig, *sizes: int, **options) -> nn.Linear:
    return _normalized(config, nn.Linear(*sizes, **options))


def _conv(config: BigGANConfig, *sizes: int, **options) -> nn.Conv2d:
    return _normalized(config, nn.Conv2d(*sizes, **options))


def _normalized(config: BigGANConfig, module: nn.Module) -> nn.Module:
    if not config.spectral_norm:
        return module
    weight = module.weight
    if weight.is_meta:
        # Its first power iterations, which take seconds on the meta device, are done on something small.
        module.weight = nn.Parameter(torch.ones((1,) * weight.ndim, dtype=weight.dtype, device="cpu"))
    spectral_norm(module, eps=config.eps)
    if weight.is_meta:
        kept = module.parametrizations.weight
        kept.original = weight
        kept[0]._u, kept[0]._v = weight.new_empty(len(weight)), weight.new_empty(weight[0].numel())
    return module


class BigGANModel(PreTrainedModel):
    """BigGAN-deep's generator.

    `from_pretrained` also takes a folder of pytorch-pretrained-biggan: `config.json` and `pytorch_model.bin` (or
    `model.safetensors`) with its names, spectral norm kept or folded in. What is saved has the names of this model.
    """

    config_class = BigGANConfig
    config: BigGANConfig
    base_model_prefix = "biggan"
    main_input_name = "z"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["BigGANBlock", "BigGANAttention"]
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: BigGANConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Linear(config.num_classes, config.z_dim, bias=False)
        self.generator = BigGANGenerator(config)
        self.post_init()

    def forward(
        self,
        z: Tensor,
        class_label: "Tensor | Sequence[int] | int",
        truncation: float = 1.0,
        return_dict: bool | None = None,
    ) -> BigGANOutput | tuple[Tensor]:
        """Generate images.

        Args:
            z: (B, z_dim), noise such as `truncated_noise` makes, at this truncation.
            class_label: (B, num_classes), one-hot or a mixture of classes; or (B,), their numbers; or one number.
            truncation: in (0, 1]; chooses the statistics of batch normalization. In training, where these are the
                batch's, it has no effect.
            return_dict: False for a tuple.

        Returns:
            images (B, 3, P, P), in [-1, 1].

        Raises:
            ValueError: wrong shapes, class numbers out of range, a truncation outside (0, 1].
        """
        check_truncation(truncation)
        if z.ndim != 2 or z.shape[1] != self.config.z_dim:
            raise ValueError(f"z must be (batch, {self.config.z_dim}), not {tuple(z.shape)}")
        z = z.to(self.embeddings.weight.dtype)
        condition = torch.cat((z, self._embed(class_label, z)), dim=1)
        images = self.generator(condition, look_up(truncation, self.config.n_stats, z.device))
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return BigGANOutput(images=images) if return_dict else (images,)

    def _embed(self, class_label: "Tensor | Sequence[int] | int", z: Tensor) -> Tensor:
        """-> (B, z_dim)."""
        batch, classes = len(z), self.config.num_classes
        labels = torch.as_tensor(class_label, device=z.device)
        if labels.ndim == 2 and labels.shape == (batch, classes):
            return self.embeddings(labels.to(z.dtype))
        if labels.ndim == 0:
            labels = labels.expand(batch)
        if labels.shape != (batch,) or labels.is_floating_point() or labels.dtype == torch.bool:
            raise ValueError(
                f"class_label must be ({batch}, {classes}) weights of classes or ({batch},) integers, not "
                f"{tuple(labels.shape)} of {labels.dtype}"
            )
        # A look at the values would break the graph that is being traced; there the table's own check remains.
        if not torch.compiler.is_compiling() and not ((labels >= 0) & (labels < classes)).all():
            raise ValueError(f"classes are numbered from 0 to {classes - 1}, not {labels.tolist()}")
        return functional.embedding(labels.long(), self.embeddings.weight.t())

    def set_statistics(
        self,
        truncations: Sequence[float] | None = None,
        *,
        class_label: Tensor | None = None,
        num_samples: int = 10_000,
        batch_size: int = 50,
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        """Measure the statistics of batch normalization anew, as is needed after training, in place.

        All layers are measured at once, each on what it gets while those before it normalize by the batch (the paper's
        "standing statistics", appendix D); so `batch_size` should be the one of training.

        Args:
            truncations: for which to measure; the rows of the tables that the forward reads there are replaced, others
                stay. None for all rows, which takes `n_stats` times as long.
            class_label: (K, num_classes) or (K,), from which labels are drawn; None draws from all classes alike.
            num_samples: images for each truncation.
            batch_size: images at once.
            seed: of noise and labels; no global generator is touched.
            progress: show a bar.

        Raises:
            ValueError: truncations outside (0, 1], or two that read the same row; counts below 1; wrong labels.
        """
        check_counts(num_samples=num_samples, batch_size=batch_size)
        if class_label is not None:
            class_label = torch.as_tensor(class_label)
            if class_label.ndim not in (1, 2) or len(class_label) == 0:
                raise ValueError(f"class_label must be (K,) or (K, classes), not {tuple(class_label.shape)}")
        fill_statistics(self, truncations, class_label, num_samples, batch_size, seed, progress)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, parametrize.ParametrizationList):
            init.normal_(module.original, std=std)
            self._init_vectors(module)
        elif hasattr(module, "_u"):
            # Met before the weight that holds it. Where that came out of a checkpoint without the vectors, Transformers
            # passes it over as already filled.
            holders = (m for m in self.modules() if isinstance(m, parametrize.ParametrizationList) and m[0] is module)
            holder = next(holders)
            if getattr(holder.original, "_is_hf_initialized", False):
                self._init_vectors(holder)
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

    def _init_vectors(self, normalized: parametrize.ParametrizationList) -> None:
        vectors = leading_vectors(normalized.original, self.config.eps)
        for name, vector in zip(("_u", "_v"), vectors, strict=True):
            init.copy_(getattr(normalized[0], name), vector)

    def _set_gradient_checkpointing(self, enable: bool = True, *args, **kwargs) -> None:
        if enable and self.config.spectral_norm:
            raise ValueError(
                "spectral_norm=True improves its estimate at every forward, so that a block computed again for the "
                "gradient would have other weights: train without gradient checkpointing, or with spectral_norm=False"
            )
        super()._set_gradient_checkpointing(enable, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, key_mapping=None, **kwargs):
        """As in Transformers; the names of pytorch-pretrained-biggan are put in place of ours where they are met.

        They are put by `key_mapping`, since which they are depends on the config's `spectral_norm`; the division by
        the spectral norm is a registered `WeightConverter`.
        """
        known = config
        if not isinstance(known, PreTrainedConfig) and pretrained_model_name_or_path is not None:
            source = pretrained_model_name_or_path if config is None else config
            known = cls.config_class.from_pretrained(source, **{k: v for k, v in kwargs.items() if k in _FOR_CONFIG})
        if isinstance(known, BigGANConfig):
            key_mapping = {**checkpoint_names(known.spectral_norm), **(key_mapping or {})}
        return super().from_pretrained(
            pretrained_model_name_or_path, *args, config=config, key_mapping=key_mapping, **kwargs
        )

    def save_pretrained(self, *args, save_original_format: bool = False, **kwargs):
        """As in Transformers, under the names of this model, whatever names it was loaded from."""
        if save_original_format:
            raise ValueError("a BigGANModel is saved under its own names; `revert_state_dict` gives the package's")
        return super().save_pretrained(*args, save_original_format=False, **kwargs)


# Arguments of `from_pretrained` that lead to the config or change the field that is looked at.
_FOR_CONFIG = (
    "cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies", "spectral_norm",
)  # fmt: skip
