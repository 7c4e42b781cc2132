"""`hea.sequence_parallel`: a model whose processes each hold a contiguous shard of the tokens of every sequence.

Only the attention function talks to the other processes (`integration.shards`). What it has to know is agreed upon once
for each call of the model, in a forward pre-hook: the lengths of all shards, the mask of all tokens, and in training a
common seed. It reaches the attention function as the keyword argument `sequence_shards`, which layers also pass when
gradient checkpointing computes them again. A refusal must be one in all processes, because the others would wait for a
process that refuses alone. So each tells the others its problem in the first collective of a call.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import distance_bias, inputs, models, settings
from hf_efficient_attn.integration.shards import PARALLEL, SHARDS, SequenceParallel
from hf_efficient_attn.ops.shards import Shards, gather

ModelT = TypeVar("ModelT", bound=nn.Module)

# Outputs of these come from one token of a sequence, or are averages over tokens.
_WHOLE_SEQUENCE = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining")


def sequence_parallel(model: ModelT, mesh_or_group: Any) -> ModelT:
    """Divide the sequences of a model over processes; every process holds some consecutive tokens of each sequence.

    Afterwards every process calls the model with its part of `input_ids` (or `inputs_embeds`), of `attention_mask` and
    of whatever else has an entry for each token, in the order of the processes in the group. Attention sees all tokens,
    and `torch.cat` of all processes' outputs is the output of one process. The shards may have different lengths, but
    the same batch size. `position_ids` are counted over all processes unless they are given. Padding may be anywhere.
    The gradient of a parameter in one process is the part that comes from its tokens: sum them over the processes.

    A method that registers a sharded form sends only a summary of the keys (a state, landmarks, the keys of a window).
    All others exchange the tokens of all heads for all tokens of some heads, as exact attention does.

    Args:
        model: a Transformers model, or a module that contains one, whose attention is a method of this package. It is
            changed in place.
        mesh_or_group: a one-dimensional `DeviceMesh`, or a process group.

    Returns:
        The model.

    Raises:
        UnsupportedAttentionError: the model cannot be divided: exact attention of Transformers, an encoder-decoder,
            images or audio, convolutions over tokens, or an output that comes from one token of the sequence.
    """
    parts, group = models.transformers_models(model), mesh_or_group
    if hasattr(group, "get_group") and getattr(group, "ndim", 0) == 1:
        group = group.get_group()
    elif not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise UnsupportedAttentionError(
            "sequence_parallel needs a DeviceMesh of one dimension, such as mesh['sp'] of a larger one, or a process "
            f"group, not {group!r}: call torch.distributed.init_process_group first and give "
            "torch.distributed.group.WORLD"
        )
    for part in parts:
        for reason in _reasons_against(part):
            raise UnsupportedAttentionError(f"sequence_parallel: {type(part).__name__} {reason}")
    parallel = SequenceParallel(group)
    for part in parts:
        for found in models.attention_modules(part):
            setattr(found.module, PARALLEL, parallel)
        if getattr(part, PARALLEL, None) is None:
            part.register_forward_pre_hook(_begin_call, with_kwargs=True)
            part.register_forward_hook(_end_call, always_call=True)
        setattr(part, PARALLEL, parallel)
    return model


def _reasons_against(model: PreTrainedModel) -> Iterator[str]:
    layers = str(getattr(model.config, "layer_types", None))
    if any(settings.method_of(part.config) is None for part in models.models_in(model)):
        yield (
            "computes Transformers' own attention, which would see only the tokens of its process: convert it first, "
            "hf_efficient_attn.convert(model, method)"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        yield "is an encoder-decoder, whose two sequences cannot be divided: use one of the two parts by itself"
    if type(model).__name__.endswith(_WHOLE_SEQUENCE):
        yield (
            "computes its output from one token of the sequence, which only one process holds: use its base model "
            "(model.base_model) and compute the output from the hidden states of all processes"
        )
    if "input_ids" not in inspect.signature(model.forward).parameters:
        yield "does not take tokens, so that its input cannot be divided along them: use it in one process"
    if "recurrent" in layers or "linear_attention" in layers:
        yield "has layers with a state along the sequence, which would begin again in each process"
    for found in models.attention_modules(model):
        kept = {
            "a sliding window": found.location.window is not None,
            "a bias of relative positions": distance_bias.has_distance_bias(type(found.module)),
            "attention sinks": models.has_sinks(found.module),
        }
        for what in (what for what, is_kept in kept.items() if is_kept):
            yield f"has {what} in {found.location.name}, which no method divides over processes: use a model without"
    for path, module in model.named_modules():
        inner = [type(x) for x in module.modules() if models.is_attention(x)] if models.is_attention(module) else []
        convolves = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and any(n != 1 for n in module.kernel_size)
        if convolves or isinstance(module, nn.RNNBase):
            yield f"mixes tokens outside of attention, in {path} ({type(module).__name__}): use it in one process"
        elif inner and not any(map(models.uses_interface, inner)):
            yield f"computes attention that no method replaces, in {path} ({type(module).__name__}): use another model"


def _begin_call(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A forward pre-hook: agree with the other processes on the shards of the call, and tell the layers."""
    parallel: SequenceParallel = getattr(model, PARALLEL)
    given = inputs.by_name(model, args, kwargs)
    # The input (B, n) or (B, n, W); None if there is none.
    tokens: Any = given["input_ids"] if given.get("input_ids") is not None else given.get("inputs_embeds")
    parallel.current = shards = _agree_on_shards(model, parallel.group, given, tokens)
    takes = inspect.signature(model.forward).parameters
    if "position_ids" in takes and given.get("position_ids") is None:
        own = torch.arange(shards.own.start, shards.own.stop, device=tokens.device)
        kwargs["position_ids"] = own.expand(tokens.shape[0], -1)
    if "use_cache" in takes or hasattr(model.config, "use_cache"):
        kwargs["use_cache"] = False
    if any(x.kind is inspect.Parameter.VAR_KEYWORD for x in takes.values()):
        kwargs[SHARDS] = shards
    return args, kwargs


def _end_call(model: PreTrainedModel, args: Any, output: Any) -> Any:
    """A forward hook: the call is over. Its pooled output is that of the first token, which the first process holds."""
    parallel: SequenceParallel = getattr(model, PARALLEL)
    shards, parallel.current = parallel.current, None
    if shards is not None and shards.rank > 0 and getattr(output, "pooler_output", None) is not None:
        output["pooler_output"] = None
    return output


def _problems_of_call(model: PreTrainedModel, given: Mapping[str, Any], tokens: Any) -> dict[str, bool]:
    """What can be wrong with a call in this process, and whether it is."""
    mask, has_positions = given.get("attention_mask"), given.get("position_ids") is not None
    counts = any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
    counts = counts or "position_ids" not in inspect.signature(model.forward).parameters
    has_tokens = isinstance(tokens, Tensor) and tokens.ndim > 1 and 0 not in tokens.shape
    fits = mask is None or (has_tokens and isinstance(mask, Tensor) and mask.shape == tokens.shape[:2])
    caches = [given.get(name) is not None for name in ("past_key_values", "cache")]
    return {
        "no input_ids or inputs_embeds with tokens: give every process some tokens of each sequence": not has_tokens,
        "an attention_mask that is not (batch, tokens of this process): give the part of the mask for them": not fits,
        "a key-value cache or use_cache=True, which several processes cannot share: leave them out; generate with a "
        "model in one process": any(caches) or bool(given.get("use_cache")),
        "labels, from which the model would compute the loss of its own tokens alone: compute the loss from the "
        "logits, with labels that are shifted before they are divided": given.get("labels") is not None,
        "no position_ids, and the model counts positions from the token ids of the call: give the position_ids of "
        "the tokens in the whole sequence": counts and not has_positions,
    }


def _agree_on_shards(model: PreTrainedModel, group: Any, given: Mapping[str, Any], tokens: Any) -> Shards:
    """The shards of a call, the same in all processes. If the call of one of them is refused, all of them raise."""
    problems, mask = _problems_of_call(model, given, tokens), given.get("attention_mask")
    problem = next((i for i, is_wrong in enumerate(problems.values()) if is_wrong), -1)
    device = tokens.device if isinstance(tokens, Tensor) else next(model.parameters()).device
    batch, length = (0, 0) if problem == 0 else tokens.shape[:2]
    valid = torch.ones(batch, length, dtype=torch.bool, device=device)
    if mask is not None and problem < 0:
        valid = mask.to(torch.bool)
    seed = int(torch.randint(2**31 - 1, (), device="cpu")) if model.training else -1
    mine = torch.tensor([problem, batch, length, not valid.all(), seed], device=device)
    codes, batches, lengths, is_padded, seeds = zip(*gather(mine, group).tolist(), strict=True)
    for rank in (rank for rank, code in enumerate(codes) if code >= 0):
        what = list(problems)[codes[rank]]
        raise UnsupportedAttentionError(f"sequence_parallel: process {rank} gives the model {what}")
    if len(set(batches)) > 1 or len({seed < 0 for seed in seeds}) > 1:
        raise UnsupportedAttentionError(
            f"sequence_parallel: the processes have batches of {list(batches)} sequences, and "
            f"{sum(seed >= 0 for seed in seeds)} are in training: give all of them the same sequences and mode"
        )
    # Only the last process would notice by itself that the sequence is longer than a position table.
    for part in models.models_in(model) if given.get("position_ids") is None else ():
        inputs.refuse_long_input(part, {"input_ids": torch.empty(1, sum(lengths), device="meta")})
    key_mask = None
    if any(is_padded):
        whole = gather(pad(valid.to(torch.uint8), (0, max(lengths) - length)), group).to(torch.bool)
        key_mask = torch.cat([x[:, :n] for x, n in zip(whole.unbind(0), lengths, strict=True)], 1)
    return Shards(group, lengths, group.rank(), key_mask, seeds[0] if seeds[0] >= 0 else None)
