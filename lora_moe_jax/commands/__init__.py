"""The commands of `lora-moe-jax`, one file each: `add_parser` has its options, `run` what it does.

What a command runs is imported by `run`, unless its options need it.
"""
