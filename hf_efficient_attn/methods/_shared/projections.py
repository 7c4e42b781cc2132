"""What the Linformer and the FLuRKA methods share: learned tables that contract a sequence to P tokens."""

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, option
from hf_efficient_attn.ops.projections import NAMES, projection_tables, start_tables

ConfigT = TypeVar("ConfigT", bound="ProjectionConfig")


@dataclass(frozen=True, kw_only=True)
class ProjectionConfig(MethodConfig):
    """Hyperparameters of the tables; `streams` are the streams of random numbers of the two Gaussian tables."""

    streams = (0, 0)
    causal = False
    rectangular = True
    learned_parameters: ClassVar[tuple[str, ...]] = NAMES

    projection_dim: int = option(256, "Contracted keys that each query attends to, P.", minimum=1, carried=True)
    max_length: int = option(
        0,
        "The longest sequence that the tables are made for, M. 0: that of the model or of the input.",
        minimum=0,
        carried=True,
    )
    share: str = option(
        "none", "'none': one table for keys and one for values. 'kv': one for both.", choices=("none", "kv"),
        carried=True,
    )  # fmt: skip
    init: str = option(
        "means",
        "Initial tables. 'means': means of segments. 'gaussian': normal numbers of variance 1/P.",
        choices=("means", "gaussian"),
        carried=True,
    )
    seed: int = option(0, "Seed of the Gaussian tables. The seed of a call does not affect them.", minimum=0)

    def with_budget(self: ConfigT, columns: int) -> ConfigT:
        """As many contracted keys as the budget has exact keys.

        To contract keys and values costs the same again if there are as many queries as keys, without an exponential.
        """
        return replace(self, projection_dim=self.check_budget(columns))


def initial_parameters(
    config: ProjectionConfig, *, num_heads: int, head_dim: int, value_dim: int, max_length: int
) -> dict[str, Tensor]:
    """`key_projection` (P, M) and, unless it is shared, `value_projection` (P, M)."""
    streams = config.streams if config.share == "none" else config.streams[:1]
    return start_tables(config.projection_dim, config.max_length or max_length, config.init, config.seed, streams)


def tables(config: ProjectionConfig, kv_len: int, options: AttentionOptions) -> list[Tensor]:
    """The tables (P, M) of keys and of values for `kv_len` tokens. They are the same if only the first one is given."""
    return projection_tables(config.method, config.projection_dim, kv_len, dict(options.parameters))
