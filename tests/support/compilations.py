"""What was compiled in this process: an event for each compilation."""

import jax

COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: (
        COMPILED.append(event) if "backend_compile" in event else None
    )
)
