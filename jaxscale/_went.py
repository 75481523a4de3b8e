"""Names that went, and the error that points to the page which says what to write instead."""

import sys

# By the module that they were in.
_WENT = {
    "jaxscale.diagnostics": """
        History LeafCounts Suggestion TracedConstant TracedNonfinite TracedUnderflow Underflow
        leaf_counts leaf_histograms plot_histogram plot_underflow suggest_scale text_histogram
        to_json underflow
    """,
    "jaxscale.presets": """
        GradualLossScale GradualState LogMaxLossScale LogMaxState ToleranceLossScale ToleranceState
        WindowLossScale WindowState chainer colossalai fairseq from_flax from_jmp from_keras
        from_tensorflow from_torch jamp jaxamp mindformers mindspore mindspore_cell
        mindspore_manager mpx olmo openseq2seq_backoff openseq2seq_logmax paddle paddle_op to_torch
    """,
}


def missing_name(module: str, name: str) -> AttributeError:
    """Makes the error of a name that a module does not have."""
    message = f"module {module!r} has no attribute {name!r}"
    if name in _WENT[module].split():
        message += ". It went in 0.5.0: the page *What went in 0.5.0* has what to write instead."
    return AttributeError(message, name=name, obj=sys.modules[module])
