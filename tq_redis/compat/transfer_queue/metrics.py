"""The gauges of a queue under transfer_queue's names, for dashboards that were made for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from tq_redis.control.standing import Standing


def gauges(standings: Mapping[str, Standing]) -> Iterator[Metric]:
    """How far partitions are; each progress is a share in [0, 1] of a partition's samples.

    Production is that of the field which most samples have, for each task and for ``all``.
    transfer_queue's metrics of its controller's and storage units' processes have no like here.
    """
    samples = _gauge("partition_samples_total", "Samples of the partition.")
    produced = _gauge("partition_production_progress", "Samples with a field.", "task_name")
    consumed = _gauge("partition_consumption_progress", "Samples consumed.", "task_name")
    for name, standing in standings.items():
        count = standing.samples
        samples.add_metric([name], count)
        made = max(standing.produced.values(), default=0)
        for task in ("all", *standing.tasks):
            produced.add_metric([name, task], made / count if count else 0)
        for task, state in standing.tasks.items():
            consumed.add_metric([name, task], state.consumed / count if count else 0)
    yield GaugeMetricFamily("tq_partitions_total", "Partitions.", len(standings))
    yield GaugeMetricFamily(
        "tq_global_index_allocated_total",
        "Samples ever made, in the partitions that are there.",
        sum(standing.made for standing in standings.values()),
    )
    yield from (samples, produced, consumed)


def _gauge(name: str, says: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tq_{name}", says, labels=["partition_id", *labels])
