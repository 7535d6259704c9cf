"""Prometheus metrics. Names are vLLM's where vLLM has them, so that existing dashboards work; ours begin
with minisgl.

The engine's own numbers come with each beat and are copied when somebody asks; what happens to requests is
counted here.
"""

from __future__ import annotations

from minisgl.server.ipc import Beat

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError as error:
    raise ImportError("the server needs more packages: pip install 'minisgl[server]'") from error

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# stat of a beat -> (metric, help): counters of the engine since its start, and gauges
_ENGINE_COUNTERS = {
    "prompt_tokens": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "cached_tokens": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    "preemptions": ("vllm:num_preemptions", "Requests put back to the queue to free KV pages"),
    "steps": ("minisgl:engine_steps", "Engine steps"),
    "prefix_num_evicted_pages": ("minisgl:prefix_evicted_pages", "KV pages that the prefix cache gave up"),
    "prefix_num_policy_failures": (
        "minisgl:eviction_policy_failures",
        "Times lru stood in for a failing policy",
    ),
    "expert_hits": ("minisgl:expert_cache_hits", "Routed experts found in GPU memory"),
    "expert_misses": ("minisgl:expert_cache_misses", "Routed experts that had to be fetched"),
    "expert_evictions": ("minisgl:expert_cache_evictions", "Experts that left GPU memory for another"),
    "link_bytes": ("minisgl:link_bytes", "Bytes of experts copied from host to GPU"),
    "early_bytes": ("minisgl:prefetched_bytes", "Bytes of those that were copied on a guess"),
    "useful_bytes": ("minisgl:prefetched_useful_bytes", "Bytes of those that were then needed"),
}
_ENGINE_GAUGES = {
    "num_running": ("vllm:num_requests_running", "Requests in the running batch"),
    "num_waiting": ("vllm:num_requests_waiting", "Requests waiting for pages or a place"),
    "pages_free": ("minisgl:kv_pages_free", "KV pages that hold nothing"),
    "pages_evictable": ("minisgl:kv_pages_evictable", "KV pages that hold reusable prefixes"),
    "pages_protected": ("minisgl:kv_pages_protected", "KV pages of running requests"),
}


class Metrics:
    """All metrics of one server; not shared between servers, so tests can run several in one process."""

    def __init__(self, model_name: str):
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._seen: dict[str, float] = {}
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens sent to clients")
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token"
        )
        self.inter_token_latency = self._histogram("vllm:inter_token_latency_seconds", "Token to token")
        self.request_latency = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token")
        self._finished = Counter(
            "vllm:request_success",
            "Finished requests",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._errors = Counter(
            "minisgl:http_errors",
            "Requests answered with an error",
            ("model_name", "status"),
            registry=self._registry,
        )
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Used share of the KV pages, 0 to 1")
        self._hit_rate = self._gauge(
            "minisgl:expert_cache_hit_rate", "Share of routed experts found in GPU memory"
        )
        self._experts_used = self._gauge("minisgl:experts_used", "Experts in use lately, over all layers")
        self._gauges = {stat: self._gauge(*names) for stat, names in _ENGINE_GAUGES.items()}
        self._counters = {stat: self._counter(*names) for stat, names in _ENGINE_COUNTERS.items()}

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, tuple(self._labels), registry=self._registry).labels(**self._labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, tuple(self._labels), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, tuple(self._labels), buckets=_SECONDS, registry=self._registry).labels(
            **self._labels
        )

    def finished(self, reason: str) -> None:
        """Count one finished answer."""
        self._finished.labels(**self._labels, finished_reason=reason).inc()

    def error(self, status: int) -> None:
        """Count one request answered with an error."""
        self._errors.labels(**self._labels, status=str(status)).inc()

    def update(self, beat: Beat) -> None:
        """Copy the engine's numbers."""
        stats = beat.stats
        self._experts_used.set(sum(map(bool, beat.experts.heat)) if beat.experts is not None else 0)
        for stat, gauge in self._gauges.items():
            gauge.set(stats.get(stat, 0.0))
        for stat, counter in self._counters.items():
            value = stats.get(stat, 0.0)
            counter.inc(max(0.0, value - self._seen.get(stat, 0.0)))
            self._seen[stat] = value
        total = stats.get("pages_total", 0.0)
        idle = stats.get("pages_free", 0.0) + stats.get("pages_evictable", 0.0)
        self._usage.set((total - idle) / total if total else 0.0)
        looked_up = stats.get("expert_hits", 0.0) + stats.get("expert_misses", 0.0)
        self._hit_rate.set(stats.get("expert_hits", 0.0) / looked_up if looked_up else 0.0)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)
