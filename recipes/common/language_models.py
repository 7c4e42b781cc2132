"""The models and tokenizers of mlm.py, clm.py and translation.py, pretrained or from scratch."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import hf_efficient_attn as hea
from hf_efficient_attn.conversion.convert import num_positions
from hf_efficient_attn.errors import unknown_name
from recipes.common.arguments import RecipeArguments, key_values, option, several


@dataclass
class ModelArguments:
    """The model and the tokenizer, pretrained or from scratch."""

    _argument_group_name = "model"

    model: str | None = option("A pretrained model: folder or hub id.", None, aliases=["--model_name_or_path"])
    model_type: str | None = option("Type of a new model instead, such as gpt2, llama, bert, roberta.", None)
    config_overrides: list[str] = several(
        "Changes of the model's config, such as hidden_size=256 num_hidden_layers=4.", "KEY=VALUE"
    )
    tokenizer: str | None = option("Folder or hub id. Default: the model's.", None)
    train_tokenizer: int | None = option(
        "Train a byte-level BPE tokenizer with SIZE tokens on the text instead.", None, metavar="SIZE"
    )
    extend_positions: int | None = option(
        "Extend the model's learned positions to N tokens, by tiling.", None, metavar="N"
    )

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.model_type):
            raise ValueError(f"give a pretrained --model or a new --model_type{', not both' if self.model else ''}")
        if self.tokenizer and self.train_tokenizer:
            raise ValueError("--tokenizer and --train_tokenizer exclude each other: give only one of them")
        if self.model and self.train_tokenizer:
            raise ValueError("--train_tokenizer needs a new --model_type: a pretrained --model has its own tokens")
        if self.model_type and not (self.tokenizer or self.train_tokenizer):
            raise ValueError("a new model needs a tokenizer: give --tokenizer FOLDER_OR_ID or --train_tokenizer SIZE")


class Kind(NamedTuple):
    """What language models of a kind have in common."""

    refusal: str  # of a model of another kind, after its type
    auto: Any  # the class of Transformers that loads and makes a model
    mapping: Any  # the configs of such models
    examples: tuple[str, ...]  # their types
    special: Mapping[str, str]  # the special tokens of a new tokenizer by their names in Transformers
    template: str | None = None  # where a new tokenizer adds them


MASKED = Kind(
    "is not a masked language model: train it with clm.py",
    transformers.AutoModelForMaskedLM,
    transformers.MODEL_FOR_MASKED_LM_MAPPING,
    ("bert", "roberta"),
    {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"},
    "[CLS] $A [SEP]",
)
CAUSAL = Kind(
    "is not a causal language model: train it with mlm.py",
    transformers.AutoModelForCausalLM,
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    ("gpt2", "llama"),
    dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>"),
)
TRANSLATION = Kind(
    "is no encoder-decoder of text: give for example --model_type marian",
    transformers.AutoModelForSeq2SeqLM,
    transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    ("marian", "bart", "t5", "m2m_100"),
    {"pad_token": "<pad>", "eos_token": "</s>"},
    "$A </s>",
)


def load_tokenizer(
    arguments: ModelArguments, args: RecipeArguments, texts: Sequence[str], kind: Kind
) -> PreTrainedTokenizerBase:
    """Load the tokenizer, or train one once and save it in the output folder."""
    if not arguments.train_tokenizer:
        return AutoTokenizer.from_pretrained(arguments.tokenizer or arguments.model)
    folder = pathlib.Path(args.output_dir)
    with args.main_process_first(desc="training the tokenizer"):
        exists = args.resume_from_checkpoint and (folder / "tokenizer.json").is_file()
        if args.local_process_index == 0 and not exists:
            train_tokenizer(texts, arguments.train_tokenizer, kind).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def train_tokenizer(texts: Iterable[str], size: int, kind: Kind) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with the special tokens of a kind of model."""
    special = list(dict.fromkeys(kind.special.values()))
    if size < 256 + len(special):
        raise ValueError(
            f"--train_tokenizer {size}: a byte-level vocabulary needs at least {256 + len(special)} tokens"
        )
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind is TRANSLATION)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if kind.template is not None:
        ids = [(token, tokenizer.token_to_id(token)) for token in kind.template.split() if token != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(single=kind.template, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **kind.special)


def load_model(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, kind: Kind) -> PreTrainedModel:
    """Load the pretrained model or make a new one, and extend its positions if requested.

    The tokenizer's `model_max_length` is set to the new number of positions. Refused are unknown types and config
    entries, models of the wrong kind, and a tokenizer with more tokens than the model.
    """
    changes = key_values("--config_overrides", arguments.config_overrides)
    if arguments.model:
        config = AutoConfig.from_pretrained(arguments.model)
    elif arguments.model_type in transformers.CONFIG_MAPPING:
        config = transformers.CONFIG_MAPPING[arguments.model_type]()
    else:
        raise ValueError(unknown_name("model type", arguments.model_type, kind.examples))
    # BERT and similar models have a causal form, but attend to the future unless the config sets is_decoder.
    encoder = kind is CAUSAL and type(config) in MASKED.mapping and not getattr(config, "is_decoder", False)
    if type(config) not in kind.mapping or encoder:
        raise ValueError(f"{config.model_type} {kind.refusal}")
    unknown = [key for key in changes if not hasattr(config, key)]
    if unknown:
        known = [key for key in config.to_dict() if not key.startswith("_")]
        raise ValueError(unknown_name(f"config entry of {config.model_type}", unknown[0], known))
    if arguments.model_type:
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        if kind is TRANSLATION:
            pad, end = ids["pad_token_id"], ids["eos_token_id"]
            ids |= {"decoder_start_token_id": pad, "bos_token_id": end, "forced_eos_token_id": None}
        model = kind.auto.from_config(type(config)(**{"vocab_size": len(tokenizer), **ids, **changes}))
    else:
        for key, value in changes.items():
            setattr(config, key, value)
        model = kind.auto.from_pretrained(arguments.model, config=config)
    vocab_size = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model only {vocab_size}: give the model's own "
            "--tokenizer"
        )
    if arguments.extend_positions:
        hea.extend_positions(model, arguments.extend_positions)
    if arguments.extend_positions or arguments.model_type:
        tokenizer.model_max_length = num_positions(model) or tokenizer.model_max_length
    return model
