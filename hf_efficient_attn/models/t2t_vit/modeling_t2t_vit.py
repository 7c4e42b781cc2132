"""T2T-ViT (Yuan et al., ICCV 2021, Tokens-to-Token ViT): two token stages that shorten the sequence, then a ViT.

A picture is cut into overlapping windows (a soft split), a small transformer or performer runs on these tokens, and its
outputs are laid out as a picture and split again: 3136, 784 and at last 196 tokens of a picture of 224 pixels.

The attention of transformer stages and of the backbone goes through Transformers' interface, so that
`attn_implementation` and `config.efficient_attention` rule it; in `layers` the stages are called "t2t.0" and "t2t.1"
and the blocks of the backbone by their index.
"""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from hf_efficient_attn.models.eager import eager_attention_forward
from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig
from hf_efficient_attn.models.t2t_vit.parts import FrozenParameters, T2TViTDropPath, T2TViTMLP
from hf_efficient_attn.models.t2t_vit.positions import interpolated, sinusoids
from hf_efficient_attn.models.t2t_vit.token_performer import T2TViTTokenPerformer


class _SelfAttention(nn.Module):
    """Projections around Transformers' attention interface.

    Args:
        width: of the hidden states; those of the output are num_heads * head_dim wide.
        layer: name of the attention in `config.efficient_attention["layers"]`.
        grid: which of `config.grids()` the tokens are laid out in.
    """

    is_causal = False
    attention_dropout = 0.0

    def __init__(
        self, config: T2TViTConfig, width: int, num_heads: int, head_dim: int, layer: "int | str", grid: int, bias: bool
    ) -> None:
        super().__init__()
        self.config, self.attention_layer, self.grid = config, layer, grid
        self.num_heads, self.head_dim = num_heads, head_dim
        inner = num_heads * head_dim
        self.q_proj = nn.Linear(width, inner, bias=bias)
        self.k_proj = nn.Linear(width, inner, bias=bias)
        self.v_proj = nn.Linear(width, inner, bias=bias)
        self.o_proj = nn.Linear(inner, inner)

    @property
    def max_tokens(self) -> int:
        """Tokens of a picture of the config's size; without the class token of the backbone."""
        return math.prod(self.config.grids()[self.grid])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs):
        """query, key, value (B, N, H D), projected -> output (B, N, H D), projected again, and weights or None."""
        shape = query.shape
        query, key, value = (x.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for x in (query, key, value))
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(shape).contiguous()), weights


class T2TViTAttention(_SelfAttention):
    """Self-attention of the backbone, (B, 1 + N, hidden_size) -> the same shape."""

    def __init__(self, config: T2TViTConfig, index: int) -> None:
        heads, width = config.num_attention_heads, config.hidden_size
        super().__init__(config, width, heads, width // heads, index, grid=2, bias=config.qkv_bias)
        self.scaling = self.head_dim**-0.5 if config.qk_scale is None else config.qk_scale
        self.attention_dropout = config.attention_probs_dropout_prob

    @property
    def max_tokens(self) -> int:
        """Tokens of a picture of the config's size, and the class token."""
        return super().max_tokens + 1

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs):
        """-> output (B, 1 + N, hidden_size), and probabilities (B, H, 1 + N, 1 + N) or None."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return self.attend(*(project(hidden_states) for project in projections), attention_mask, **kwargs)


class T2TViTTokenAttention(_SelfAttention):
    """Self-attention of a transformer stage, (B, N, width) -> (B, N, token_dim).

    One head, which changes the width, so that its value stands in for the input in the skip connection. The logits are
    scaled by the width of the input, not of the head, as in the authors' models/token_transformer.py.
    """

    def __init__(self, config: T2TViTConfig, width: int, index: int) -> None:
        super().__init__(config, width, 1, config.token_dim, f"t2t.{index}", grid=index, bias=False)
        self.scaling = width**-0.5
        self.dropout = nn.Dropout(config.token_dropout_prob)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs):
        """-> output (B, N, token_dim), and probabilities (B, 1, N, N) or None."""
        value = self.v_proj(hidden_states)
        projected = self.q_proj(hidden_states), self.k_proj(hidden_states), value
        output, weights = self.attend(*projected, attention_mask, **kwargs)
        return value + self.dropout(output), weights


class T2TViTTokenStage(GradientCheckpointingLayer):
    """One stage over tokens (B, N, width) -> (B, N, token_dim). Only the MLP has a skip connection from its input."""

    def __init__(self, config: T2TViTConfig, width: int, index: int) -> None:
        super().__init__()
        dim = config.token_dim
        self.layernorm_before = nn.LayerNorm(width, eps=config.layer_norm_eps)
        if config.tokens_type == "performer":
            self.mixer = T2TViTTokenPerformer(config, width)
        else:
            self.attention = T2TViTTokenAttention(config, width, index)
        self.layernorm_after = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.mlp = T2TViTMLP(config, dim, dim, config.token_dropout_prob)

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        mix = self.attention if hasattr(self, "attention") else self.mixer
        hidden_states, _ = mix(self.layernorm_before(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.layernorm_after(hidden_states))


class T2TViTTokensToToken(nn.Module):
    """Pictures (B, C, height, width) -> tokens (B, N, hidden_size), by three soft splits and two stages between."""

    def __init__(self, config: T2TViTConfig) -> None:
        super().__init__()
        self.config = config
        area = [kernel**2 for kernel in config.t2t_kernel_sizes]
        widths = [config.num_channels * area[0], config.token_dim * area[1], config.token_dim * area[2]]
        self.stages = nn.ModuleList(T2TViTTokenStage(config, widths[index], index) for index in range(2))
        self.projection = nn.Linear(widths[2], config.hidden_size)

    def forward(self, pixel_values: Tensor, **kwargs) -> Tensor:
        config, picture = self.config, pixel_values
        grids = config.grids(*pixel_values.shape[2:])
        for index, stage in enumerate(self.stages):
            tokens = self.split(picture, index)
            if stage.gradient_checkpointing and self.training and torch.is_grad_enabled() and not tokens.requires_grad:
                # Checkpointing that is reentrant gives no gradients to a layer none of whose inputs has one.
                tokens.requires_grad_()
            picture = stage(tokens, **kwargs).transpose(1, 2).unflatten(2, grids[index])
        return self.projection(self.split(picture, 2))

    def split(self, picture: Tensor, index: int) -> Tensor:
        """(B, C, height, width) -> windows (B, tokens, C kernel^2)."""
        config = self.config
        windows = nn.functional.unfold(
            picture,
            config.t2t_kernel_sizes[index],
            padding=config.t2t_paddings[index],
            stride=config.t2t_strides[index],
        )
        return windows.transpose(1, 2)


class T2TViTEmbeddings(FrozenParameters):
    """Pictures -> tokens of the backbone (B, 1 + N, hidden_size), the class token first, with positions.

    The table of positions is counted and saved with the parameters, as in the published checkpoints, but never trained.
    """

    frozen = ("position_embeddings",)

    def __init__(self, config: T2TViTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens_to_token = T2TViTTokensToToken(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        tokens = 1 + math.prod(config.grids()[-1])
        self.position_embeddings = nn.Parameter(torch.empty(1, tokens, config.hidden_size))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool | None = False, **kwargs) -> Tensor:
        config, (_, channels, height, width) = self.config, pixel_values.shape
        if channels != config.num_channels:
            raise ValueError(f"pictures of {channels} channels; this model takes {config.num_channels}")
        if not interpolate_pos_encoding and (height, width) != config.image_shape:
            own = " x ".join(map(str, config.image_shape))
            raise ValueError(
                f"pictures of {height} x {width} pixels; this model is one for {own}: resize them, call it with "
                "interpolate_pos_encoding=True, or call its set_image_size to fine-tune it at another size"
            )
        tokens = self.tokens_to_token(pixel_values, **kwargs)
        positions = interpolated(self.position_embeddings, config.grids()[-1], config.grids(height, width)[-1])
        tokens = torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)
        return self.dropout(tokens + positions)


class T2TViTLayer(GradientCheckpointingLayer):
    """A block of the backbone, (B, 1 + N, hidden_size) -> the same."""

    def __init__(self, config: T2TViTConfig, index: int) -> None:
        super().__init__()
        width, dropout = config.hidden_size, config.hidden_dropout_prob
        self.layernorm_before = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attention = T2TViTAttention(config, index)
        self.dropout = nn.Dropout(dropout)
        self.layernorm_after = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = T2TViTMLP(config, width, config.intermediate_size, dropout, inner_dropout=dropout)
        self.drop_path = T2TViTDropPath(config.drop_path_rate * index / max(config.num_hidden_layers - 1, 1))

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        mixed, _ = self.attention(self.layernorm_before(hidden_states), **kwargs)
        hidden_states = hidden_states + self.drop_path(self.dropout(mixed))
        return hidden_states + self.drop_path(self.mlp(self.layernorm_after(hidden_states)))


class T2TViTPreTrainedModel(PreTrainedModel):
    """What the classes below share: weights that start as the authors', and a change of the pictures' size."""

    config: T2TViTConfig
    config_class = T2TViTConfig
    base_model_prefix = "t2t_vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["T2TViTTokenStage", "T2TViTLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": T2TViTLayer, "attentions": T2TViTAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, T2TViTEmbeddings):
            init.trunc_normal_(module.cls_token, std=self.config.initializer_range)
            table = module.position_embeddings
            init.copy_(table, sinusoids(*table.shape[1:]).to(table.device, table.dtype))
        elif isinstance(module, T2TViTTokenPerformer):
            module.reset_features()
        else:
            super()._init_weights(module)

    @torch.no_grad()
    def set_image_size(self, image_size: int | tuple[int, int]) -> None:
        """Make this a model for pictures of another size, in place: its positions are interpolated once, for good.

        To fine-tune at another size, as the authors do at 384 pixels; what methods learn is made for the new size when
        the model is converted afterwards.

        Args:
            image_size: pixels, one number or (height, width).

        Raises:
            ValueError: pictures too small for a token, or a model that holds learned tables for its present size.
        """
        if any("learned_parameters" in module._modules for module in self.modules()):
            raise ValueError(
                "the model holds learned tables of its attention method for its present pictures: convert it to "
                "'sdpa', set the size, and convert it again"
            )
        size = image_size if isinstance(image_size, int) else list(image_size)
        shape = (size, size) if isinstance(size, int) else size
        old, new = self.config.grids()[-1], self.config.grids(*shape)[-1]
        embeddings = self.base_model.embeddings
        table = interpolated(embeddings.position_embeddings, old, new)
        embeddings.position_embeddings = nn.Parameter(table.clone())
        self.config.image_size = size


class T2TViTModel(T2TViTPreTrainedModel):
    """T2T-ViT without a classifier."""

    def __init__(self, config: T2TViTConfig) -> None:
        super().__init__(config)
        self.embeddings = T2TViTEmbeddings(config)
        self.layers = nn.ModuleList(T2TViTLayer(config, index) for index in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """What makes tokens of a picture."""
        return self.embeddings.tokens_to_token

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: Tensor, interpolate_pos_encoding: bool | None = False, **kwargs
    ) -> BaseModelOutputWithPooling:
        """Pictures to tokens.

        Args:
            pixel_values: (B, C, height, width).
            interpolate_pos_encoding: take pictures of another size than the config's; their positions are interpolated.
            **kwargs: of Transformers, such as output_hidden_states and, with "eager", output_attentions: both of the
                backbone, not of the token stages.

        Returns:
            last_hidden_state (B, 1 + N, hidden_size), normalised; pooler_output (B, hidden_size), its class token.

        Raises:
            ValueError: pictures of another size or with other channels than the config says.
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
        self.num_labels = config.num_labels
        self.t2t_vit = T2TViTModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool | None = False,
        **kwargs,
    ) -> ImageClassifierOutput:
        """Pictures to logits (B, num_labels), and with `labels` (B,) the loss of `config.problem_type`.

        All else is as in `T2TViTModel.forward`.
        """
        outputs = self.t2t_vit(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
