"""Model flops: against six times the parameters, against a count by hand, and the share of a device's peak."""

import pytest

from burnish.observe.devices import peak_flops
from burnish.rl.speed import forward_flops
from burnish.testing.tiny import tiny_config


def test_a_row_worked_out_by_hand() -> None:
    """Width 8, 4 heads of 2 and 2 for keys, MLP 16, 2 layers, 96 ids: a layer has 8·8·2 + 8·4·2 + 3·8·16 = 576 weights in products."""
    config = tiny_config(width=8)
    pairs = 1 + 2 + 3
    assert forward_flops(config, lengths=[3], scored=2) == 2 * (2 * 576 * 3 + 4 * 8 * pairs) + 2 * 8 * 96 * 2


def test_long_rows_cost_more_than_short_ones_and_the_head_only_where_it_is_asked() -> None:
    config = tiny_config()
    one, two = forward_flops(config, lengths=[200], scored=0), forward_flops(config, lengths=[100, 100], scored=0)
    assert one - two == 2 * 4 * 32 * (200 * 201 / 2 - 100 * 101)
    assert forward_flops(config, lengths=[200], scored=1) - one == 2 * 32 * 96


@pytest.mark.parametrize(
    ("kind", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("TPU v5 lite", 197e12), ("cpu", None)]
)
def test_peaks_by_the_name_of_a_device(kind: str, peak: float | None) -> None:
    assert peak_flops(kind) == peak
