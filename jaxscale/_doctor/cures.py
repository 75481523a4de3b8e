"""What to write instead, where something is better than a cast to float32."""

from ..diagnostics._trace.report import Place
from . import origins
from .exam import Exam
from .origins import Sum
from .remedy import Culprit

_MANY = 64  # a sum of this many numbers, each with its full weight, is worth a word

_CURES = {
    origins.SOFTMAX: (
        "These are probabilities, and then their logarithm is taken. Write "
        "`jax.nn.log_softmax(logits)` instead of `log(softmax(logits))`: float16 holds the "
        "logarithm of a small probability, but not the probability."
    ),
    origins.SIGMOID: (
        "These are probabilities, and then their logarithm is taken. Write "
        "`jax.nn.log_sigmoid(logits)` instead of `log(sigmoid(logits))`, and "
        "`jax.nn.log_sigmoid(-logits)` for the logarithm of 1 minus them."
    ),
    origins.PRODUCT: (
        "This is a product of many numbers. Add up their logarithms instead: float16 holds that "
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
    return [_CURES[culprit.made_by]]


def say_cure_of_sum(place: Place, exam: Exam) -> list[str]:
    """Returns to take a mean, if an operation belongs to a sum that is the loss."""
    large = find_large_sum(exam)
    if large is None or large.where != place.where:
        return []
    return [say_mean(large)]


def say_mean(large: Sum, where: str = "") -> str:
    return (
        f"The loss is a sum over {large.size:,} numbers{where}. Take a mean instead, with "
        "`jnp.mean`: the loss and all gradients become smaller by that factor, and float16 holds "
        "them."
    )


def find_large_sum(exam: Exam) -> Sum | None:
    """Returns the sum that makes the loss far larger than a mean would, if there is one."""
    large = [total for total in exam.loss_sums if _is_large(total)]
    return max(large, key=lambda total: total.size, default=None)


def _is_large(total: Sum) -> bool:
    return total.size >= _MANY and total.size * abs(total.weight) >= _MANY
