"""Each program as a target of the doctor: `doctor_targets:vision__vit` is `vision.vit`."""

from collections.abc import Callable
from typing import Any

import corpus
from cases import make_case


def target_of(name: str) -> str:
    return f"doctor_targets:{name.replace('.', '__')}"


def __getattr__(name: str) -> Callable[[], Any]:
    family, _, rest = name.partition("__")
    row = corpus.load().get(f"{family}.{rest}")
    if row is None:
        raise AttributeError(name)

    def make() -> Any:
        case = make_case(row)

        def loss(params: Any, batch: Any) -> Any:
            value, (_, aux) = case.loss(params, case.state, batch)
            return value, aux

        return loss, case.params, case.batch

    return make
