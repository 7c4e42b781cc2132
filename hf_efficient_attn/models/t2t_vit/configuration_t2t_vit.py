"""Configuration of T2T-ViT (Yuan et al. 2021, Tokens-to-Token ViT), and the published models by name."""

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from hf_efficient_attn.errors import check_positive, unknown_name

TOKENS_TYPES = ("transformer", "performer")

# From the authors' models/t2t_vit.py: number of layers, hidden size, number of heads, MLP ratio. head_dim is 64.
_SIZES = {"7": (7, 256, 4, 2), "10": (10, 256, 4, 2), "12": (12, 256, 4, 2),
          "14": (14, 384, 6, 3), "19": (19, 448, 7, 3), "24": (24, 512, 8, 3)}  # fmt: skip
# Gupta et al. 2023, Table 6: 7 layers, 4 heads of 64, FFN 512, 4.3 M parameters. These are the sizes of t2t_vit_7. The
# paper does not name the type of its token stages. Here they are transformers, so that they take every method too.
_NAMED = {
    **{f"t2t_vit_{size}": (size, "performer") for size in _SIZES},
    **{f"t2t_vit_t_{size}": (size, "transformer") for size in ("14", "19", "24")},
    "t2t_vit_flurka": ("7", "transformer"),
}


@strict
class T2TViTConfig(PreTrainedConfig):
    """Configuration of a T2T-ViT. The defaults are those of t2t_vit_t_14.

    Args:
        image_size: size of the images in pixels, one number or (height, width).
        num_channels: number of image channels.
        hidden_size: size of the backbone's hidden states.
        num_hidden_layers: number of blocks in the backbone.
        num_attention_heads: number of heads in the backbone.
        intermediate_size: size of the inner layer of the backbone's MLPs.
        token_dim: size of the tokens that the two token stages return; their attention has one head.
        tokens_type: "transformer" or "performer". Every method can replace the attention of a transformer stage. A
            performer stage has an attention of its own (positive random features), which no method replaces.
        t2t_kernel_sizes, t2t_strides: of the three soft splits, in pixels of the image for the first and in tokens of
            the previous stage for the others. The padding is (kernel - stride + 1) // 2, which is 2, 1, 1 for the
            published models: a height that is a multiple of the stride gives height / stride tokens.
        kernel_ratio: number of random features of a performer stage, as a multiple of `token_dim`.
        qkv_bias: whether the projections of the backbone have a bias; those of transformer stages never have one.
        qk_scale: factor of the backbone's logits. None means head_dim**-0.5; timm's older port used hidden_size**-0.5.
        hidden_dropout_prob, attention_probs_dropout_prob: dropout of the backbone.
        drop_path_rate: probability of skipping the last block of the backbone in training. It grows linearly from 0 in
            the first block.
        token_dropout_prob: dropout after the attention and the MLP of the token stages. None means the published
            models' value: 0.1 in performer stages and 0 in transformer stages.
        hidden_act, layer_norm_eps, initializer_range: as in ViT.

    Raises:
        ValueError: the sizes do not fit together.
    """

    model_type = "t2t_vit"

    image_size: int | list[int] | tuple[int, ...] = 224
    num_channels: int = 3
    hidden_size: int = 384
    num_hidden_layers: int = 14
    num_attention_heads: int = 6
    intermediate_size: int = 1152
    token_dim: int = 64
    tokens_type: str = "transformer"
    t2t_kernel_sizes: list[int] | tuple[int, ...] = (7, 3, 3)
    t2t_strides: list[int] | tuple[int, ...] = (4, 2, 2)
    kernel_ratio: float | int = 0.5
    qkv_bias: bool = False
    qk_scale: float | None = None
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    drop_path_rate: float | int = 0.0
    token_dropout_prob: float | int | None = None
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        # Lists, as a round trip through JSON returns them.
        self.t2t_kernel_sizes, self.t2t_strides = list(self.t2t_kernel_sizes), list(self.t2t_strides)
        if not isinstance(self.image_size, int):
            self.image_size = list(self.image_size)
        self._check()
        if self.token_dropout_prob is None:
            self.token_dropout_prob = 0.1 if self.tokens_type == "performer" else 0.0
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        if self.tokens_type not in TOKENS_TYPES:
            raise ValueError(unknown_name("tokens_type", self.tokens_type, TOKENS_TYPES))
        names = ("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        sizes = {name: getattr(self, name) for name in names} | {"token_dim": self.token_dim}
        sizes["token_dim * kernel_ratio (random features)"] = int(self.token_dim * self.kernel_ratio)
        for name, value in sizes.items():
            check_positive(name, value)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size={self.hidden_size} is no multiple of {self.num_attention_heads} heads")
        kernels, strides = self.t2t_kernel_sizes, self.t2t_strides
        pairs = list(zip(kernels, strides, strict=False))
        if len(kernels) != 3 or len(strides) != 3 or not all(1 <= stride <= kernel for kernel, stride in pairs):
            raise ValueError(
                f"t2t_kernel_sizes={kernels} and t2t_strides={strides} must be three numbers each, and each stride "
                "from 1 to the size of its kernel"
            )
        if not isinstance(self.image_size, int) and len(self.image_size) != 2:
            raise ValueError(f"image_size={self.image_size} must be one number or (height, width)")
        self.grids()

    @property
    def attention_note(self) -> str | None:
        """Explanation for error messages why the token stages take no method; None if they do."""
        if self.tokens_type != "performer":
            return None
        return (
            "with tokens_type='performer' the token stages have an attention of their own, which no method replaces: "
            "name layers of the backbone only, or use a model with tokens_type='transformer', such as t2t_vit_t_14"
        )

    @classmethod
    def from_name(cls, name: str, **changes: Any) -> "T2TViTConfig":
        """Return the configuration of a published model, by default with ImageNet's thousand classes.

        Args:
            name: t2t_vit_7, _10, _12, _14, _19, _24 (performer stages), t2t_vit_t_14, _19, _24 (transformer stages), or
                t2t_vit_flurka, the model with 4.3 M parameters of Gupta et al. 2023, Table 6, with transformer stages.
            **changes: arguments of the configuration that differ, such as image_size or num_labels.

        Raises:
            ValueError: the name is unknown; the message lists the known names.
        """
        if name not in _NAMED:
            raise ValueError(unknown_name("T2T-ViT", name, _NAMED))
        size, tokens_type = _NAMED[name]
        num_layers, hidden_size, num_heads, mlp_ratio = _SIZES[size]
        values: dict[str, Any] = {
            "num_hidden_layers": num_layers, "hidden_size": hidden_size, "num_attention_heads": num_heads,
            "intermediate_size": mlp_ratio * hidden_size, "tokens_type": tokens_type,
        }  # fmt: skip
        if not {"num_labels", "id2label"} & set(changes):
            values["num_labels"] = 1000
        return cls(**{**values, **changes})

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names that `from_name` takes."""
        return tuple(_NAMED)

    @property
    def image_shape(self) -> tuple[int, int]:
        """(height, width) of the images, in pixels."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else (size[0], size[1])

    @property
    def patch_size(self) -> int:
        """Distance in pixels between tokens of the backbone: the product of the strides."""
        return math.prod(self.t2t_strides)

    @property
    def t2t_paddings(self) -> list[int]:
        """Padding of the three soft splits, on each side."""
        pairs = zip(self.t2t_kernel_sizes, self.t2t_strides, strict=True)
        return [(kernel - stride + 1) // 2 for kernel, stride in pairs]

    def grids(self, height: int | None = None, width: int | None = None) -> list[tuple[int, int]]:
        """Return the (height, width) in tokens of the two stages and of the backbone.

        The images have `height` x `width` pixels, by default those of `image_size`; too small ones raise ValueError.
        """
        height, width = image = (height or self.image_shape[0], width or self.image_shape[1])
        grids = []
        for kernel, stride, padding in zip(self.t2t_kernel_sizes, self.t2t_strides, self.t2t_paddings, strict=True):
            height, width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
            if min(height, width) < 1:
                raise ValueError(
                    f"images of {image[0]} x {image[1]} pixels are too small for kernels of {self.t2t_kernel_sizes} "
                    f"with strides of {self.t2t_strides}: use larger images, or smaller kernels and strides"
                )
            grids.append((height, width))
        return grids
