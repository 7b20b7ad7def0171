"""Predicts the goodput of a machine that fails at random, and the best interval of checkpoints."""

import math
from dataclasses import dataclass, replace

_MOST = 700.0  # of the exponent of e in double precision
_DIVISIONS = 200


@dataclass(frozen=True)
class FailingMachine:
    """A machine whose disruptions come at random, as a Poisson process, also while it saves and restarts.

    All times are seconds.
    """

    mtbf: float  # the mean time between disruptions of the whole machine
    save: float  # for which training waits at a checkpoint
    restart: float  # from a disruption to the next step, if none comes in between
    interval: float  # from the end of a save to the next one
    # The share of disruptions that come with a warning, so that the state is saved and no step is lost.
    announced: float = 0.0
    # Of the time between saves, the share in which steps are done; the rest are evaluations and waiting for input.
    share_of_steps: float = 1.0

    def Goodput(self) -> float:
        """The share of the time in which steps are done that last.

        Without warnings this is the exact expectation of Daly (A higher order estimate of the optimum checkpoint
        interval for restart dumps, 2006): interval / (mtbf e^(restart/mtbf) (e^((interval+save)/mtbf) - 1)).
        """
        turn = self.interval + self.save
        if turn / self.mtbf > _MOST or self.restart / self.mtbf > _MOST:
            return 0.0
        # Work until the next disruption: of whole turns, and of the last one up to the disruption.
        whole = self.interval / math.expm1(turn / self.mtbf)
        ends_in_turn = -math.expm1(-turn / self.mtbf)
        part = -math.expm1(-self.interval / self.mtbf) * self.mtbf
        part = (part - self.interval * math.exp(-turn / self.mtbf)) / ends_in_turn
        # From one disruption to the end of the restart after the next: work, saves, and all tries to restart.
        lasts = self.share_of_steps * (whole + self.announced * part)
        return lasts / (self.mtbf * math.exp(self.restart / self.mtbf))

    def BestInterval(self) -> float:
        """The interval with the highest goodput: about sqrt(2 save mtbf), where that is much shorter than mtbf."""
        low, high = math.log(self.save) - 7.0, math.log(max(self.save, self.mtbf)) + 7.0
        for _ in range(_DIVISIONS):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if self._At(left) < self._At(right):
                low = left
            else:
                high = right
        return math.exp(low)

    def _At(self, log_interval: float) -> float:
        return replace(self, interval=math.exp(log_interval)).Goodput()
