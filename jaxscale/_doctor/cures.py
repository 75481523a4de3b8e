"""What to write instead, where something is better than a cast to float32."""

from ..diagnostics._trace.report import Place
from . import origins
from .culprit import Culprit
from .exam import Exam
from .origins import Sum
from .wording import NOT_TRIED

_CURES = {
    origins.SOFTMAX: (
        "These are probabilities, and then their logarithm is taken. Write "
        "`jax.nn.log_softmax(logits)` instead of `log(softmax(logits))`: {dtype} holds the "
        "logarithm of a small probability, but not the probability."
    ),
    origins.SIGMOID: (
        "These are probabilities, and then their logarithm is taken. Write "
        "`jax.nn.log_sigmoid(logits)` instead of `log(sigmoid(logits))`, and "
        "`jax.nn.log_sigmoid(-logits)` for the logarithm of 1 minus them."
    ),
    origins.PRODUCT: (
        "This is a product of many numbers. Add up their logarithms instead: {dtype} holds that "
        "sum, but not the product."
    ),
    origins.EXPONENTIAL: (
        "These are exponentials, and then their logarithm is taken. Compute with the exponents "
        "instead: the logarithm of `exp(x)` is `x`."
    ),
    origins.LOG_OF_SUM: (
        "This is the logarithm of a sum of exponentials. Write `jax.nn.logsumexp(x)` instead: it "
        "subtracts the maximum first."
    ),
}


def say_cure(culprit: Culprit) -> list[str]:
    """Returns what to write instead of numbers that become 0 and whose logarithm is taken."""
    if not culprit.made_by:
        return []
    cure = _CURES[culprit.made_by].format(dtype=culprit.place.dtype)
    return [f"{cure} {NOT_TRIED}"]


def say_cure_of_sum(place: Place, exam: Exam) -> list[str]:
    """Returns to take a mean, if that helps and an operation belongs to the sum of the loss."""
    total = exam.check.mean
    if total is None or total.where != place.where:
        return []
    return [say_mean(total)]


def say_mean(total: Sum, where: str = "") -> str:
    return (
        f"The loss is a sum over {total.size:,} numbers{where}. Take a mean instead, with "
        "`jnp.mean`: the loss and all gradients become smaller by that factor, and with gradients "
        "as small as that nothing overflows, as was tried."
    )
