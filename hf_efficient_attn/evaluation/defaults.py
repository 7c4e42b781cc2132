"""The methods that the commands and `hea.calibrate` use when the user names none.

A method becomes one of them by the class attribute `default_rank` of its config (see `MethodConfig`). It should
approximate softmax attention and have no learned parameters, so that it is useful without training.
"""

import dataclasses

from hf_efficient_attn.methods import MethodConfig, available_methods, make_config, method_info


def default_methods(*, purpose: str | None = None, is_causal: bool = False, is_rectangular: bool = False) -> list[str]:
    """Names of the default methods that support a model's attention, in the order of the registry.

    Args:
        purpose: "compare", "demo" or "calibrate", see `MethodConfig.default_for`; None for all of them.
        is_causal: whether some of the attention is causal.
        is_rectangular: whether some of it has fewer keys than queries by construction.
    """
    infos = [method_info(name) for name in available_methods()]
    return [
        info.name
        for info in infos
        if info.config_class.default_rank is not None
        and (purpose is None or purpose in info.config_class.default_for)
        and (info.causal or not is_causal)
        and (info.rectangular or not is_rectangular)
    ]


def default_configs(
    *, is_causal: bool = False, is_rectangular: bool = False, takes_pictures: bool = False
) -> list[MethodConfig]:
    """One config of each default method to compare, in the order of the registry.

    Args:
        is_causal: as in `default_methods`.
        is_rectangular: as in `default_methods`.
        takes_pictures: whether the inputs are pictures. Their classifiers read the first token, which therefore has to
            attend to all tokens: methods that have global tokens get one.
    """
    names = default_methods(purpose="compare", is_causal=is_causal, is_rectangular=is_rectangular)
    return [_adapted(make_config(name), takes_pictures) for name in names]


def default_variants(
    *, is_causal: bool = False, is_rectangular: bool = False, takes_pictures: bool = False
) -> list[MethodConfig]:
    """Configs of the default methods to calibrate, fastest first; in bidirectional attention, all variants of each.

    The arguments are those of `default_configs`.
    """
    names = default_methods(purpose="calibrate", is_causal=is_causal, is_rectangular=is_rectangular)
    classes = sorted((method_info(name).config_class for name in names), key=lambda kind: kind.default_rank or 0)
    return [
        _adapted(make_config(kind.method, **values), takes_pictures)
        for kind in classes
        for values in (({},) if is_causal else kind.default_variants)
    ]


def _adapted(config: MethodConfig, takes_pictures: bool) -> MethodConfig:
    return make_config(config, global_tokens=1) if takes_pictures and hasattr(config, "global_tokens") else config


def method_label(config: MethodConfig) -> str:
    """The name of the method, with the hyperparameters that differ from their defaults."""
    changed = [
        f"{spec.name}={getattr(config, spec.name)}"
        for spec in dataclasses.fields(config)
        if getattr(config, spec.name) != spec.default
    ]
    return config.method + (f" ({', '.join(changed)})" if changed else "")
