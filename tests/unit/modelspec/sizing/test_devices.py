"""Published devices, and users' changes of them."""

from __future__ import annotations

import pytest

from torchrelay.modelspec.sizing.devices import DeviceFault, devices_named, published_devices, with_own_devices

OWN = "memory_bytes = 1e9\nbytes_per_s = 1e9\nflops = 1e9\nflops_8bit = 1e9\nlink_bytes_per_s = 0\n"


def test_published_devices_are_plausible() -> None:
    devices = published_devices()
    assert len({device.name for device in devices}) == len(devices) >= 12
    for device in devices:
        assert 1e9 < device.memory_bytes < 1e12 and device.flops <= device.flops_8bit
        assert 0 < device.price < 20  # type: ignore[operator]
        assert 20 < device.flops / device.bytes_per_s < 1000  # of all devices that compute models today


def test_a_family_is_named_by_its_beginning() -> None:
    names = [device.name for device in devices_named(published_devices(), "h100")]
    assert names == ["h100_sxm", "h100_pcie"]
    assert [device.name for device in devices_named(published_devices(), "l4")] == ["l4"]
    with pytest.raises(DeviceFault, match="known are b200, h200"):
        devices_named(published_devices(), "h99")


def test_a_price_alone_leaves_rates_published() -> None:
    devices = {device.name: device for device in with_own_devices(f"[t4]\nprice = 0\n[mine]\n{OWN}")}
    assert (devices["t4"].price, devices["t4"].origin) == (0, "published")
    assert (devices["mine"].price, devices["mine"].origin) == (None, "file")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[t4", "the file is not TOML"),
        ("t4 = 3", "t4"),
        ("[t4]\ncost = 3", "t4.cost"),
        ('[t4]\nprice = "3"', "t4.price"),
        ("[t4]\nprice = -1", "t4.price"),
        ("[t4]\nflops = 0", "t4.flops"),
        ("[t4]\nflops = nan", "t4.flops"),
        ("[t4]\nflops = true", "t4.flops"),
        ("[mine]\nprice = 1", "mine.memory_bytes"),
    ],
)
def test_a_fault_names_its_field(text: str, field: str) -> None:
    with pytest.raises(DeviceFault) as caught:
        with_own_devices(text)
    assert caught.value.field == field


def test_devices_together_lose_a_part_of_their_rates() -> None:
    (device,) = devices_named(published_devices(), "h200")
    two = device.times(2)
    assert two.memory_bytes == 2 * device.memory_bytes
    assert device.bytes_per_s < two.bytes_per_s < 2 * device.bytes_per_s
    assert device.times(1) is device
