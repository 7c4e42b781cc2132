"""`hf-efficient-attn crossover`."""

import textwrap
from typing import Annotated

import typer

from hf_efficient_attn.cli import common

_LONGEST = 1_000_000
_LEGEND = (
    "From this many tokens on {method} with its default hyperparameters is faster than exact attention here: in small "
    "calls, of {small} heads of 64 together in all sequences of a batch, and in large ones, of {large}. The lengths of "
    "other calls follow from these two. Another measurement may differ by a tenth."
)
_AUTO = (
    "auto with its default hyperparameters is exact in longer sequences, too: up to as many tokens as the last columns "
    "say, in large calls with heads of 64 or 32 dimensions. Its columns cost more than those of {method}, and its "
    "attempts to keep a bound must be cheap, because they may fail. In still longer sequences it approximates the "
    "heads whose bound it expects to hold, and in decoders all."
)
_method = "A method, as listed by `methods`. [default: the one that auto switches to]"


@common.command("crossover --renew", needs_models=False)
def crossover(
    method: Annotated[str | None, common.names_option(_method)] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Measure again, on an otherwise idle machine.")] = False,
    threads: common.Threads = None,
    device: common.Device = None,
    as_json: common.Json = False,
) -> None:
    """Print from which length on a method is faster than exact attention on this machine.

    The lengths of the attention `auto` follow from these, and are greater; they are printed as well. The first time,
    and with --renew, they are measured, which takes some seconds, and stored in $HEA_CACHE, or else in
    hf_efficient_attn in $XDG_CACHE_HOME or ~/.cache. Until this command has run, models use built-in lengths.
    """
    from hf_efficient_attn.evaluation import crossover as measured
    from hf_efficient_attn.evaluation.timing import use_threads
    from hf_efficient_attn.io.writing import check_writable
    from hf_efficient_attn.methods import crossover as lengths
    from hf_efficient_attn.methods import make_config, method_info

    default = make_config("auto").switches_to
    method = default if method is None else method
    is_default = method == default
    method_info(method)  # refuses unknown names
    where = common.parse_device(device)
    with use_threads(threads):
        path, machine = measured.cache_file(), measured.machine_name(where)
        found = None if renew else measured.measured_table(method, where)
        is_new = found is None
        if found is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            check_writable(path)  # before the work
            found = measured.measure_crossover(method, where)
            measured.store_crossover(method, where, found)
        measured.register()
        of_auto = measured.lengths_of_auto(where, found) if is_default else {}
    if as_json:
        rows = {name: one._asdict() for name, one in found.items()}
        values = {"method": method, "machine": machine, "file": str(path), "measured_now": is_new, "lengths": rows}
        common.print_json(values | ({"auto_exact_up_to": of_auto} if is_default else {}))
        return
    typer.echo(f"{machine}\n")
    titles = ["calls", "small", "large", *(f"auto, {dim}" for dim in (64, 32) if is_default)]
    # Of a length that no text has it is enough to know that.
    lines = [
        [name, *(n if n <= _LONGEST else f">{_LONGEST}" for n in (*one, *of_auto.get(name, {}).values()))]
        for name, one in found.items()
    ]
    typer.echo(common.table(titles, lines))
    small, large = (size // 64 for size in (lengths.SMALL_DIM, lengths.LARGE_DIM))
    for text in (_LEGEND, _AUTO)[: 1 + is_default]:
        typer.echo("\n" + textwrap.fill(text.format(method=method, small=small, large=large), 100))
    source = (
        "Measured now, and written to {}" if is_new else "Measured before, and read from {}. --renew measures again."
    )
    typer.echo("\n" + source.format(path))
