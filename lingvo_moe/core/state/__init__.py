"""The training state on devices and hosts: sharded, offloaded."""
