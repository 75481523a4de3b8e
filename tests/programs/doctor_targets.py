"""Each program as a target of the doctor: `doctor_targets:vision__vit` is `vision.vit`."""

import corpus
from cases import make_case


def target_of(name):
    return f"doctor_targets:{name.replace('.', '__')}"


def __getattr__(name):
    family, _, rest = name.partition("__")
    row = corpus.load().get(f"{family}.{rest}")
    if row is None:
        raise AttributeError(name)

    def make():
        case = make_case(row)

        def loss(params, batch):
            value, (_, aux) = case.loss(params, case.state, batch)
            return value, aux

        return loss, case.params, case.batch

    return make
