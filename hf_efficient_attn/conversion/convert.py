"""Models in memory: `convert` switches them to another attention method, `extend_positions` extends their positions."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError, check_positive, unknown_method, unknown_name
from hf_efficient_attn.integration import inputs, learned, models, switching
from hf_efficient_attn.integration.settings import EXACT, EXACT_IMPLEMENTATIONS, EfficientAttentionConfig, as_settings
from hf_efficient_attn.methods import MethodConfig, available_methods, make_config
from hf_efficient_attn.sdpa import replacements_of


def convert(
    model: nn.Module,
    method_or_config: str | MethodConfig | EfficientAttentionConfig | dict[str, Any],
    *,
    layers: Sequence[Any] | None = None,
    **hyperparameters: Any,
) -> nn.Module:
    """Switch a model to a method, in place. The settings are saved with the model.

    The switch is one transaction: if it fails for any reason, the model is as it was before.

    Args:
        model: a Transformers model; or a module that contains some, such as a PEFT model or a wrapper, all of which are
            switched.
        method_or_config: a method's name or config, an `EfficientAttentionConfig`, or a dictionary as in
            `config.efficient_attention`. "sdpa", "eager" and Transformers' other implementations switch back. The
            weights never change, so the model then is what it was before.
        layers: indices of the layers to switch (all others become exact), names such as "encoder", or entries of a mix;
            None for all layers. See `EfficientAttentionConfig`.
        **hyperparameters: replace those of the method or its config. What the model has learned with the same method
            stays, except parameters that start from other values then, such as maps of another `feature_map`.

    Returns:
        The same model.

    Raises:
        UnsupportedAttentionError: the method, a hyperparameter or a layer is unknown, the model does not support the
            method, or it shall be exact and has a replacement of `hea.replace_sdpa`.
    """
    settings = requested_settings(method_or_config, layers, hyperparameters)
    if settings is None and isinstance(model, nn.Module) and replacements_of(model):
        raise UnsupportedAttentionError(
            f"hea.replace_sdpa computes the attention of this model, so that it would not be exact with "
            f"{method_or_config!r}: end that first with hea.restore_sdpa(model)"
        )
    roots = models.transformers_models(model)

    def change_configs() -> None:
        for root in roots:
            if settings is None:
                root.set_attn_implementation(str(method_or_config))
            for config in models.configs_of(root):
                if settings is not None:
                    config._attn_implementation_internal = settings.method
                config.efficient_attention = settings

    switching.switch(roots, change_configs, holder=model)
    return model


def requested_settings(
    method_or_config: str | MethodConfig | EfficientAttentionConfig | dict[str, Any],
    layers: Sequence[Any] | None,
    hyperparameters: Mapping[str, Any],
) -> EfficientAttentionConfig | None:
    """The settings that the arguments of `convert` describe; None for one of Transformers' own implementations.

    What describes none, whatever the model is, is refused.
    """
    if isinstance(method_or_config, str) and method_or_config not in available_methods():
        if method_or_config not in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()):
            known = [*available_methods(), *EXACT_IMPLEMENTATIONS]
            raise UnsupportedAttentionError(unknown_method(method_or_config, known))
        if layers is not None or hyperparameters:
            raise UnsupportedAttentionError(
                f"{method_or_config!r} is exact attention in all layers and takes no layers or hyperparameters; to "
                "keep some layers exact, name the others: convert(model, method, layers=[...])"
            )
        return None
    if not isinstance(method_or_config, (EfficientAttentionConfig, Mapping)):
        make_config(method_or_config)  # refuses what is no method, None included
        return EfficientAttentionConfig(method_or_config, hyperparameters, layers)
    settings = as_settings(method_or_config)
    if layers is None and not hyperparameters:
        return settings
    if len(settings.entries) > 1 or (layers is not None and settings.layers is not None):
        raise UnsupportedAttentionError(
            "the settings already say which layer uses which method: give layers and hyperparameters inside them"
        )
    changed = make_config(settings.entries[0].config, **hyperparameters)
    return EfficientAttentionConfig(changed, None, settings.layers if layers is None else layers)


def extend_positions(model: nn.Module, max_length: int, method: str = "tile") -> nn.Module:
    """Extend the learned position tables of BERT, RoBERTa, DistilBERT, GPT-2, OPT, BART and similar models, in place.

    The config is updated, so that the model can be saved and loaded. The tokenizer has a `model_max_length` of its own,
    at which pipelines and `truncation=True` cut texts: set it to `max_length`, too.

    Args:
        model: a Transformers model, or a module that contains some.
        max_length: the number of tokens that the model shall take. The tables of RoBERTa (padding_idx + 1) and of OPT
            and BART (2) have some entries more.
        method: "tile" repeats the table, as Longformer does (Beltagy et al. 2020, section 5), so that neighbouring
            positions stay neighbours. "interpolate" stretches it linearly, so that position i of n keeps its relative
            position.

    Returns:
        The same model.

    Raises:
        UnsupportedAttentionError: before anything is changed, for a `max_length` that is no integer or smaller than the
            present one, an unknown `method`, models without a learned table over token positions, with an offloaded
            one, and those whose attention method has learned tables of the present length.
    """
    roots = models.transformers_models(model)
    if method not in ("tile", "interpolate"):
        raise UnsupportedAttentionError(unknown_name("method of extend_positions", method, ["tile", "interpolate"]))
    check_positive("max_length", max_length)
    for module in model.modules():
        if isinstance(module, learned.LearnedParameters) and getattr(module.method, "max_length", None) == 0:
            name = module.method.method
            raise UnsupportedAttentionError(
                f"the model has learned tables of {name} for {module.sizes['max_length']} tokens: convert it to "
                f"{EXACT!r}, extend its positions, and convert it to {name!r} again"
            )
    tables = [table for root in roots for table in position_tables(root)]
    for present in (table.num_positions for table, _ in tables):
        if max_length < present:
            raise UnsupportedAttentionError(
                f"the model takes {present} tokens, so that {max_length} would shorten its position table; shorter "
                "sequences need no change"
            )
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if is_offloaded and any(table.embedding.weight.is_meta for table, _ in tables):
        raise UnsupportedAttentionError("the position table is offloaded: extend the positions first, then offload")
    for table, config in tables:
        module, embedding = table.module, table.embedding
        offset, old_size = inputs.position_offset(embedding), embedding.num_embeddings
        new_size = offset + max_length
        if new_size == old_size:
            continue
        with torch.no_grad():
            extended = torch.cat((embedding.weight[:offset], _extend(embedding.weight[offset:], max_length, method)))
        embedding.weight = nn.Parameter(extended, requires_grad=embedding.weight.requires_grad)
        embedding.num_embeddings = new_size
        for name, buffer in list(module.named_buffers(recurse=False)):  # both are (1, positions)
            if name == "position_ids" and buffer.shape[-1] == old_size:  # counts on
                setattr(module, name, torch.arange(new_size, device=buffer.device, dtype=buffer.dtype).expand(1, -1))
            elif name == "token_type_ids" and buffer.shape[-1] == old_size:  # 0
                setattr(module, name, buffer.new_zeros(1, new_size))
        # The entries before `offset` are not counted in the config.
        old, new = (size - getattr(embedding, "offset", 0) for size in (old_size, new_size))
        config.max_position_embeddings = new
        if hasattr(config, "n_ctx"):  # in files of early versions
            config.n_ctx = new
        for part in (part for part in models.models_in(model) if part.config is config):
            for holder in part.modules():
                for name, buffer in list(holder.named_buffers(recurse=False)):
                    if buffer.dtype == torch.bool and buffer.shape[-2:] == (old, old):  # GPT-Neo's mask of pairs
                        setattr(holder, name, buffer.new_zeros(*buffer.shape[:-2], new, new))
                        part._init_weights(holder)  # which makes the mask by the config
    return model


def _extend(table: Tensor, length: int, method: str) -> Tensor:
    """Extend a table (P, D) to (length, D)."""
    if method == "tile":
        return table.repeat(-(-length // table.shape[0]), 1)[:length]
    channels = table.to(torch.promote_types(table.dtype, torch.float32)).t()[None]  # (1, D, P)
    stretched = nn.functional.interpolate(channels, size=length, mode="linear", align_corners=True)
    return stretched[0].t().to(table.dtype).contiguous()


def num_positions(model: PreTrainedModel) -> int | None:
    """The number of tokens that a text model has positions for; None if it is not limited or not known."""
    try:
        return min(table.num_positions for table, _ in position_tables(model))
    except UnsupportedAttentionError:
        # There is no table: rotary positions are computed, but the model was trained for a limited number of them.
        return getattr(model.config, "max_position_embeddings", None)


def is_rotary(config: PreTrainedConfig) -> bool:
    """Whether a model computes its positions for any number of tokens. ESM says so by another name."""
    by_name = getattr(config, "position_embedding_type", None) == "rotary"
    return by_name or getattr(config, "rope_parameters", None) is not None


def position_tables(root: PreTrainedModel) -> list[tuple[inputs.PositionTable, PreTrainedConfig]]:
    """Every learned table over token positions in a model, with the outermost config.

    A model without one is refused. The message says which positions it has instead.
    """
    parts = models.tables_of(models.models_in(root)[::-1])  # of several, the outermost is last
    if any(parts.values()):
        return [(table, part.config) for part, tables in parts.items() for table in tables]
    config = root.config
    if is_rotary(config):
        reason = (
            "they are rotary positions, computed without a table; raise max_position_embeddings in the model's config "
            "instead, and change rope_parameters, if it has them, to stretch them"
        )
    elif getattr(config, "image_size", None) is not None:
        reason = "they are those of image patches, not of tokens"
        if "interpolate_pos_encoding" in inspect.signature(root.forward).parameters:
            reason += "; larger pictures only need interpolate_pos_encoding=True in the call of the model"
    else:
        reason = (
            "no learned table over token positions is known in it; BERT, RoBERTa, DistilBERT, GPT-2, OPT, BART and "
            "similar models have one"
        )
    raise UnsupportedAttentionError(f"the positions of {type(root).__name__} cannot be extended: {reason}")
