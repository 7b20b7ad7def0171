"""TaskMetrics: what a task's metrics are beside means over units, and how they are shown."""

from lingvo_moe.core.nested_map import NestedMap


class TaskMetrics:
    """The metrics of a task, which BaseTask.Metrics returns. By default all are means over units."""

    def Combined(self, sums: NestedMap) -> NestedMap:
        """The metrics of a batch from the sums of its micro-batches' terms: metrics that are no such sums."""
        return sums

    def ProgressNote(self, metrics: NestedMap) -> str:
        """Returns text about a step's metrics (NumPy) for the progress line, besides loss and speed; '' for none."""
        return ""

    def Layers(self) -> dict[str, list[str]]:
        """Names the rows of [L,...] metrics: maps the prefix of a metric's path to the names of its L layers."""
        return {}
