"""Configuration of BigGAN-deep's generator (Brock, Donahue and Simonyan 2019, appendix B, tables 7 to 9)."""

from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from hf_efficient_attn.errors import unknown_name

logger = logging.get_logger(__name__)

# (whether the block doubles the resolution, input and output channels in multiples of channel_width), from 4 x 4 on.
_START = ((False, 16, 16), (True, 16, 16), (False, 16, 16), (True, 16, 8), (False, 8, 8))
_LAYERS = {
    128: (*_START, (True, 8, 4), (False, 4, 4), (True, 4, 2), (False, 2, 2), (True, 2, 1)),
    256: (*_START, (True, 8, 8), (False, 8, 8), (True, 8, 4), (False, 4, 4), (True, 4, 2), (False, 2, 2), (True, 2, 1)),
}
_LAYERS[512] = (*_LAYERS[256], (False, 1, 1), (True, 1, 1))
# The published weights have the names of the PyPI package pytorch-pretrained-biggan.
_PUBLISHED = {f"biggan-deep-{size}": size for size in _LAYERS}
START_RESOLUTION, START_CHANNELS, REDUCTION = 4, 16, 4


class BigGANConfig(PreTrainedConfig):
    """Sizes of a `BigGANModel`; the defaults are those of BigGAN-deep at 128 pixels.

    The fields down to `n_stats` are those of `config.json` in the layout of pytorch-pretrained-biggan, which
    `BigGANConfig.from_pretrained` reads. There is one attention layer of one head: `num_attention_heads` is 1.

    Args:
        output_dim: side of the images in pixels. By default what `layers` gives.
        z_dim: width of the noise, and of the class embedding.
        class_embed_dim: stands in the layout, and is not used: noise and class embedding are of the same width.
        channel_width: channels of the last block; all others are multiples of it.
        num_classes: classes; the same as `num_labels`, and as long as `id2label`, which may hold their names.
        layers: (whether it doubles the resolution, input channels, output channels) of each block, channels in
            multiples of `channel_width`, starting from 16 of them at 4 x 4. By default the published ones for an
            `output_dim` of 128, 256 or 512.
        attention_layer_position: index of the block before which attention stands.
        eps: added to variances and in the spectral norm.
        n_stats: rows of the tables of batch-norm statistics, for truncations from 0 to 1 in equal steps.
        spectral_norm: False: weights are plain; of a checkpoint with spectral norm they are divided by it on loading.
            True: the spectral norm is kept, as `torch.nn.utils.parametrizations.spectral_norm`, for training.
        initializer_range: standard deviation of new weights.

    Raises:
        ValueError: sizes that make no network.
    """

    model_type = "biggan"
    # `num_labels` counts `id2label`, so that the three can never differ.
    attribute_map: ClassVar[dict[str, str]] = {"num_classes": "num_labels"}

    output_dim: int | None = None
    z_dim: int = 128
    class_embed_dim: int = 128
    channel_width: int = 128
    layers: list | tuple | None = None
    attention_layer_position: int = 8
    eps: float = 1e-4
    n_stats: int = 51
    spectral_norm: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs):
        counts = {key: kwargs.pop(key, None) for key in ("num_classes", "num_labels")}
        counts["len(id2label)"] = None if self.id2label is None else len(self.id2label)
        given = {key: value for key, value in counts.items() if value is not None}
        if len(set(given.values())) > 1:
            raise ValueError(f"the number of classes is given twice, and differs: {given}")
        classes = next(iter(given.values()), 1000)
        for name, value in {**{key: getattr(self, key) for key in _WHOLE}, "num_classes": classes}.items():
            least = 2 if name == "n_stats" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
        if not self.eps > 0:
            raise ValueError(f"eps must be positive, not {self.eps!r}")
        if self.layers is None:
            size = 128 if self.output_dim is None else self.output_dim
            if size not in _LAYERS:
                raise ValueError(f"output_dim={size!r} is none of the published {[*_LAYERS]}: give layers as well")
            self.layers = _LAYERS[size]
        # Lists, as JSON gives them back.
        self.layers = [list(layer) for layer in self.layers]
        self._check_layers()
        super().__post_init__(num_labels=classes, **kwargs)

    def _check_layers(self) -> None:
        """The blocks must fit each other, the first and last layer of the generator, and their skip connections."""
        before = START_CHANNELS
        for index, layer in enumerate(self.layers):
            if len(layer) != 3 or not all(isinstance(x, int) and x > 0 for x in layer[1:]):
                raise ValueError(f"layers[{index}] must be [up-samples?, input, output channels], not {layer!r}")
            layer[0] = bool(layer[0])
            if layer[1] != before:
                raise ValueError(f"layers[{index}] takes {layer[1]} channels and gets {before}")
            # A block that has fewer channels at its end drops the upper half of those of its skip connection.
            if layer[2] != layer[1] and 2 * layer[2] != layer[1]:
                raise ValueError(f"layers[{index}] must keep its {layer[1]} channels or halve them, not {layer[2]}")
            if layer[1] * self.channel_width < REDUCTION:
                raise ValueError(f"layers[{index}] has {layer[1] * self.channel_width} channels and needs {REDUCTION}")
            before = layer[2]
        if before != 1:
            raise ValueError(f"the last of layers must end with 1 times channel_width, not {before}")
        position = self.attention_layer_position
        if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < len(self.layers):
            raise ValueError(f"attention_layer_position={position!r} is none of the {len(self.layers)} layers")
        if self.attention_channels < 8:
            raise ValueError(
                f"attention has {self.attention_channels} channels and needs 8: raise channel_width or attend earlier"
            )
        size = self._resolution(len(self.layers))
        if self.output_dim not in (None, size):
            # The package of this layout never reads output_dim, so that files with any value are about.
            logger.warning(f"output_dim={self.output_dim} is taken as {size}, which is what layers give")
        self.output_dim = size

    def _resolution(self, layer: int) -> int:
        """Side of what enters a block, in pixels."""
        return START_RESOLUTION * 2 ** sum(up for up, _, _ in self.layers[:layer])

    @property
    def attention_resolution(self) -> int:
        """Side of the picture that attention sees: its square is the number of queries, four times that of keys."""
        return self._resolution(self.attention_layer_position)

    @property
    def attention_channels(self) -> int:
        """Channels that attention sees: queries and keys have an eighth of them, values half."""
        return self.channel_width * self.layers[self.attention_layer_position][1]

    @property
    def num_attention_heads(self) -> int:
        return 1

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "num_classes": self.num_classes}

    @classmethod
    def from_name(cls, name: str, **changes) -> "BigGANConfig":
        """One of the published architectures: "biggan-deep-128", "biggan-deep-256", "biggan-deep-512".

        Args:
            name: as above; `id2label` then holds ImageNet's class names.
            **changes: other fields of the config.

        Raises:
            ValueError: unknown name.
        """
        from hf_efficient_attn.models.biggan.sampling import imagenet_labels

        if name not in _PUBLISHED:
            raise ValueError(unknown_name("BigGAN", name, list(_PUBLISHED)))
        if not {"num_classes", "num_labels", "id2label"} & set(changes):
            labels = imagenet_labels()
            changes |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
        return cls(**{"output_dim": _PUBLISHED[name], **changes})


_WHOLE = ("z_dim", "class_embed_dim", "channel_width", "n_stats")
