"""The methods and budgets that `hea.calibrate` and `analyze` choose from."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

from hf_efficient_attn.errors import UnsupportedAttentionError, shown
from hf_efficient_attn.evaluation.capture import AttentionSummary
from hf_efficient_attn.evaluation.defaults import default_variants
from hf_efficient_attn.integration.refusals import check_methods
from hf_efficient_attn.methods import MethodConfig, make_config

_BUDGETS = (32, 64, 128, 256, 512, 1024)


class Candidate(NamedTuple):
    """A method at a budget; `columns` is the cost per query."""

    columns: int
    config: MethodConfig


def make_candidates(
    methods: "Sequence[str | MethodConfig] | None",
    budgets: Sequence[int] | None,
    summary: AttentionSummary,
    seed: int = 0,
    *,
    each_layer: bool = False,
) -> list[Candidate]:
    """Every method at every budget below the longest sequence, the cheapest first; raises as `calibrate` does.

    With `each_layer`, methods without a causal form are allowed as long as some layers are not causal.
    """
    is_causal = summary.is_causal and not (each_layer and set(summary.layers) - summary.causal_layers)
    if methods is None:
        configs = default_variants(
            is_causal=is_causal,
            is_rectangular=summary.is_rectangular,
            takes_pictures=summary.takes_pictures,
        )
        configs = [config for config in configs if config.adds_distance_bias or not summary.has_distance_bias]
    else:
        configs = configs_of(methods)
        if not configs:
            raise UnsupportedAttentionError("methods is empty: leave it out for the default methods")
    check_methods(configs, is_causal, summary.is_rectangular)
    given = _BUDGETS if budgets is None else budgets
    if not isinstance(given, Iterable):
        raise UnsupportedAttentionError(f"budgets must be a list of integers, not {shown(given)}: write budgets=[...]")
    for columns in given:
        if isinstance(columns, bool) or not isinstance(columns, int) or columns < 1:
            raise UnsupportedAttentionError(f"a budget of {columns!r} columns is not possible; give integers above 0")
    sizes = sorted(set(given))
    useful = [columns for columns in sizes if columns < summary.max_kv_len]
    if not useful:
        refuse_short(summary.max_kv_len, sizes)
    cheapest: dict[MethodConfig, int] = {}
    for columns in useful:
        for config in configs:
            sized = config.with_budget(columns)
            if seed and hasattr(sized, "seed"):
                sized = make_config(sized, seed=sized.seed + seed)
            # A method without a budget has the same config at all of them.
            cheapest.setdefault(sized, columns)
    return [Candidate(columns, config) for config, columns in cheapest.items()]


def configs_of(methods: "Sequence[str | MethodConfig] | str | MethodConfig | None") -> list[MethodConfig]:
    """The configs of the methods to choose from, given as a list or as a single method."""
    if methods is not None and (isinstance(methods, str) or not isinstance(methods, Iterable)):
        methods = [methods]
    return [make_config(method) for method in methods or ()]


def refuse_short(longest: int, budgets: Iterable[int]) -> NoReturn:
    """Refuse sequences of at most `longest` tokens, which are within all budgets."""
    raise UnsupportedAttentionError(
        f"the longest sequence has {longest} tokens without its padding. Budgets of "
        f"{', '.join(map(str, budgets)) or 'nothing'} columns save nothing there, because a method computes a sequence "
        "within its budget exactly: give longer sequences or smaller budgets, or keep the model exact"
    )
