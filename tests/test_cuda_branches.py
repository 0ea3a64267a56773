"""What is done on CUDA devices alone, executed with stand-ins for torch.cuda and on tensors without numbers."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_eopt.kernels.products import Products
from tests.optimizers.test_program import Names


def test_what_tensor_cores_round_is_made_symmetric():
    with FakeTensorMode():
        for dtype, last in ((torch.float16, "aten.add.out"), (torch.float32, "aten.add.out"), (torch.bfloat16, "mm")):
            x = torch.empty(3, 5, 8, dtype=dtype, device="cuda")
            c, out = torch.empty(2, 3, 5, 5, dtype=dtype, device="cuda").unbind()
            for multiply in (
                lambda: Products().gram(x, out=out),  # noqa: B023
                lambda: Products().addmm(c, c, c, beta=1.0, alpha=0.5, out=out),  # noqa: B023
            ):
                with Names() as names:
                    assert multiply() is out
                views = ("prim.", "aten.empty", "aten.new_empty", "aten.transpose")
                launched = [name for name in names.found if not name.startswith(views)]
                assert len(launched) == 1 + (last != "mm")
                assert "bmm" in launched[0]
                assert last in launched[-1]
