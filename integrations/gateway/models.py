"""`GET /v1/models`: what engines say, and what clients are told."""

from __future__ import annotations

import json


def model_ids(body: bytes) -> tuple[str, ...]:
    """Return the models in an engine's answer, in its order.

    Raises
    ------
    ValueError
        It is no such answer.
    """
    try:
        return tuple(str(model["id"]) for model in json.loads(body)["data"])
    except (LookupError, TypeError) as error:
        raise ValueError(f"no list of models: {body[:100]!r}") from error
