"""The metrics of a server, in Prometheus's text format."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LINES = (1, 2, 4, 8, 16, 32, 64, 128)
# Why the body of a request was not used: its client left, it is not valid HTTP, it came too slowly, it is too large.
DropReason = Literal["closed", "malformed", "slow", "too_large"]


class _ByLayer(Collector):
    """Gauges of the experts of each layer, asked for when they are read."""

    def __init__(self, values: Callable[[], Mapping[str, Sequence[float]]]):
        self._values = values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client."""
        for name, values in self._values().items():
            text = "Of the layers with experts, counted from 0, in the last steps: docs/serving.md."
            family = GaugeMetricFamily(f"lingvo_moe_{name}", text, labels=["layer"])
            for layer, value in enumerate(values):
                family.add_metric([str(layer)], float(value))
            yield family


class Metrics:
    """The metrics of one server; two servers in a process are separate.

    Args:
        gauges: names without the prefix, descriptions, and what gives the values.
        by_layer: gives such names of gauges with the value of each layer.
    """

    def __init__(
        self,
        gauges: Mapping[str, tuple[str, Callable[[], float]]],
        by_layer: Callable[[], Mapping[str, Sequence[float]]] = dict,
    ):
        self._registry = CollectorRegistry()
        registry = self._registry
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "lingvo_moe_requests", "Requests answered.", ["route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "lingvo_moe_request_seconds",
            "From a request's headers to the answer's last byte.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._dropped = Counter(
            "lingvo_moe_uploads_dropped",
            "Requests whose body did not come whole, in time and within the limit.",
            ["reason"],
            registry=registry,
        )
        for reason in get_args(DropReason):
            self._dropped.labels(reason)  # there from the start, at 0
        self._lines = Counter("lingvo_moe_lines", "Lines translated.", registry=registry)
        self._truncated = Counter(
            "lingvo_moe_truncated_lines", "Lines whose end was left out.", registry=registry
        )
        self._batch_lines = Histogram(
            "lingvo_moe_batch_lines", "Lines of a batch.", buckets=_LINES, registry=registry
        )
        self._batch_seconds = Histogram(
            "lingvo_moe_batch_seconds",
            "Time of a batch in the model.",
            buckets=_SECONDS,
            registry=registry,
        )
        for name, (text, function) in gauges.items():
            Gauge(f"lingvo_moe_{name}", text, registry=registry).set_function(function)
        registry.register(_ByLayer(by_layer))

    def CountRequest(self, route: str, status: int, seconds: float) -> None:
        """A request that was answered; `route` is one of few names."""
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def CountDropped(self, reason: DropReason) -> None:
        """Counts an incomplete upload."""
        self._dropped.labels(reason).inc()

    def CountLines(self, lines: int, truncated: int) -> None:
        """Lines that were sent back."""
        self._lines.inc(lines)
        self._truncated.inc(truncated)

    def CountBatch(self, lines: int, seconds: float) -> None:
        """A batch that was translated."""
        self._batch_lines.observe(lines)
        self._batch_seconds.observe(seconds)

    def Text(self) -> bytes:
        """The current values as text."""
        return generate_latest(self._registry)
