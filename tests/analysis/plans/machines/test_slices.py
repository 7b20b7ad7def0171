"""Slices to try: each exists, and has twice the chips of the one before."""

import pytest

from lingvo_moe.analysis.plans.machines.gpu_cluster import CARDS, Cluster
from lingvo_moe.analysis.plans.machines.slices import machines, slices
from lingvo_moe.analysis.plans.machines.topology import CHIPS, Topology


@pytest.mark.parametrize("generation", CHIPS)
def test_they_double_up_to_the_pod(generation):
    topologies = [Topology.parse(name) for name in slices(generation)]
    chips = [t.num_chips for t in topologies]
    assert chips == [4 * 2**i for i in range(len(chips))]
    assert chips[-1] >= {"v3": 1024, "v5e": 256, "v6e": 256}.get(generation, 4096)
    assert all(max(t.dims) <= 2 * t.dims[0] for t in topologies[1:])


@pytest.mark.parametrize("card", CARDS)
def test_clusters_double_from_one_gpu_and_fill_nodes(card):
    clusters = [Cluster.parse(name) for name in machines(card)]
    assert [c.num_devices for c in clusters] == [2**i for i in range(len(clusters))]
    assert all(c.nodes == 1 or c.gpus_per_node == CARDS[card].node_sizes[-1] for c in clusters)
    assert clusters[-1].num_devices >= 4096
