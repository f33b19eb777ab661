"""What a compiled layer keeps for its backward pass, and that computing the rest again changes nothing."""

import torch
from torch import Tensor
from torch._functorch import config as functorch

from dflash_model.drafter import rope_tables
from support.tiny import tiny_config, tiny_drafter


def run(budget: float) -> tuple[int, list[Tensor]]:
    """Bytes kept beside inputs and weights, and output and gradients of a layer."""
    layer = tiny_drafter(tiny_config()).layers[0]
    torch.manual_seed(0)
    width = layer.input_layernorm.weight.shape[0]
    inputs = [torch.randn(1, length, width, requires_grad=True) for length in (64, 40)]
    size = layer.self_attn.head_dim
    rope = rope_tables(torch.arange(104)[None], size, 1e4)
    given = {part.untyped_storage().data_ptr() for part in [*inputs, *layer.parameters()]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with functorch.patch(activation_memory_budget=budget):
        compiled = torch.compile(layer, dynamic=False, fullgraph=True, backend="aot_eager_decomp_partition")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = compiled(*inputs, rope, None, None)
    grads = torch.autograd.grad(out.square().sum(), [*inputs, *layer.parameters()])
    torch._dynamo.reset()
    return sum(kept.values()), [out, *grads]


def test_a_budget_of_nothing_keeps_inputs_only() -> None:
    (everything, plain), (nothing, again) = run(1.0), run(0.0)
    assert nothing < everything / 4
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
