"""TaskStrategy: what a search for a task's strategy, and a plan that does not fit, may change in its Params."""

from typing import Any

from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.pipeline.params import Settings
from lingvo_moe.core.task.forms import Forms


class TaskStrategy:
    """The forms that a task of some Params can take on devices, which BaseTask.Strategy returns. By default it has one.

    Attributes:
        p: the task's Params.

    Args:
        cells: whether the stages of its pipeline are cells of different shapes; see Settings.
    """

    def __init__(self, params: InstantiableParams, cells: bool = False):
        self.p, self._cells = params, cells

    def PipelineSettings(self) -> Settings | None:
        """Returns the settings of the pipeline that the task runs in, from its `pipeline`; None if it runs in none."""
        return Settings.Of(self.p.pipeline, self._cells) if "pipeline" in self.p else None

    def MicroBatchSizes(self) -> tuple[str, ...]:
        """Params of the task, besides the batch size, that a micro-batch has 1/M of, e.g. 'num_groups'."""
        return ()

    def OpenForms(self) -> Forms | None:
        """Returns two forms of the task if its Params leave open which one is trained; None if they do not.

        An instance made from Params that leave it open is of the recomputing form.
        """
        return None

    def Without(self) -> InstantiableParams:
        """Returns Params of the task without all that a strategy sets beside letters, and without dropout. They leave
        the form open if the task has stacks of equal blocks, so that strategies can be searched for it. Experts compute
        products with letters."""
        return self.p.Copy()

    def HasStages(self) -> bool:
        """Whether stacks of equal blocks can be stages of a pipeline."""
        return True

    def Recomputing(self) -> dict[str, Any]:
        """Returns the Params, by path, with which a task recomputes as much as it can; {} where nothing is left."""
        return {}
