"""What tables, pictures and results call a checkpoint."""

from hf_efficient_attn.checkpoint import CheckedSource


def name_of(checked: CheckedSource) -> str:
    """The hub id of a checkpoint, or the end of its path; the name of its folder alone is often "model"."""
    return checked.hub_id or "/".join(checked.folder.parts[1:][-2:])
