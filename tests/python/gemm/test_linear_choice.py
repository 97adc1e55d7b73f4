"""Test the rule which products compute a trainable dense layer: this package's, or PyTorch's."""

import pytest
import torch


@pytest.mark.alone
def test_rule_by_measurement(capability: str) -> None:
    """Our products are chosen where they are far faster than PyTorch's, and left where they are far slower.

    Without oneDNN, PyTorch's products in bf16 take many times as long as ours. With AMX, those of oneDNN take a
    fraction of the time of our kernels without AMX.
    """

    def choice(dtype: torch.dtype) -> tuple[bool, float]:
        found: tuple[bool, float] = torch.ops.shoestring._linear_choice(dtype, torch.float32, 512, [384, 128])
        return found

    with torch.backends.mkldnn.flags(enabled=False):
        first, again = choice(torch.bfloat16), choice(torch.bfloat16)
    measures = capability in ("avx2", "avx512")
    assert first[0] == again[0] == (capability != "plain")
    assert again[1] == 0 and (first[1] == 0 or measures)
    if measures and torch.cpu._is_amx_tile_supported():
        assert not choice(torch.bfloat16)[0]
    assert not choice(torch.float16)[0]
    small = torch.ops.shoestring._linear_choice(torch.float32, torch.float32, 16, [16])
    assert tuple(small) == (False, 0.0)
