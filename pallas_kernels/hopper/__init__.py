"""What the kernels for Hopper GPUs share."""
