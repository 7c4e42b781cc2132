"""A mode that shows every operator of PyTorch to a function."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Calls `see(operator, arguments, result)` after each operator."""

    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.see(operator, args, result)
        return result
