"""`python -m hf_efficient_attn`: the same as the command hf-efficient-attn."""

from hf_efficient_attn.cli import main

if __name__ == "__main__":
    main()
