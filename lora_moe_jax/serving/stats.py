"""What an engine has done so far, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was built, and what it holds.

    `compilations` counts the whole process; after warm-up it stays as it is. `adapters` are the
    names; resident ones and bytes on the host, in memory and on disk, include old versions that
    requests are ending with.

    `prompt_tokens` were computed, `prefix_hit_tokens` found in the cache in their place: of both
    together, the latter's share is the hit rate. `cached_pages` may be found by later requests;
    those of them that no running request has are among the `free_pages`, as they make room.

    `steps` were begun; `host_ms_per_step` is how long the host works for one, on average, while it
    does not wait for the device.

    `preemptions` counts how often a request made room for another; its tokens are computed, or
    found, once more. While the engine sleeps, `bank_bytes` and `cache_bytes` leave out what it gave
    away.
    """

    compilations: int
    steps: int
    host_ms_per_step: float
    prompt_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int
    adapters: int
    resident_adapters: int
    free_adapter_slots: int
    adapter_loads: int
    adapter_evictions: int
    adapter_host_bytes: int
    adapter_disk_bytes: int
    preemptions: int
    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    total_pages: int
    bank_bytes: int
    cache_bytes: int
