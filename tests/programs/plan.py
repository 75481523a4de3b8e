"""Which programs go through which entries: a few in the fast loop, two for each in the slow one."""

import corpus
from entries import DOCTOR, ENTRIES

ALL_ENTRIES = (*ENTRIES, DOCTOR)

# Quick to compile, and each the first to show a fault of its kind.
FAST = {
    "losses.softmax_cross_entropy_with_integer_labels": "scale_backward outside",
    "contrastive.clip_by_diagonal": "value_and_grad",
    "reinforcement.deep_q_learning": "train_step",
    "physics.gaussian_process": "scale_backward, bfloat16",
    "generative.masked_autoregression": "scale_backward outside",
    "quantization.quantization_aware": "nnx",
    "graphs.graph_convolution": "flax",
    "sequence.conditional_random_field": "scale_backward inside",
    "sequence.recurrent_adder": "value_and_grad",
    "speech.masked_ctc": "value_and_grad, bfloat16",
    "activations.attention_with_large_logits": "value_and_grad",
    "scipy_functions.integral_of_a_curve": "skip_nonfinite",
    "losses.log_cosh": DOCTOR,
}

# Modules with numbers among their leaves: a step has to take the state of a part of them.
BESIDES = {
    "reinforcement.decision_transformer": "train_step",
    "quantization.adapter_on_frozen_attention": "train_step",
}


def two_entries(rows: dict[str, corpus.Row]) -> dict[str, tuple[str, str]]:
    """Returns two entries for each program, so that every entry meets as many as any other."""
    chosen = {}
    num_entries = len(ALL_ENTRIES)
    for number, name in enumerate(rows):
        first = 2 * number % num_entries
        second = (first + 1) % num_entries
        other = BESIDES.get(name, ALL_ENTRIES[second])
        chosen[name] = ALL_ENTRIES[first], other
    return chosen
