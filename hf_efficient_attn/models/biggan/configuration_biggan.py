"""Configuration of BigGAN-deep's generator (Brock, Donahue and Simonyan 2019, appendix B, tables 7 to 9)."""

from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from hf_efficient_attn.errors import check_positive, unknown_name
from hf_efficient_attn.models.imagenet import imagenet_labels

logger = logging.get_logger(__name__)

# The blocks, from 4 x 4 on: (doubles the resolution, input channels, output channels), in multiples of channel_width.
_START = ((False, 16, 16), (True, 16, 16), (False, 16, 16), (True, 16, 8), (False, 8, 8))
_LAYERS = {
    128: (*_START, (True, 8, 4), (False, 4, 4), (True, 4, 2), (False, 2, 2), (True, 2, 1)),
    256: (*_START, (True, 8, 8), (False, 8, 8), (True, 8, 4), (False, 4, 4), (True, 4, 2), (False, 2, 2), (True, 2, 1)),
}
_LAYERS[512] = (*_LAYERS[256], (False, 1, 1), (True, 1, 1))
# The published weights have the names of the PyPI package pytorch-pretrained-biggan.
_PUBLISHED = {f"biggan-deep-{resolution}": resolution for resolution in _LAYERS}
START_SIZE, START_CHANNELS, REDUCTION = 4, 16, 4


class BigGANConfig(PreTrainedConfig):
    """Configuration of a `BigGANModel`. The defaults are those of BigGAN-deep at 128 pixels.

    The fields up to `n_stats` are those of `config.json` in the layout of pytorch-pretrained-biggan, which
    `BigGANConfig.from_pretrained` reads. The model has one attention layer with one head, so `num_attention_heads` is
    1.

    Args:
        output_dim: height and width of the images in pixels. Defaults to what `layers` gives.
        z_dim: size of the noise vector, and of the class embedding.
        class_embed_dim: part of the layout, but unused: the class embedding has the size of the noise vector.
        channel_width: output channels of the last block. The channels of all blocks are multiples of it.
        num_classes: number of classes. It equals `num_labels` and the length of `id2label`, which may hold names.
        layers: (doubles the resolution, input channels, output channels) of each block, with channels in multiples of
            `channel_width`, 16 at first. Defaults to the published blocks for an `output_dim` of 128, 256 or 512.
        attention_layer_position: index of the block that the attention layer precedes.
        eps: added to variances and in the spectral norm.
        n_stats: number of rows in the tables of batch normalization statistics, for truncations from 0 to 1.
        spectral_norm: False stores plain weights: the weights of a checkpoint with spectral norm are divided by it on
            loading. True keeps the spectral norm as `torch.nn.utils.parametrizations.spectral_norm`, for training.
        initializer_range: standard deviation of new weights.

    Raises:
        ValueError: the sizes do not form a network.
    """

    model_type = "biggan"
    num_attention_heads: ClassVar[int] = 1
    # `num_labels` is computed from `id2label`, so the three numbers cannot differ.
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

    def __post_init__(self, **kwargs: Any) -> None:
        counts = {key: kwargs.pop(key, None) for key in ("num_classes", "num_labels")}
        counts["len(id2label)"] = None if self.id2label is None else len(self.id2label)
        given = {key: value for key, value in counts.items() if value is not None}
        if len(set(given.values())) > 1:
            raise ValueError(f"the number of classes is given twice, with different values: {given}")
        num_classes = next(iter(given.values()), 1000)
        sizes = {key: getattr(self, key) for key in ("z_dim", "class_embed_dim", "channel_width", "n_stats")}
        for name, value in {**sizes, "num_classes": num_classes}.items():
            check_positive(name, value, least=2 if name == "n_stats" else 1)
        check_positive("eps", self.eps, is_count=False)
        if self.layers is None:
            self.layers = _LAYERS.get(128 if self.output_dim is None else self.output_dim)
        if self.layers is None:
            raise ValueError(
                f"output_dim={self.output_dim!r} is none of the published {[*_LAYERS]}: for other resolutions give "
                "layers as well"
            )
        # Lists, as JSON returns them.
        self.layers = [list(layer) for layer in self.layers]
        self._check_layers(self.layers)
        super().__post_init__(num_labels=num_classes, **kwargs)

    def _check_layers(self, layers: list[list[Any]]) -> None:
        """Check that blocks, skip connections and the generator's first and last layer fit together."""
        channels = START_CHANNELS
        for index, layer in enumerate(layers):
            # A block with fewer output channels drops the upper half of the channels of its skip connection.
            if len(layer) != 3 or layer[1] != channels or layer[2] not in (channels, channels / 2):
                raise ValueError(
                    f"layers[{index}] must be [doubles the resolution, input channels, output channels], take "
                    f"{channels} channels and keep or halve them, not {layer!r}"
                )
            layer[0], channels = bool(layer[0]), layer[2]
        if channels != 1:
            raise ValueError(f"the last of layers must end with 1 times channel_width, not {channels}")
        position = self.attention_layer_position
        if position not in range(len(layers)):
            raise ValueError(f"attention_layer_position={position!r} is none of the {len(layers)} layers")
        if self.attention_channels < 8:
            raise ValueError(
                f"attention has {self.attention_channels} channels and needs 8: raise channel_width or move attention "
                "to an earlier layer"
            )
        given, self.output_dim = self.output_dim, self._resolution(len(layers))
        if given not in (None, self.output_dim):
            # pytorch-pretrained-biggan never reads output_dim, so its files may hold any value.
            logger.warning(f"output_dim={given} is taken as {self.output_dim}, the resolution that layers give")

    @property
    def blocks(self) -> list[tuple[bool, int, int]]:
        """(doubles the resolution, input channels, output channels) of each block, with channels as plain counts."""
        return [(up, self.channel_width * c_in, self.channel_width * c_out) for up, c_in, c_out in self.layers or ()]

    def _resolution(self, num_blocks: int) -> int:
        """Height and width in pixels after the first `num_blocks` blocks."""
        return START_SIZE * 2 ** sum(up for up, _, _ in self.blocks[:num_blocks])

    @property
    def attention_resolution(self) -> int:
        """Height and width of the attention layer's input: its square is the number of queries, four times the keys."""
        return self._resolution(self.attention_layer_position)

    @property
    def attention_channels(self) -> int:
        """Channels of the attention layer's input: queries and keys have an eighth of them, values have half."""
        return self.blocks[self.attention_layer_position][1]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, with `num_classes`."""
        return {**super().to_dict(), "num_classes": self.num_classes}

    @classmethod
    def from_name(cls, name: str, **changes: Any) -> "BigGANConfig":
        """Return the configuration of a published architecture.

        Args:
            name: "biggan-deep-128", "biggan-deep-256" or "biggan-deep-512". By default `id2label` holds the names of
                ImageNet's classes.
            **changes: other fields of the configuration.

        Raises:
            ValueError: the name is unknown.
        """
        if name not in _PUBLISHED:
            raise ValueError(unknown_name("BigGAN", name, list(_PUBLISHED)))
        if not {"num_classes", "num_labels", "id2label"} & set(changes):
            labels = imagenet_labels()
            changes |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
        return cls(**{"output_dim": _PUBLISHED[name], **changes})
