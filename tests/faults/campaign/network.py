"""A host of its own for each producer, as a network namespace, and a line from it to the consumers.

Here a partition is one: packets are lost, and neither side hears of it.
"""

from __future__ import annotations

import functools
import subprocess

_WRONG = "02:00:00:00:ff:ff"  # where frames go when they shall not arrive


def _hold(command: list[str]) -> subprocess.Popen[bytes]:
    """Run something that does nothing in namespaces that `command` makes, until we are gone."""
    process = subprocess.Popen(
        [*command, "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        _, error = process.communicate()
        raise OSError(f"{' '.join(command)}: {error.decode().strip()}")
    return process


class Network:
    """Lines between the consumers' namespace and one for each of the producers."""

    def __init__(self, producers: list[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(producers, 1)}
        self._holders = {"": _hold(["unshare", "--user", "--map-root-user", "--net"])}
        try:
            self._run("", "ip link set lo up")
            for name, number in self._numbers.items():
                self._holders[name] = _hold([*self.inside(""), "unshare", "--net"])
                self._run(
                    "",
                    f"ip link add name {self._line(name)} address {self._mac(number, 1)} mtu 1500 "
                    f"type veth peer name line address {self._mac(number, 2)} "
                    f"netns {self._holders[name].pid}",
                )
                self._run("", f"ip addr add 10.77.{number}.1/24 dev {self._line(name)}")
                self._run("", f"ip link set {self._line(name)} up")
                self._run(name, "ip link set lo up")
                self._run(name, f"ip addr add 10.77.{number}.2/24 dev line")
                self._run(name, "ip link set line up")
                self.heal(name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for holder in self._holders.values():
            holder.communicate()

    def inside(self, name: str) -> list[str]:
        """Return the beginning of a command line that runs the rest of it as this agent's host."""
        holder = self._holders.get(name, self._holders[""])
        return ["nsenter", f"--target={holder.pid}", "--user", "--preserve-credentials", "--net"]

    def listen_address(self, name: str) -> str | None:
        return f"10.77.{self._numbers[name]}.2:0" if name in self._numbers else None

    def cut(self, name: str, direction: str) -> None:
        """Lose what goes "up" to the producer, "down" from it, or "both"."""
        self._send(
            name, *(_WRONG if direction in (way, "both") else None for way in ("up", "down"))
        )

    def heal(self, name: str) -> None:
        self._send(name, None, None)

    def shape(self, name: str) -> str:
        """Make the line to a producer a bad one; return in which way."""
        netem = "netem delay 2ms 2ms loss 2% reorder 25% duplicate 1%"
        if self._run("", f"tc qdisc replace dev {self._line(name)} root {netem}", check=False):
            return "delay, loss, reordering, duplicates"
        # A queue that overflows is in every kernel.
        tbf = "tbf rate 20mbit burst 4k limit 12k"
        self._run("", f"tc qdisc replace dev {self._line(name)} root {tbf}")
        return "delay, loss"

    def straighten(self, name: str) -> None:
        self._run("", f"tc qdisc delete dev {self._line(name)} root", check=False)

    def _send(self, name: str, up: str | None, down: str | None) -> None:
        """Set which address frames carry."""
        number = self._numbers[name]
        for host, device, to, mac in (
            ("", self._line(name), f"10.77.{number}.2", up or self._mac(number, 2)),
            (name, "line", f"10.77.{number}.1", down or self._mac(number, 1)),
        ):
            self._run(host, f"ip neigh replace {to} lladdr {mac} dev {device} nud permanent")

    def _line(self, name: str) -> str:
        return f"line{self._numbers[name]}"

    def _mac(self, number: int, end: int) -> str:
        return f"02:00:00:00:{number:02x}:{end:02x}"

    def _run(self, name: str, command: str, *, check: bool = True) -> bool:
        done = subprocess.run(
            [*self.inside(name), *command.split()], capture_output=True, check=False, timeout=30
        )
        if check and done.returncode:
            raise OSError(f"{command}: {done.stderr.decode().strip()}")
        return done.returncode == 0


@functools.cache
def missing() -> str | None:
    """Return why there can't be such a network here, if so."""
    try:
        Network(["probe"]).close()
    except OSError as error:
        return str(error)
    return None
