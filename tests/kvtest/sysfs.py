"""The parts of /sys that say where the fake adapters and the fake GPUs are."""

from __future__ import annotations

from pathlib import Path

CUDA = ("0000:3b:00.0", "0000:3c:00.0")
HIP = ("0000:c1:00.0", "0000:c2:00.0")


class Sysfs:
    """Adapter ``fake<i>`` is below one switch with the GPUs ``CUDA[i]`` and ``HIP[i]``.

    The switches are on a processor each.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        for index in range(2):
            switch = f"pci0000:{index}0/0000:{index}0:01.0/0000:{index}1:00.0"
            for number, link in enumerate(
                [
                    f"class/infiniband/fake{index}/device",
                    f"bus/pci/devices/{CUDA[index]}",
                    f"bus/pci/devices/{HIP[index]}",
                ]
            ):
                address = link.rpartition("/")[2] if number else f"0000:{index}3:00.0"
                self.add(f"{switch}/0000:{index}2:0{number}.0/{address}", index, link)

    def add(self, device: str, numa_node: int, link: str) -> None:
        """Add a device at a path below ``devices``, and a link to it."""
        folder = self.root / "devices" / device
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{numa_node}\n")
        (self.root / link).parent.mkdir(parents=True, exist_ok=True)
        (self.root / link).symlink_to(folder)

    def hide(self, address: str) -> None:
        """Remove the link to a device of the PCI bus."""
        (self.root / "bus/pci/devices" / address).unlink()
