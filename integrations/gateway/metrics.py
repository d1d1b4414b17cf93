"""What the gateway counts; `GET /metrics` shows it."""

from __future__ import annotations

from kvxfer.serving.prometheus import Registry


class Metrics:
    """The gateway's own metrics, ``kvxfer_gateway_...``."""

    def __init__(self) -> None:
        registry = self.registry = Registry("kvxfer_gateway_")
        counter, gauge, histogram = registry.counter, registry.gauge, registry.histogram
        self.requests = counter("requests", "Answers to clients.", "path", "status")
        self.refused = counter("refused", "Requests that were not let in.", "reason")
        self.decisions = counter("decisions", "Where prompts were sent.", "place", "reason")
        self.fallbacks = counter(
            "fallbacks",
            "Prompts meant for a prefill engine that the decode engine prefilled.",
            "reason",
        )
        self.retries = counter("retries", "Requests sent to another engine.", "role", "reason")
        self.failures = counter("engine_failures", "What engines failed to do.", "engine", "kind")
        self.reprefills = counter(
            "decode_reprefill",
            "Requests whose KV did not reach the decode engine although it was prefilled.",
            "engine",
        )
        self.left = counter("clients_left", "Clients that left before the end.", "stage")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", "place")
        self.uncached_tokens = counter(
            "uncached_tokens", "Tokens of prompts that the decode engine lacked.", "place"
        )
        self.output_tokens = counter("output_tokens", "Pieces of streamed answers.", "place")
        self.promises = counter(
            "slo", "Streamed answers, by whether TTFT and TPOT were met.", "met"
        )
        self.canaries = counter("canaries", "Proofs that a pair moves KV.", "outcome")
        self.ttft = histogram("ttft_seconds", "To the first byte of an answer.", "place")
        self.tpot = histogram("tpot_seconds", "Between the pieces of a streamed answer.", "place")
        self.seconds = histogram("request_seconds", "To the end of an answer.", "place")
        self.queued = histogram("queue_seconds", "Until a request was let in.")
        self.prefill = histogram("prefill_seconds", "A prefill engine's answer.", "engine")
        self.inside = gauge("inflight", "Requests that are served.")
        self.waiting = gauge("waiting", "Requests that wait.")
        self.engine_up = gauge("engine_up", "Whether an engine is healthy.", "engine", "role")
        self.engine_open = gauge("engine_tripped", "Whether its breaker is open.", "engine", "role")
        self.engine_inflight = gauge("engine_inflight", "Requests with it.", "engine", "role")
        self.engine_tokens = gauge(
            "engine_inflight_tokens",
            "Uncached tokens sent and not yet prefilled.",
            "engine",
            "role",
        )
        self.engine_load = gauge("engine_load", "Part of its KV in use, 0 to 1.", "engine", "role")
        self.engine_rate = gauge(
            "engine_tokens_per_second", "Rate of prefill, as learnt.", "engine", "role"
        )
        self.engine_blocks = gauge(
            "engine_prefix_blocks", "Blocks it is believed to have cached.", "engine", "role"
        )
        self.pair_moves = gauge("pair_moves_kv", "Whether a canary arrived.", "prefill", "decode")
        self.prewarmed = gauge("prewarmed_prefixes", "Prefixes that are kept there.", "engine")
        self.engines = (
            self.engine_up,
            self.engine_open,
            self.engine_inflight,
            self.engine_tokens,
            self.engine_load,
            self.engine_rate,
            self.engine_blocks,
        )
