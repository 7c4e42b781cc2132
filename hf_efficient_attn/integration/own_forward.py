"""Forwards that single modules have of their own: those of methods that are cheaper from the hidden states.

A method with `forward_hidden_states` contracts the tokens before they are projected to keys and values. The attention
interface comes after these projections, so modules get a forward of their own if their row in `model_kinds` names the
projections and these are linear layers. In all others, the method contracts keys and values, with the same result up to
rounding, in 1.5 to 2 times the time (`recipes.benchmarks.flurka`).

`torch.nn.DataParallel` copies attributes to its replicas, so a module with a forward of its own binds it to them anew.
"""

import functools
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.integration import attention, settings, shards
from hf_efficient_attn.integration.model_kinds import Projections, is_known_code, kind_of
from hf_efficient_attn.methods import AttentionOptions, HiddenProjections, MethodConfig, get_method, refuse_tracing
from hf_efficient_attn.ops.tracing import draw_seed, in_graph, in_transform, refuse_second_gradient

# What `torch.nn.parallel.replicate` calls.
_REPLICATE = "_replicate_for_data_parallel"


def attach(module: nn.Module, method: MethodConfig | None) -> None:
    """Give an attention module a forward of its own if a method needs it. One that something else has set stays."""
    takes = method is not None and get_method(method.method).forward_hidden_states is not None
    if takes and _projections(module) is not None and "forward" not in vars(module):
        _bind(module)
    elif not takes and _is_bound(module):
        for name in ("forward", _REPLICATE):
            vars(module).pop(name)


def _is_bound(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) is _forward


def _bind(module: nn.Module) -> None:
    module.forward = functools.partial(_forward, module)
    setattr(module, _REPLICATE, functools.partial(_replicate, module))


def _replicate(module: nn.Module) -> nn.Module:
    replica: nn.Module = getattr(type(module), _REPLICATE)(module)
    if _is_bound(module):
        _bind(replica)
    return replica


def _projections(module: nn.Module) -> Projections | None:
    """The projections of a module of a kind that is known here and not causal, if tokens may be contracted before."""
    names = kind_of(type(module)).projections if is_known_code(type(module)) else None
    if names is None or not all(hasattr(module, name) for name in (*names, "scaling") if name is not None):
        return None
    is_linear = _is_linear(getattr(module, names.key)) and _is_linear(getattr(module, names.value))
    return names if is_linear and not getattr(module, "is_causal", True) else None


def _is_linear(project: Any) -> bool:
    """Whether a module computes what `nn.Linear` does: no other layer or adapter, and no hook that sees each token."""
    forward = getattr(project, "_old_forward", project.forward)  # accelerate keeps the one that it replaces
    has_hooks = project._forward_hooks or project._forward_pre_hooks
    return getattr(forward, "__func__", None) is nn.Linear.forward and not has_hooks


def _forward(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The forward of the class, from the hidden states where that is possible: the same output up to rounding."""
    if in_graph():  # where a call of a method is one operator
        return type(module).forward(module, hidden_states, attention_mask, **kwargs)
    name, names, location = settings.method_of(module.config), _projections(module), attention.location_of(module)
    method: Any = settings.method_at(module.config, name, location)
    form = None if method is None else get_method(method.method).forward_hidden_states
    if (
        form is None
        or names is None
        or method.compute_dtype != "auto"  # which casts queries, keys and values
        or kwargs.get("past_key_values", kwargs.get("cache")) is not None
        or getattr(module, shards.PARALLEL, None) is not None
        or attention.sharded_parameters(module)
        or ALL_ATTENTION_FUNCTIONS.get(name) is not attention.REGISTERED[str(name)]  # but of another engine
        or in_transform(hidden_states, attention.required_tensors(module, method, location.name))
    ):
        return type(module).forward(module, hidden_states, attention_mask, **kwargs)
    parts: list[Any] = [name and getattr(module, name) for name in names]
    project, key, value, output, head_dim, dropout = parts
    given = {**kwargs, "dropout": getattr(dropout, "p", dropout)}
    # The hidden states as keys (B, 1, N, W) of one head.
    attention.refuse_context_parallel(method.method, module)
    call = attention.read_call(method.method, module, location, hidden_states[:, None], attention_mask, given)
    if call.is_causal:
        return type(module).forward(module, hidden_states, attention_mask, **kwargs)
    refuse_tracing(method)
    settings.warn_beyond_calibration(module.config, str(name), hidden_states.shape[1], call.key_mask)
    query = project(hidden_states).unflatten(2, (-1, head_dim)).transpose(1, 2)  # (B, H, Nq, D)
    # As in the attention function: in training from the global generators, otherwise by the layer alone.
    seed = draw_seed(query.device) if module.training else call.seed
    if call.key_mask is not None:
        hidden_states = hidden_states.masked_fill(~call.key_mask[:, :, None], 0.0)
    parameters = attention.required_tensors(module, method, location.name)
    options = AttentionOptions(call.key_mask, False, module.scaling, call.dropout_p, seed + method.seed, parameters)
    out = form(method, query, hidden_states, HiddenProjections(key, value), options)
    out = refuse_second_gradient(out, method.method).transpose(1, 2).flatten(2)
    return (out if output is None else output(out)), None
