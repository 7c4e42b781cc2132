"""Kinds of models that are exceptions: one row of `KINDS` for each, and the names by which all others are read.

A model needs no row if its attention modules ask Transformers' attention interface, which is read from their code
(`models.uses_interface`). Everything else follows from attributes and names, by the patterns below `KINDS`. All classes
of Transformers 5.12 and 5.24 were looked through for this module.

What cannot be a row is code, and stays where it runs: a class for attention that neither asks the interface nor has the
layout of BERT (`patched`), and the bias of T5, which is recognised by its code (`distance_bias`).
"""

import functools
import re
from typing import NamedTuple

# Attributes of attention modules and models in which they hold a learned table over token positions.
POSITION_TABLES = ("position_embeddings", "wpe", "embed_positions", "position_embedding")
# The argument of attention functions with the length of a window, and the attribute of modules and configs.
WINDOW = "sliding_window"
# The argument of attention functions with the attention sinks of GPT-OSS and others, which modules hold as `sinks`.
SINKS = "s_aux"
# Names of modules of cross attention, and of their classes.
CROSS_ATTENTION = re.compile("cross|encdec|enc_dec|encoder_attn", re.I)
# Names of parameters and submodules from which models compute a bias of relative positions: `relative_attention_bias`
# (T5), `relative_position_bias` (Swin, BEiT), `linear_pos` and `pos_bias_u` (Conformer), `distance_embedding`, ...
POSITION_BIAS = re.compile(r"(^|_)rel(ative)?_|(^|_)pos(ition)?_bias|distance_embedding|^linear_pos$|^bias_[uv]$|alibi")
# Attributes by which attention modules change their scores otherwise, unless None; the last two of Doge and GLM 5.
CHANGES_OF_SCORES = {
    "sinks": "attention sinks",  # that it does not pass on as `SINKS`
    "attn_logit_softcapping": "a soft cap",
    "indexer": "a mask of the keys that each query selects",
    "prepare_dynamic_mask": "a mask of its own",
    "build_attention_mask_from_topk": "a mask of its own",
}


class Projections(NamedTuple):
    """The attributes with which an attention module, whose `scaling` is the scale of its scores, computes."""

    query: str
    key: str
    value: str
    output: str | None  # None if the module has no projection of its output
    head_dim: str
    dropout: str  # a probability, or a module that has it as `p`


class ModelKind(NamedTuple):
    """A kind of class of Transformers or of this package, and what is different with it."""

    classes: str  # a regular expression for the whole name of the class
    # An attention module without causality, for which `own_forward` computes methods from the hidden states.
    projections: Projections | None = None
    # It does not ask the attention interface; the class of the same name in `patched` does.
    is_patched: bool = False
    # It does not ask the interface, and has the projections and the arguments of BERT's attention module: the folder of
    # its model in Transformers. Its class in `patched` is made from this row.
    like_bert_in: str = ""
    # What it does with a (queries, keys) mask, in words, for which a model with it is refused.
    needs_matrix: str = ""
    # An attention module with a window of which only the mask knows: it gives no length to the attention function.
    hides_window: bool = False
    # A model that does not use the table of attention classes in its file.
    ignores_table: bool = False
    # It uses PyTorch's own attention, with a mask that Transformers makes for the implementation in its config.
    needs_exact_config: bool = False
    # An attention module, or the config of a model, whose model reads keys from the cache, which must keep them all.
    needs_cached_keys: bool = False
    # How many times the size of a head, and of a value, a query and a key have.
    size_of_keys: int = 1
    # An attribute of the config and its value, without which the row is not for a module; None for all configs.
    if_config: tuple[str, object] | None = None


_BERT = Projections("query", "key", "value", None, "attention_head_size", "dropout")
_DISTILBERT = Projections("q_lin", "k_lin", "v_lin", "out_lin", "attention_head_size", "dropout")
_VIT = Projections("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "attention_dropout")

KINDS = (
    ModelKind("(Bert|Roberta)SelfAttention", projections=_BERT),
    ModelKind("DistilBertSelfAttention", projections=_DISTILBERT),
    ModelKind("(ViT|DeiT|T2TViT)Attention", projections=_VIT),
    ModelKind("MegatronBertSelfAttention", like_bert_in="megatron_bert"),
    ModelKind("RemBertSelfAttention", like_bert_in="rembert"),
    ModelKind("TapasSelfAttention", like_bert_in="tapas"),
    ModelKind("(RoFormer|Lilt|MPNet)SelfAttention", is_patched=True),
    ModelKind("MPNetEncoder", is_patched=True),
    ModelKind("BloomAttention", is_patched=True),
    ModelKind(
        "(Gemma3|Step3p7)TextModel",  # EmbeddingGemma is such a model
        needs_matrix="composes its masks itself (use_bidirectional_attention=True)",
        if_config=("use_bidirectional_attention", True),
    ),
    ModelKind(
        "(FastSpeech2Conformer|LasrEncoder|ParakeetEncoder)ConvolutionModule",
        needs_matrix="finds the padding in a (queries, keys) mask",
    ),
    ModelKind("PixtralVisionModel", needs_matrix="makes a mask of its own that keeps pictures apart"),
    ModelKind(r"(KyutaiSpeechToText|Moonshine\w*|Moshi|NemotronAsrStreamingEncoder)Attention", hides_window=True),
    ModelKind(r"(Phimoe|Qwen2Moe|T5Gemma2Merged|EsmFold2Atom)Attention", hides_window=True),
    ModelKind(r"(\w+OcrText|DeepseekOcr2Text|\w+Audio)Attention", hides_window=True),
    ModelKind("GitVisionModel|(DeepseekOcr2|UnlimitedOcr)(VisionEncoder|Text(PreTrained)?Model)", ignores_table=True),
    ModelKind("Siglip2MultiheadAttentionPoolingHead", needs_exact_config=True),
    ModelKind("DiffusionGemmaDecoderTextAttention", hides_window=True),  # it says a window, and attends to all keys
    # DiffLlama attends to its keys twice.
    ModelKind("DiffusionGemmaEncoderTextAttention|DiffLlamaAttention|WhisperConfig", needs_cached_keys=True),
    ModelKind("ConditionalDetrDecoderCrossAttention", size_of_keys=2),  # a token and its position
    ModelKind("DoryAttention", needs_cached_keys=True, if_config=("recurrent_kv_cache_mode", "last_loop")),
)
_ORDINARY = ModelKind("")


@functools.cache
def row_named(name: str) -> ModelKind:
    """The row of a class by the name of the class; one without any difference for all others."""
    return next((kind for kind in KINDS if re.fullmatch(kind.classes, name)), _ORDINARY)


def kind_of(cls: type) -> ModelKind:
    """The row of a class."""
    return row_named(cls.__name__)


def kind_at(module: object) -> ModelKind:
    """The row of the first class of a module, or else base class, that has one, if that is for the module's config."""
    config, rows = getattr(module, "config", None), map(kind_of, type(module).__mro__)
    row = next((row for row in rows if row is not _ORDINARY), _ORDINARY)
    return row if row.if_config is None or getattr(config, row.if_config[0], None) == row.if_config[1] else _ORDINARY


def is_known_code(cls: type) -> bool:
    """Whether Transformers or this package defines a class. Another one of the same name can compute anything."""
    return cls.__module__.startswith(("transformers.models.", f"{__package__.partition('.')[0]}."))
