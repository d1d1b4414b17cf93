"""The file that says what there is: engines with their costs, the link, the SLO."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvxfer.errors import InvalidError
from kvxfer.serving.cost_model import DecodeCost, Link, PrefillCost
from kvxfer.serving.decide import Policy, Slo
from kvxfer.serving.sim import EngineSpec, Role

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What `kvxfer simulate` and `kvxfer plan` are told of."""

    engines: tuple[EngineSpec, ...]
    slo: Slo
    link: Link | None = None
    policy: Policy = Policy()

    def engine(self, role: Role) -> EngineSpec:
        """Return the kind of engine with this role."""
        for spec in self.engines:
            if spec.role is role:
                return spec
        known = ", ".join(spec.role.value for spec in self.engines)
        raise InvalidError(f"there is no {role.value} engine in the setup; there are: {known}")


def read_setup(path: str | Path) -> Setup:
    """Return the setup in a JSON file.

    Its objects are `slo`, `link`, `policy` and `engines`; the last has `prefill`, `decode` and
    `both`, as many as there are, each with `prefill` and `decode` costs. Names are those of `Slo`,
    `Link`, `Policy`, `EngineSpec`, `PrefillCost` and `DecodeCost`.

    Raises
    ------
    InvalidError
        Something is missing, unknown or impossible; the message says where.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidError(f"can't read the setup {path}: {error}") from error
    parts = _fields(data, str(path), {"engines", "slo"}, {"link", "policy"})
    engines = []
    for name, values in _mapping(parts["engines"], "engines").items():
        where = f"engines.{name}"
        if name not in {role.value for role in Role}:
            raise InvalidError(f"{where}: a role is one of {', '.join(r.value for r in Role)}")
        values = dict(_mapping(values, where))
        for part, cost in (("prefill", PrefillCost), ("decode", DecodeCost)):
            if part in values:
                values[part] = _build(cost, values[part], f"{where}.{part}")
        engines.append(_build(EngineSpec, {**values, "role": Role(name)}, where))
    return Setup(
        tuple(engines),
        _build(Slo, parts["slo"], "slo"),
        _build(Link, parts["link"], "link") if "link" in parts else None,
        _build(Policy, parts.get("policy", {}), "policy"),
    )


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidError(f"{where} is {value!r:.80}, not an object with names and values")
    return value


def _fields(value: object, where: str, needed: set[str], known: set[str]) -> Mapping[str, Any]:
    mapping = _mapping(value, where)
    missing, unknown = needed - mapping.keys(), mapping.keys() - needed - known
    if missing:
        raise InvalidError(f"{where} lacks {', '.join(sorted(missing))}")
    if unknown:
        raise InvalidError(
            f"{where} has {', '.join(sorted(unknown))}, which is not known; "
            f"known are {', '.join(sorted(needed | known))}"
        )
    return mapping


def _build(kind: type[T], value: object, where: str) -> T:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    values = _fields(value, where, needed, {field.name for field in fields} - needed)
    try:
        return kind(**values)
    except InvalidError as error:
        raise InvalidError(f"{where}: {error}") from error
    except TypeError as error:
        raise InvalidError(f"{where}: a value is of another type than it should be") from error
