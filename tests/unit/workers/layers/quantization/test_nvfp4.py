"""Codes of NVFP4 become integers, some rows at a time."""

import pytest
import torch

from tests.helpers.checkpoints.four_bits import E2M1
from workers.layers.quantization import nvfp4


@pytest.mark.parametrize("at_once", [1, 700, 1 << 22])
def test_codes_are_unpacked_in_their_order(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(nvfp4, "_BYTES_AT_ONCE", at_once)
    whole = torch.arange(256, dtype=torch.uint8).repeat(7, 2)
    numbers = torch.from_numpy(E2M1)
    for codes in (whole, whole[1:4], whole[:, 8:24]):
        (packing,) = (stored.packing for stored in nvfp4.modelopt().tensors if stored.packing is not None)
        found = packing.unpack(codes)
        assert found.dtype == torch.int8 and found.shape == (len(codes), 2 * codes.shape[1])
        torch.testing.assert_close(found[:, 0::2] / 2, numbers[(codes & 15).int()])
        torch.testing.assert_close(found[:, 1::2] / 2, numbers[(codes >> 4).int()])
