"""The demo's other process: an agent that prefilled a request, or so it says.

It reads one JSON object a line from its standard input and answers with one each. It ends when its
input does, so it never outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import kvxfer
from kvxfer import _demo_kv as kv

Command = dict[str, Any]


def _commands() -> Iterator[Command]:
    for line in sys.stdin:
        yield json.loads(line)


def _answer(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _load(model: kv.Model, num_blocks: int) -> kvxfer.Cache:
    tensors = kv.allocate(model, model.producer_axes, num_blocks, kv.PRODUCER_BLOCK_SIZE)
    for layer, planes in enumerate(tensors.values()):
        for plane, tensor in enumerate(planes):
            tensor[...] = kv.contents(layer, plane, tensor.shape)
    return kvxfer.Cache(
        tensors,
        axes=model.producer_axes,
        planes=model.planes,
        dtype="bfloat16",
        model=model.name,
        first_head=model.first_head,
    )


def _serve(cache: kvxfer.Cache, transport: str, commands: Iterator[Command]) -> None:
    """Offer what is asked for, until the command that is no offer."""
    with kvxfer.Agent("prefill-0", listen="127.0.0.1:0", transport=transport) as agent:
        agent.register(cache)
        _answer(pid=os.getpid())
        for command in commands:
            if command["do"] != "offer":
                break
            offer = agent.offer(cache, command["blocks"], command["tokens"])
            _answer(ticket=offer.ticket)
    _answer()


def main() -> None:
    cache: kvxfer.Cache | None = None
    commands = _commands()
    for command in commands:
        if command["do"] == "load":
            cache = None  # the old one's memory comes first
            cache = _load(kv.MODELS[command["model"]], command["blocks"])
            _answer()
        elif command["do"] == "serve" and cache is not None:
            _serve(cache, command["transport"], commands)


if __name__ == "__main__":
    main()
