"""What megatron-core asks of CUDA even where tensors lie on the host, replaced: devices, streams,
random states. Called when all modules of megatron-core that are used are imported."""

import sys
from contextlib import contextmanager


class Nothing:
    """A CUDA stream, event or tracker of random states, of which nothing is needed."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False

    def __getattr__(self, name):
        return lambda *args, **kwargs: Nothing()

    def fork(self, *args, **kwargs):
        return self

    def get_states(self):
        return {}


def on_the_host(function):
    """Without the device that is asked for."""

    def call(*args, device=None, **kwargs):
        is_cuda = device is not None and str(device).startswith("cuda")
        return function(*args, device=None if is_cuda else device, **kwargs)

    return call


def plain_splits(function):
    """On a GPU, sizes of splits come to the host as numbers; here they are tensors already."""

    def call(out, given, output_split_sizes=None, input_split_sizes=None, **kwargs):
        sizes = (output_split_sizes, input_split_sizes)
        plain = [None if one is None else [int(n) for n in one] for one in sizes]
        return function(out, given, *plain, **kwargs)

    return call


@contextmanager
def imported_lightly():
    """For imports of megatron-core, most of whose time is that of the compiler, which its fused
    functions ask for, and of TensorBoard. The functions compute as they are written."""
    import torch

    compiled = torch.compile
    torch.compile = lambda function: function
    board = sys.modules.setdefault("torch.utils.tensorboard", None)
    try:
        yield
    finally:
        torch.compile = compiled
        if board is None:
            del sys.modules["torch.utils.tensorboard"]


def replace_cuda():
    import torch
    from megatron.core.tensor_parallel import random
    from torch.utils import _device

    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = cuda.default_stream = cuda.stream = lambda *args: Nothing()
    cuda.get_rng_state = lambda *args: torch.zeros(0, dtype=torch.uint8)
    cuda.set_rng_state = lambda *args, **kwargs: None
    # `with torch.device(...)` knows constructors by the functions themselves: those of before.
    _device._device_constructors()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    for name in ("zeros", "ones", "empty", "tensor", "full", "arange"):
        setattr(torch, name, on_the_host(getattr(torch, name)))
    torch.distributed.all_to_all_single = plain_splits(torch.distributed.all_to_all_single)
    random.model_parallel_cuda_manual_seed = lambda *args, **kwargs: None
    for name, module in list(sys.modules.items()):
        if name.startswith(("megatron.", "pentad.engine.megatron.")):
            for key in ("get_cuda_rng_tracker", "_get_cuda_rng_state", "_set_cuda_rng_state"):
                if key in vars(module):
                    setattr(module, key, lambda *args, **kwargs: Nothing())
            if "model_parallel_cuda_manual_seed" in vars(module):
                module.model_parallel_cuda_manual_seed = random.model_parallel_cuda_manual_seed
