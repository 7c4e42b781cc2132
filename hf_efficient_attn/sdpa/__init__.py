"""Methods in place of `torch.nn.functional.scaled_dot_product_attention`, in any PyTorch model."""

from hf_efficient_attn.sdpa.replacement import SDPAReplacement as SDPAReplacement
from hf_efficient_attn.sdpa.replacement import replace_sdpa as replace_sdpa
from hf_efficient_attn.sdpa.replacement import replacements_of as replacements_of
from hf_efficient_attn.sdpa.replacement import restore_sdpa as restore_sdpa
