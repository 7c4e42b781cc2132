"""T2T-ViT (Yuan et al., ICCV 2021, Tokens-to-Token ViT): two token stages that shorten the sequence, then a ViT.

A soft split cuts an image into overlapping windows, which become tokens. A small transformer or performer processes the
tokens, and its outputs are arranged as an image and split again. An image of 224 pixels has 3136, 784 and finally 196
tokens. Transformer stages and the backbone use Transformers' attention interface.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GradientCheckpointingLayer, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.beit.modeling_beit import BeitDropPath
from transformers.models.vit.modeling_vit import eager_attention_forward
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from hf_efficient_attn.integration.learned import NAME as LEARNED
from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig
from hf_efficient_attn.models.t2t_vit.parts import FrozenParameters, T2TViTTokenPerformer, interpolated, mlp, sinusoids


class _SelfAttention(nn.Module):
    """Self-attention with `num_heads` heads, H, of size `head_dim`, D, through Transformers' attention interface.

    `layer` is its name in `config.efficient_attention["layers"]`, and `grid` the index of the tokens' grid in
    `config.grids()`; the last one is that of the backbone. With `dropout` it has a skip connection from the value.
    """

    is_causal = False
    attention_dropout: float = 0.0
    scaling: float

    def __init__(
        self, config: T2TViTConfig, in_dim: int, num_heads: int, head_dim: int, layer: int | str, grid: int
    ) -> None:
        super().__init__()
        self.config, self.attention_layer, self.grid = config, layer, grid
        self.num_heads, self.head_dim = num_heads, head_dim
        self.dropout: nn.Dropout | None = None
        inner, bias = num_heads * head_dim, grid == 2 and config.qkv_bias
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(in_dim, inner, bias=bias) for _ in range(3))
        self.o_proj = nn.Linear(inner, inner)

    @property
    def max_tokens(self) -> int:
        """Number of tokens of an image of the config's size; in the backbone with the class token."""
        return math.prod(self.config.grids()[self.grid]) + (self.grid == 2)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, N, in_dim) -> (B, N, H * D), and attention weights (B, H, N, N) or None."""
        query, key, value = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        heads = (x.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for x in (query, key, value))
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        options = {"dropout": self.attention_dropout if self.training else 0.0, "scaling": self.scaling, **kwargs}
        output, weights = attention(self, *heads, attention_mask, **options)
        output = self.o_proj(output.reshape(query.shape).contiguous())
        return (output if self.dropout is None else value + self.dropout(output)), weights


class T2TViTAttention(_SelfAttention):
    """Self-attention of the backbone."""

    def __init__(self, config: T2TViTConfig, index: int) -> None:
        num_heads, dim = config.num_attention_heads, config.hidden_size
        super().__init__(config, dim, num_heads, dim // num_heads, layer=index, grid=2)
        self.scaling = self.head_dim**-0.5 if config.qk_scale is None else config.qk_scale
        self.attention_dropout = config.attention_probs_dropout_prob


class T2TViTTokenAttention(_SelfAttention):
    """Self-attention of a transformer stage.

    Its single head changes the size of the tokens, so the skip connection starts from the value instead of the input.
    The logits are scaled by the size of the input, not of the head, as in the authors' models/token_transformer.py.
    """

    def __init__(self, config: T2TViTConfig, in_dim: int, index: int) -> None:
        super().__init__(config, in_dim, 1, config.token_dim, layer=f"t2t.{index}", grid=index)
        self.scaling = in_dim**-0.5
        self.dropout = nn.Dropout(config.token_dropout_prob or 0.0)


class T2TViTTokenStage(GradientCheckpointingLayer):
    """A token stage: attention or performer, then an MLP. Only the MLP has a skip connection from its input."""

    def __init__(self, config: T2TViTConfig, in_dim: int, index: int) -> None:
        super().__init__()
        dim = config.token_dim
        self.layernorm_before = nn.LayerNorm(in_dim, eps=config.layer_norm_eps)
        if config.tokens_type == "performer":
            self.mixer = T2TViTTokenPerformer(config, in_dim)
        else:
            self.attention = T2TViTTokenAttention(config, in_dim, index)
        self.layernorm_after = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.mlp = mlp(dim, dim, config.hidden_act, config.token_dropout_prob or 0.0)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """(B, N, in_dim) -> (B, N, token_dim)."""
        mixer = self.attention if hasattr(self, "attention") else self.mixer
        hidden_states, _ = mixer(self.layernorm_before(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.layernorm_after(hidden_states))


class T2TViTTokensToToken(nn.Module):
    """Three soft splits, with a token stage after each of the first two."""

    def __init__(self, config: T2TViTConfig) -> None:
        super().__init__()
        self.config = config
        channels = (config.num_channels, config.token_dim, config.token_dim)
        dims = [c * kernel**2 for c, kernel in zip(channels, config.t2t_kernel_sizes, strict=True)]
        # A soft split: (B, C, height, width) -> windows (B, C * kernel^2, N).
        sizes = zip(config.t2t_kernel_sizes, config.t2t_paddings, config.t2t_strides, strict=True)
        self.splits = nn.ModuleList(nn.Unfold(kernel, 1, padding, stride) for kernel, padding, stride in sizes)
        self.stages = nn.ModuleList(T2TViTTokenStage(config, dims[index], index) for index in range(2))
        self.projection = nn.Linear(dims[2], config.hidden_size)

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> Tensor:
        """Images (B, C, height, width) -> tokens (B, N, hidden_size)."""
        image = pixel_values
        grids = self.config.grids(*pixel_values.shape[2:])
        for index, stage in enumerate(self.stages):
            tokens = self.splits[index](image).transpose(1, 2)
            if stage.gradient_checkpointing and self.training and torch.is_grad_enabled() and not tokens.requires_grad:
                # Reentrant checkpointing computes gradients only if an input of the layer requires one.
                tokens.requires_grad_()
            image = stage(tokens, **kwargs).transpose(1, 2).unflatten(2, grids[index])
        return self.projection(self.splits[2](image).transpose(1, 2))


class T2TViTEmbeddings(FrozenParameters):
    """Tokens of the backbone: the class token and the image tokens, with position embeddings.

    The position table counts as a parameter and is saved, as in the published checkpoints, but it is never trained.
    """

    frozen = ("position_embeddings",)

    def __init__(self, config: T2TViTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens_to_token = T2TViTTokensToToken(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.position_embeddings = nn.Parameter(torch.empty(1, 1 + math.prod(config.grids()[-1]), config.hidden_size))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool | None = False, **kwargs: Any) -> Tensor:
        """Images (B, C, height, width) -> tokens (B, 1 + N, hidden_size), the class token first."""
        config, (_, channels, height, width) = self.config, pixel_values.shape
        if channels != config.num_channels:
            raise ValueError(f"the images have {channels} channels, and the model takes {config.num_channels}")
        if not interpolate_pos_encoding and (height, width) != config.image_shape:
            expected = " x ".join(map(str, config.image_shape))
            raise ValueError(
                f"the images have {height} x {width} pixels, and the model takes {expected}: resize them, call the "
                "model with interpolate_pos_encoding=True, or call its set_image_size to fine-tune it at another size"
            )
        tokens = self.tokens_to_token(pixel_values, **kwargs)
        positions = interpolated(self.position_embeddings, config.grids()[-1], config.grids(height, width)[-1])
        tokens = torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)
        return self.dropout(tokens + positions)


class T2TViTLayer(GradientCheckpointingLayer):
    """A block of the backbone: attention and MLP, each with a skip connection."""

    def __init__(self, config: T2TViTConfig, index: int) -> None:
        super().__init__()
        dim, dropout = config.hidden_size, config.hidden_dropout_prob
        self.layernorm_before = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.attention = T2TViTAttention(config, index)
        self.dropout = nn.Dropout(dropout)
        self.layernorm_after = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.mlp = mlp(dim, config.intermediate_size, config.hidden_act, dropout, inner_dropout=dropout)
        self.drop_path = BeitDropPath(config.drop_path_rate * index / max(config.num_hidden_layers - 1, 1))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """(B, 1 + N, hidden_size) -> (B, 1 + N, hidden_size)."""
        mixed, _ = self.attention(self.layernorm_before(hidden_states), **kwargs)
        hidden_states = hidden_states + self.drop_path(self.dropout(mixed))
        return hidden_states + self.drop_path(self.mlp(self.layernorm_after(hidden_states)))


class T2TViTPreTrainedModel(PreTrainedModel):
    """Base class: the authors' initial weights, and the change of the image size."""

    config: T2TViTConfig
    config_class = T2TViTConfig
    base_model_prefix = "t2t_vit"
    main_input_name = "pixel_values"
    input_modalities: str | list[str] = "image"
    supports_gradient_checkpointing = True
    _no_split_modules = ["T2TViTTokenStage", "T2TViTLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": T2TViTLayer, "attentions": T2TViTAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, T2TViTEmbeddings):
            init.trunc_normal_(module.cls_token, std=std)
            table = module.position_embeddings
            init.copy_(table, sinusoids(*table.shape[1:]).to(table.device, table.dtype))
        elif isinstance(module, T2TViTTokenPerformer):
            module.reset_features()
        else:
            super()._init_weights(module)

    @torch.no_grad()
    def set_image_size(self, image_size: int | tuple[int, int]) -> None:
        """Change the image size of the model in place, by interpolating its position table.

        This serves fine-tuning at another size, as the authors do at 384 pixels. Parameters that a method learns get
        the new size if the model is converted afterwards.

        Args:
            image_size: size in pixels, one number or (height, width).

        Raises:
            ValueError: the images are too small for a token, or a method learned parameters for the present size.
        """
        if any(LEARNED in module._modules for module in self.modules()):
            raise ValueError(
                "the model holds parameters that its attention method learned for the present image size: convert it "
                "to 'sdpa', set the size, and convert it again"
            )
        shape = (image_size, image_size) if isinstance(image_size, int) else image_size
        old, new = self.config.grids()[-1], self.config.grids(*shape)[-1]
        embeddings = self.base_model.get_submodule("embeddings")
        table = interpolated(embeddings.get_parameter("position_embeddings"), old, new)
        embeddings.position_embeddings = nn.Parameter(table.clone())
        self.config.image_size = image_size if isinstance(image_size, int) else list(image_size)


class T2TViTModel(T2TViTPreTrainedModel):
    """T2T-ViT without a classifier."""

    def __init__(self, config: T2TViTConfig) -> None:
        super().__init__(config)
        self.embeddings = T2TViTEmbeddings(config)
        self.layers = nn.ModuleList(T2TViTLayer(config, index) for index in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the module that converts images to tokens."""
        return self.embeddings.tokens_to_token

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: Tensor, interpolate_pos_encoding: bool | None = False, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Compute the hidden states of images.

        Args:
            pixel_values: (B, C, height, width).
            interpolate_pos_encoding: accept images of another size than the config's, and interpolate the position
                table.
            **kwargs: of Transformers, such as output_hidden_states and, with "eager", output_attentions. Both return
                tensors of the backbone, not of the token stages.

        Returns:
            last_hidden_state (B, 1 + N, hidden_size) after the final norm; pooler_output (B, hidden_size), its class
            token.

        Raises:
            ValueError: image size or number of channels differ from the config's.
        """
        pixel_values = pixel_values.to(self.embeddings.cls_token.dtype)
        hidden_states = self.embeddings(pixel_values, interpolate_pos_encoding, **kwargs)
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        hidden_states = self.layernorm(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=hidden_states[:, 0])


class T2TViTForImageClassification(T2TViTPreTrainedModel):
    """T2T-ViT with a linear classifier on the class token."""

    def __init__(self, config: T2TViTConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 0
        self.t2t_vit = T2TViTModel(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels) if self.num_labels else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool | None = False,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """Classify images.

        Args:
            pixel_values: (B, C, height, width).
            labels: (B,), or as `config.problem_type` requires; None computes no loss.
            interpolate_pos_encoding: as in `T2TViTModel.forward`.
            **kwargs: as in `T2TViTModel.forward`.

        Returns:
            logits (B, num_labels), and the loss if `labels` are given.
        """
        outputs = self.t2t_vit(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
