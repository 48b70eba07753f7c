"""The benchmarks behind the `bench` command."""
