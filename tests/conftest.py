"""Four CPU devices for the mesh tests; everything else runs on the first."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 4)
