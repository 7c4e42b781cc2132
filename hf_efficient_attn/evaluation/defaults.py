"""The methods that the commands and `hea.calibrate` use when the user names none, and the budgets to choose from.

A method becomes one of them by the class attribute `default_rank` of its config (see `MethodConfig`). It should
approximate softmax attention and have no learned parameters, so that it is useful without training.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, NoReturn

from hf_efficient_attn.errors import UnsupportedAttentionError, shown
from hf_efficient_attn.evaluation.capture import AttentionSummary
from hf_efficient_attn.integration import refusals, settings
from hf_efficient_attn.methods import MethodConfig, available_methods, learns, make_config, method_info

_BUDGETS = (32, 64, 128, 256, 512, 1024)


class Candidate(NamedTuple):
    """A method at a budget in columns, or as it is given; `label` names the method without the budget."""

    columns: int | None  # None: as it is given
    config: MethodConfig
    label: str = ""


def default_methods(*, purpose: str | None = None) -> list[str]:
    """Names of the default methods, in the order of the registry.

    `purpose` is "compare", "demo" or "calibrate", see `MethodConfig.default_for`; None for all of them.
    """
    ranked = [info for info in map(method_info, available_methods()) if info.config_class.default_rank is not None]
    return [info.name for info in ranked if purpose is None or purpose in info.config_class.default_for]


def default_configs(purpose: Literal["compare", "calibrate"], summary: AttentionSummary) -> list[MethodConfig]:
    """Configs of the default methods for a model: "compare" gives one of each, "calibrate" the fastest first.

    In bidirectional attention "calibrate" gives all variants of each. Classifiers of pictures read the first token,
    which therefore has to attend to all tokens: methods that have global tokens get one.
    """
    is_causal = summary.is_causal
    infos = map(method_info, default_methods(purpose=purpose))
    suitable = [info for info in infos if info.causal >= is_causal and info.rectangular >= summary.is_rectangular]
    configs = [make_config(info.name) for info in suitable]
    if purpose == "calibrate":
        configs.sort(key=lambda config: config.default_rank or 0)
        variants = [(config, ({},) if is_causal else config.default_variants) for config in configs]
        configs = [make_config(config, **values) for config, several in variants for values in several]
    if summary.takes_pictures:
        configs = [make_config(one, global_tokens=1) if hasattr(one, "global_tokens") else one for one in configs]
    if summary.has_distance_bias:
        configs = [one for one in configs if one.adds_distance_bias and one.adds_causal_bias >= is_causal]
    return [one for one in configs if one.knows_lse >= summary.has_sinks]


def method_label(config: MethodConfig) -> str:
    """The name of the method, with the hyperparameters that differ from their defaults."""
    values = settings.changed_hyperparameters(config)
    return config.method + (f" ({', '.join(f'{key}={value}' for key, value in values.items())})" if values else "")


def make_candidates(
    methods: "Sequence[str | MethodConfig] | None",
    budgets: Sequence[int] | None,
    summary: AttentionSummary,
    seed: int = 0,
    *,
    standard: Sequence[int] = _BUDGETS,
    each_layer: bool = False,
) -> list[Candidate]:
    """Every method and variant at every budget below the longest sequence; raises as `calibrate` does.

    If `budgets` is None, they are `standard`, and each method as it is given is a candidate, too. With `each_layer`,
    methods without a causal form are allowed as long as some layers are not causal.
    """
    is_causal = summary.is_causal and not (each_layer and set(summary.layers) - summary.causal_layers)
    if methods is None:
        configs = default_configs("calibrate", summary._replace(is_causal=is_causal))
    else:
        configs = configs_of(methods)
        if not configs:
            raise UnsupportedAttentionError("methods is empty: leave it out for the default methods")
    refusals.check_methods(configs, is_causal, summary.is_rectangular)
    for config in filter(learns, configs):
        raise UnsupportedAttentionError(
            f"{config.method} has learned parameters, and its error before training says nothing about its error after "
            "it: leave the method out here, convert the model to it and fine-tune"
        )
    given = standard if budgets is None else budgets
    if not isinstance(given, Iterable) or not all(type(columns) is int and columns > 0 for columns in given):
        raise UnsupportedAttentionError(f"budgets={shown(given)} must be a list of integers above 0, such as [64, 128]")
    useful = [columns for columns in sorted(set(given)) if columns < summary.max_kv_len]
    if not useful:
        refuse_short(summary.max_kv_len, sorted(set(given)))
    found: dict[MethodConfig, Candidate] = {}

    def add(columns: int | None, config: MethodConfig, label: str) -> None:
        if seed and hasattr(config, "seed"):
            config = make_config(config, seed=config.seed + seed)
        # A method without a budget has the same config at all of them.
        found.setdefault(config, Candidate(columns, config, label))

    variants = [(one, values) for one in configs for values in (({},) if summary.is_causal else one.variants())]
    for columns in useful:
        for config, values in variants:
            label = method_label(make_config(config, **values))
            add(columns, make_config(config.with_budget(columns), **values), label)
    for config in configs if budgets is None else ():
        if config.to_measure().exact_length < summary.max_kv_len:
            add(None, config, method_label(config))
    return list(found.values())


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
