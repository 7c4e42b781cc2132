"""Sizes of a T2T-ViT (Yuan et al. 2021, Tokens-to-Token ViT), and the published models by name."""

import math
from collections.abc import Mapping

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from hf_efficient_attn.errors import unknown_name

TOKENS_TYPES = ("transformer", "performer")

# The authors' models/t2t_vit.py: layers, width, heads, MLP ratio. Heads of 64.
_SIZES = {"7": (7, 256, 4, 2), "10": (10, 256, 4, 2), "12": (12, 256, 4, 2),
          "14": (14, 384, 6, 3), "19": (19, 448, 7, 3), "24": (24, 512, 8, 3)}  # fmt: skip
_NAMED = {f"t2t_vit_{size}": (size, "performer") for size in _SIZES}
_NAMED |= {f"t2t_vit_t_{size}": (size, "transformer") for size in ("14", "19", "24")}
# Gupta et al. 2023, Table 6: 7 layers, 4 heads of 64, FFN 512, 4.3 M parameters. These are the sizes of t2t_vit_7. The
# paper does not say what its token stages are; here they are transformers, so that every method can stand in them too.
_NAMED |= {"t2t_vit_flurka": ("7", "transformer")}


@strict
class T2TViTConfig(PreTrainedConfig):
    """What a T2T-ViT is made of; the defaults are those of t2t_vit_t_14.

    Args:
        image_size: pixels of the pictures, one number or (height, width).
        num_channels: channels of the pictures.
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: of the backbone.
        token_dim: width of the two token stages, whose attention has one head.
        tokens_type: "transformer", whose attention any method can replace, or "performer", which is an attention of
            its own (positive random features) and stays what it is.
        t2t_kernel_sizes, t2t_strides: of the three soft splits, in pixels of the picture and then tokens of the stage
            before. Their padding is (kernel - stride + 1) // 2, so that a side that the strides divide is divided by
            them exactly: 2, 1, 1 for the published models.
        kernel_ratio: random features of a performer stage over `token_dim`.
        qkv_bias: whether the projections of the backbone have a bias; those of transformer stages never have one.
        qk_scale: what the backbone multiplies its logits with; None for 1 / sqrt(width of a head). Checkpoints trained
            through timm's older port have 1 / sqrt(hidden_size).
        hidden_dropout_prob, attention_probs_dropout_prob: of the backbone.
        drop_path_rate: probability with which the last block of the backbone is skipped in training; it grows
            linearly from 0 in the first.
        token_dropout_prob: after the attention and the MLP of the token stages; None for the published models' 0.1
            in performer stages and 0 in transformer stages.
        hidden_act, layer_norm_eps, initializer_range: as in ViT.

    Raises:
        ValueError: sizes that do not fit together, before any model is made.
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

    def __post_init__(self, **kwargs):
        # As lists, which is what they are after a round trip through JSON.
        self.t2t_kernel_sizes, self.t2t_strides = list(self.t2t_kernel_sizes), list(self.t2t_strides)
        if not isinstance(self.image_size, int):
            self.image_size = list(self.image_size)
        self._check()
        if self.token_dropout_prob is None:
            self.token_dropout_prob = 0.1 if self.tokens_type == "performer" else 0.0
        super().__post_init__(**kwargs)
        self._check_layers()

    def _check(self) -> None:
        if self.tokens_type not in TOKENS_TYPES:
            raise ValueError(unknown_name("tokens_type", self.tokens_type, TOKENS_TYPES))
        sizes = ("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        for name in (*sizes, "token_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size={self.hidden_size} is no multiple of {self.num_attention_heads} heads")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "token_dropout_prob"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name}={value} must be at least 0 and below 1")
        if int(self.token_dim * self.kernel_ratio) < 1:
            raise ValueError(
                f"kernel_ratio={self.kernel_ratio} of token_dim={self.token_dim} leaves no random feature: raise it"
            )
        kernels, strides = self.t2t_kernel_sizes, self.t2t_strides
        if len(kernels) != 3 or len(strides) != 3:
            raise ValueError(f"t2t_kernel_sizes={kernels} and t2t_strides={strides} must be three numbers each")
        for kernel, stride in zip(kernels, strides, strict=True):
            if not 1 <= stride <= kernel:
                raise ValueError(f"a kernel of {kernel} with stride {stride}: the stride must be from 1 to the kernel")
        if not isinstance(self.image_size, int) and len(self.image_size) != 2:
            raise ValueError(f"image_size={self.image_size} must be one number or (height, width)")
        self.grids()

    def _check_layers(self) -> None:
        """Stages that are performers are no layers in which a method can stand."""
        chosen = (self.efficient_attention or {}).get("layers") or []
        named = [name for entry in chosen for name in (entry["layers"] if isinstance(entry, Mapping) else [entry])]
        stages = [name for name in named if isinstance(name, str)]
        if stages and self.tokens_type == "performer":
            raise ValueError(f"efficient_attention names {stages}, but {self.attention_note}")

    @property
    def attention_note(self) -> str | None:
        """Why methods cannot stand where a user may look for them; None where they can."""
        if self.tokens_type != "performer":
            return None
        return (
            "with tokens_type='performer' the token stages are an attention of their own, which no method replaces: "
            "name indices of the backbone alone, or take a model with tokens_type='transformer', such as t2t_vit_t_14"
        )

    @classmethod
    def from_name(cls, name: str, **changes) -> "T2TViTConfig":
        """The config of a published model, with the thousand classes of ImageNet unless `changes` say otherwise.

        Args:
            name: t2t_vit_7, _10, _12, _14, _19, _24 (performer stages), t2t_vit_t_14, _19, _24 (transformer stages), or
                t2t_vit_flurka, the 4.3 M parameters of Gupta et al. 2023, Table 6, with transformer stages.
            **changes: arguments of the config that differ, such as image_size or num_labels.

        Raises:
            ValueError: an unknown name; the message names those that are known.
        """
        if name not in _NAMED:
            raise ValueError(unknown_name("T2T-ViT", name, _NAMED))
        size, tokens_type = _NAMED[name]
        layers, width, heads, ratio = _SIZES[size]
        values = {
            "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
            "intermediate_size": ratio * width, "tokens_type": tokens_type,
        }  # fmt: skip
        if not {"num_labels", "id2label"} & set(changes):
            values["num_labels"] = 1000
        return cls(**{**values, **changes})

    @staticmethod
    def names() -> tuple[str, ...]:
        """What `from_name` takes."""
        return tuple(_NAMED)

    @property
    def image_shape(self) -> tuple[int, int]:
        """(height, width) of the pictures, in pixels."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else (size[0], size[1])

    @property
    def patch_size(self) -> int:
        """Pixels of the picture from one token of the backbone to the next: the product of the strides."""
        return math.prod(self.t2t_strides)

    @property
    def t2t_paddings(self) -> list[int]:
        """Of the three soft splits, on every side."""
        pairs = zip(self.t2t_kernel_sizes, self.t2t_strides, strict=True)
        return [(kernel - stride + 1) // 2 for kernel, stride in pairs]

    def grids(self, height: int | None = None, width: int | None = None) -> list[tuple[int, int]]:
        """Rows and columns of tokens after each soft split: of the two stages and of the backbone.

        Args:
            height, width: of a picture, in pixels; None for those of `image_size`.

        Raises:
            ValueError: the picture is too small for a token.
        """
        shape = own = (height or self.image_shape[0], width or self.image_shape[1])
        grids = []
        splits = zip(self.t2t_kernel_sizes, self.t2t_strides, self.t2t_paddings, strict=True)
        for kernel, stride, padding in splits:
            shape = tuple((side + 2 * padding - kernel) // stride + 1 for side in shape)
            if min(shape) < 1:
                raise ValueError(
                    f"pictures of {own[0]} x {own[1]} pixels are too small for kernels of {self.t2t_kernel_sizes} with "
                    f"strides of {self.t2t_strides}: give larger pictures, or smaller kernels and strides"
                )
            grids.append(shape)
        return grids
