"""Where to prefill and on how many engines: decisions, cost model, simulator, planner.

Pure Python that knows nothing of transports. The gateway, the
simulator and the planner share `decide`, so what is simulated is what is run.

All durations are seconds, all rates are per second, all sizes are bytes.
"""

from kvxfer.serving.cost_model import Link, exposed_seconds, kv_bytes_per_token
from kvxfer.serving.decide import (
    Decision,
    DecodeEngine,
    Place,
    Policy,
    PrefillPool,
    Prompt,
    Reason,
    Slo,
    break_even_tokens,
    decide,
)
from kvxfer.serving.gates import Gate, Gates

__all__ = [
    "DecodeEngine",
    "Decision",
    "Gate",
    "Gates",
    "Link",
    "Place",
    "Policy",
    "PrefillPool",
    "Prompt",
    "Reason",
    "Slo",
    "break_even_tokens",
    "decide",
    "exposed_seconds",
    "kv_bytes_per_token",
]
