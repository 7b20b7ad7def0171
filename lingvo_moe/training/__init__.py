"""The parts of a run beside its loop: flags and their checks, the mesh, memory, evaluation of its checkpoints."""
