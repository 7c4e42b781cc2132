"""What users call on a model that they have: `convert` and `extend_positions`.

Transformers' model classes are imported inside the functions, since that import takes seconds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.integration.settings import EfficientAttentionConfig, as_settings
from hf_efficient_attn.methods.base import MethodConfig, available_methods, make_config
from hf_efficient_attn.models.biggan.package import package_attentions, restore_package, switch_package


def convert(
    model: nn.Module,
    method_or_config: "str | MethodConfig | EfficientAttentionConfig | dict",
    *,
    layers: Sequence | None = None,
    **hyperparameters,
) -> nn.Module:
    """Switch a model to a method, in place; the choice is saved with the model.

    Args:
        model: a Transformers model, or a module that holds some (a PEFT model, a wrapper); or a `BigGAN` of the package
            pytorch-pretrained-biggan, whose choice is saved with nothing.
        method_or_config: a method's name or config, an `EfficientAttentionConfig`, or a dictionary as in
            `config.efficient_attention`. "sdpa", "eager" and Transformers' other implementations go back: the weights
            were never touched, so the model is then what it was.
        layers: indices of the layers to switch (all others become exact), or entries of a mix; None for all layers.
        **hyperparameters: replace those of the method or its config.

    Returns:
        the same model.

    Raises:
        UnsupportedAttentionError: before anything is changed, if the method, a hyperparameter or a layer is unknown, or
            the model cannot take the method.
    """
    foreign = package_attentions(model)
    if foreign:
        return _convert_package(model, foreign, method_or_config, layers, hyperparameters)
    from hf_efficient_attn.integration.models import configs_of, switch

    roots = transformers_models(model)
    if isinstance(method_or_config, str) and method_or_config not in available_methods():
        _check_other(method_or_config, layers, hyperparameters)
        for root in roots:
            root.set_attn_implementation(method_or_config)
            for config in configs_of(root):
                config.efficient_attention = None
        return model
    switch(roots, _settings(method_or_config, layers, hyperparameters))
    return model


def _convert_package(model: nn.Module, modules: list, method_or_config, layers, hyperparameters) -> nn.Module:
    from transformers.modeling_utils import PreTrainedModel

    if any(isinstance(module, PreTrainedModel) for module in model.modules()):
        raise UnsupportedAttentionError(
            "the module holds a BigGAN of pytorch-pretrained-biggan beside Transformers models: convert each by itself"
        )
    if isinstance(method_or_config, str) and method_or_config not in available_methods():
        _check_other(method_or_config, layers, hyperparameters)
        if method_or_config not in ("sdpa", "eager"):
            raise UnsupportedAttentionError(
                f"a BigGAN of pytorch-pretrained-biggan has its own exact attention and no {method_or_config!r}: "
                "'sdpa' goes back to it"
            )
        restore_package(modules)
    else:
        switch_package(modules, _settings(method_or_config, layers, hyperparameters))
    return model


def _settings(method_or_config, layers, hyperparameters) -> EfficientAttentionConfig:
    if isinstance(method_or_config, (str, MethodConfig)):
        if layers is not None and any(isinstance(layer, dict) for layer in layers):
            return EfficientAttentionConfig(method_or_config, hyperparameters, layers)
        return EfficientAttentionConfig(make_config(method_or_config, **hyperparameters), None, layers)
    settings = as_settings(method_or_config)
    if layers is None and not hyperparameters:
        return settings
    if len(settings.entries) > 1 or (layers is not None and settings.layers is not None):
        raise UnsupportedAttentionError(
            "the configuration says already what stands in which layer: give layers and hyperparameters inside it"
        )
    changed = make_config(settings.entries[0].config, **hyperparameters)
    return EfficientAttentionConfig(changed, None, settings.layers if layers is None else layers)


def _check_other(name: str, layers, hyperparameters) -> None:
    """`name`, an implementation that is not ours, must be one of Transformers' and takes nothing else."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if name not in known:
        raise UnsupportedAttentionError(unknown_name("attention method", name, [*available_methods(), "sdpa", "eager"]))
    if layers is not None or hyperparameters:
        raise UnsupportedAttentionError(
            f"{name!r} is no method of this package and takes no layers or hyperparameters; to keep some layers "
            "exact name the others: convert(model, method, layers=[...])"
        )


def transformers_models(model: nn.Module) -> list:
    """The model, or the outermost Transformers models inside it."""
    from transformers.modeling_utils import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    found: list = []
    waiting = [model] if isinstance(model, nn.Module) else []
    while waiting:
        module = waiting.pop()
        if isinstance(module, PreTrainedModel):
            found.append(module)
        else:
            waiting += list(module.children())
    if not found:
        raise UnsupportedAttentionError(f"a {type(model).__name__} holds no Transformers model (a PreTrainedModel)")
    return found


def extend_positions(model: nn.Module, max_length: int, method: str = "tile") -> nn.Module:
    """Grow the learned position table of BERT, RoBERTa, DistilBERT or GPT-2 (and models built like them), in place.

    The config follows, so that the model saves and loads; the tokenizer has a `model_max_length` of its own.

    Args:
        model: a Transformers model, or a module that holds some.
        max_length: tokens that the model shall take. RoBERTa's table keeps its padding_idx + 1 rows beside them.
        method: "tile" repeats the table (Longformer's way, Beltagy et al. 2020, section 5), so that neighbours stay
            neighbours; "interpolate" stretches it linearly, so that position i of n keeps its relative place.

    Returns:
        the same model.

    Raises:
        UnsupportedAttentionError: before anything is changed, for a `max_length` below the present one or not an
            integer, an unknown `method`, models without a learned table over token positions, and models whose
            attention method has learned tables of the present length.
    """
    if method not in ("tile", "interpolate"):
        raise UnsupportedAttentionError(unknown_name("method of extend_positions", method, ["tile", "interpolate"]))
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise UnsupportedAttentionError(f"max_length must be a positive integer, not {max_length!r}")
    _refuse_learned_tables(model)
    tables = [table for root in transformers_models(model) for table in position_tables(root)]
    for _, embedding, _ in tables:
        present = embedding.num_embeddings - position_offset(embedding)
        if max_length < present:
            raise UnsupportedAttentionError(
                f"the model takes {present} tokens and max_length={max_length} would cut its position table; shorter "
                "sequences need no change"
            )
    for module, embedding, config in tables:
        offset, old = position_offset(embedding), embedding.num_embeddings
        rows = offset + max_length
        if rows == old:
            continue
        with torch.no_grad():
            grown = torch.cat((embedding.weight[:offset], _grow(embedding.weight[offset:], max_length, method)))
        embedding.weight = nn.Parameter(grown, requires_grad=embedding.weight.requires_grad)
        embedding.num_embeddings = rows
        _grow_buffers(module, old, rows)
        config.max_position_embeddings = rows
        for other in ("n_positions", "n_ctx"):
            if getattr(config, other, None) == old:
                setattr(config, other, rows)
    return model


def _refuse_learned_tables(model: nn.Module) -> None:
    """Tables of an attention method that are as long as the positions cannot grow with them."""
    from hf_efficient_attn.integration.learned import LearnedParameters

    for module in model.modules():
        if isinstance(module, LearnedParameters) and getattr(module.method, "max_length", None) == 0:
            name = module.method.method
            raise UnsupportedAttentionError(
                f"the model holds learned tables of {name} for {module.sizes['length']} tokens: convert it to 'sdpa', "
                f"extend its positions, and convert it to {name!r} again"
            )


def position_offset(embedding: nn.Embedding) -> int:
    """Rows before position 0: RoBERTa counts positions from padding_idx + 1."""
    return 0 if embedding.padding_idx is None else embedding.padding_idx + 1


def _grow(table: Tensor, length: int, method: str) -> Tensor:
    """(P, D) -> (length, D)."""
    if method == "tile":
        return table.repeat(-(-length // table.shape[0]), 1)[:length]
    wide = table.to(torch.promote_types(table.dtype, torch.float32)).t()[None]
    stretched = nn.functional.interpolate(wide, size=length, mode="linear", align_corners=True)
    return stretched[0].t().to(table.dtype).contiguous()


def _grow_buffers(module: nn.Module, old: int, rows: int) -> None:
    """`position_ids` counts on, `token_type_ids` stays 0; both are (1, positions)."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name == "position_ids" and buffer.shape[-1] == old:
            setattr(module, name, torch.arange(rows, device=buffer.device, dtype=buffer.dtype).expand(1, -1))
        elif name == "token_type_ids" and buffer.shape[-1] == old:
            setattr(module, name, buffer.new_zeros(1, rows))


def position_tables(root) -> list[tuple[nn.Module, nn.Embedding, object]]:
    """(module that holds the table, table, config) for every learned table over token positions.

    Such a table is an embedding called `position_embeddings` or `wpe` with as many rows as the config says.
    """
    from hf_efficient_attn.integration.models import models_in

    found = []
    for part in models_in(root):
        for module in part.modules():
            for name in ("position_embeddings", "wpe"):
                table = getattr(module, name, None)
                if not isinstance(table, nn.Embedding) or any(table is other for _, other, _ in found):
                    continue
                if table.num_embeddings == getattr(part.config, "max_position_embeddings", None):
                    found.append((module, table, part.config))
    if found:
        return found
    config, kind = root.config, type(root).__name__
    if getattr(config, "rope_parameters", None) is not None:
        reason = (
            "has rotary positions, which are computed and have no end: raise config.max_position_embeddings, and "
            "config.rope_parameters where the model shall be told to stretch them"
        )
    elif getattr(config, "image_size", None) is not None:
        reason = "counts image patches, not tokens: call it with interpolate_pos_encoding=True on larger images"
    else:
        reason = (
            "has no learned table over token positions that is known here (BERT, RoBERTa, DistilBERT, GPT-2 and models "
            "built like them have)"
        )
    raise UnsupportedAttentionError(f"extend_positions: {kind} {reason}")
