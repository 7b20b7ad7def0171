"""--elastic: the processes that are left of a job go on, on as many of their devices as the experiment divides over."""

from collections.abc import Sequence

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.training.meshes import check_divisible, check_state_is_sharded, make_mesh


def after_loss(args: Flags, params: Params, override: str, lost: Sequence[int]) -> Flags:
    """The flags with which this process goes on after others of its job were lost; it has joined a smaller one then.

    A process for which the largest mesh has no place ends, with status 0.

    Args:
        override: as has been applied to `params`.
        lost: the numbers of those that are gone.

    Raises:
        ShardingError: the experiment does not divide over the devices of any of those that are left.
        Exception: as survivors.regroup.
    """
    from lingvo_moe.core.engine import devices, survivors
    from lingvo_moe.core.engine.loop import job
    from lingvo_moe.core.engine.lost import LOST

    LOST.left = True
    left = [number for number in range(args.num_processes) if number not in lost]
    count, mesh = largest(args, params, override, len(left), devices.local_device_count())
    if left.index(args.process_id) >= count:
        say(f"process {args.process_id}: mesh {mesh} has no place for it; it ends")
        job.end(0)
    address, count, number = survivors.regroup(left[:count])
    if number == 0:
        was = args.num_processes
        say(f"going on with {count} of {was} processes, mesh {mesh}, from the newest checkpoint")
    values = {"coordinator_address": address, "num_processes": count, "process_id": number}
    return args.With(mesh=str(mesh), restart=False, **values)


def largest(
    args: Flags, params: Params, override: str, processes: int, devices_each: int
) -> tuple[int, Mesh]:
    """The most of so many processes whose devices an experiment divides over, and their mesh. Raises ShardingError."""
    base, task = make_mesh(params, args.mesh), params.task.Instantiate()
    for count in range(processes, 0, -1):
        try:
            mesh = base.over_devices(count * devices_each)
            check_divisible(params, task, mesh)
            check_state_is_sharded(override, task, mesh)
            return count, mesh
        except ValueError:
            if count == 1:
                raise
    raise ValueError(f"processes={processes}: must be at least 1")
