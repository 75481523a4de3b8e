"""Compilations of this process: an event for each."""

import jax

COMPILED = []


def record(event, duration, **_):
    if "backend_compile" in event:
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(record)
