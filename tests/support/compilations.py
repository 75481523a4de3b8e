"""What was compiled in this process: an event for each compilation."""

import jax

COMPILED = []


def record(event, duration, **_):
    if "backend_compile" in event:
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(record)
