"""The MoE layer of benchmarks/moe_layer.py on a GPU, from program files. Never run on a GPU so far."""
