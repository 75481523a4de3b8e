"""What must never happen: the reports of other libraries' users, and the law that answers each."""

import ast
import pathlib

import jax
import optax
import pytest

import jaxscale

pytestmark = pytest.mark.standard_promotion

# The laws, each by its file and its name, and below each the reports that it answers.
REPORTS = """
test_optimizer.test_a_run_of_bad_steps_never_gives_up
    optax.apply_if_finite: applies the NaN after N failures
test_optimizer.test_bad_steps_leave_no_trace
    levanter: multiplies the NaN by 0
    Others move a moment, a step count or a schedule
    allenai/OLMo-core#317: the skipped step moved the schedule
    optax: `clip` turns inf into 1, `lion` an infinite gradient into a finite update
test_optimizer.test_weakly_typed_states_and_parameters_do_not_compile_twice
    google-deepmind/optax#1440, google/jaxopt#451: weak types compile the step twice
test_state.test_a_state_is_a_tree_of_strongly_typed_scalars
    Flax `DynamicScale`, jmp: start from Python numbers, and trace twice
test_flax.test_a_skipped_step_keeps_every_replaced_field
    Others move an average or a batch statistic
    pytorch/pytorch#88474: the step is skipped, the running mean is NaN
test_user_reports.test_trees_without_gradients_are_stepped
    "No inf checks were recorded for this optimizer": huggingface/transformers#24003
test_value_and_grad.test_parameters_after_many_steps_are_those_of_a_scale_of_1
    microsoft/DeepSpeed#8588: gradients off by 2 on a growth step
    MPX `_grad_tools.py`: unscales with the scale after the update
    optax's `tree.get` finds the fields of NamedTuples only
test_state.test_results_are_float32_or_wider_and_exact
    jmp: with a scale that is a Python float or float16, unscaling underflows again
test_value_and_grad.test_the_seed_is_a_number_of_the_dtype_of_the_loss
    PyTorch: the cotangent of a float16 loss is float16, and 2**16 is inf
    Flax' own docstring example: 2**16 times a float16 loss is inf
test_value_and_grad.test_float64_and_complex_gradients_keep_their_dtype_and_their_parts
    Flax `DynamicScale` drops imaginary parts; PyTorch and TensorFlow raise
test_value_and_grad.test_signature_and_keyword_arguments_are_those_of_the_function
    Flax `DynamicScale.value_and_grad` takes no keyword arguments
test_value_and_grad.test_a_transform_of_models_is_that_of_its_library
    patrick-kidger/equinox#221: gradients hold None where nothing is differentiated
test_tree.test_a_step_leaves_alone_what_has_no_gradient
    Equinox: a model has leaves that are not arrays
test_value_and_grad.test_overwrites_of_fp8_are_neither_divided_nor_checked
    AI-Hypercomputer/maxtext#5021, Flax: FP8 statistics divided by the scale
test_devices.test_shard_map_over_sharded_parameters_agrees
    fairseq2#1374: scales apart under tensor parallelism
test_accumulation.test_optax_multi_steps_inside_replaces_the_bad_micro_batch
    optax: `MultiSteps` resets by multiplication, and 0 * inf is NaN for ever
    optax: `MultiSteps(loss_scaled(tx))` never recovers; the scaler goes outside
    With MultiSteps' own skip outside, the scaler never sees the overflow
test_verdict.test_no_element_of_any_leaf_is_overlooked
    facebookresearch/fairseq#2384, Apex, DeepSpeed, DreamerV3: their sum or norm overflows
test_max_norm.test_it_is_what_optax_does
    Lightning-AI/pytorch-lightning#9599: clipping before unscaling
test_transformations.test_each_member_of_a_population_trains_as_if_it_were_alone
    google/flax#4114: a scale with an axis is an unrelated TypeError
test_transformations.test_one_state_for_the_gradients_of_many_examples
    google/flax#4114: per-sample gradients under one scale
test_checkpoints.test_a_restored_run_goes_on_as_if_it_had_never_stopped
    huggingface/accelerate#4289: a restored scaler that is not the saved one
test_transformations.test_a_gradient_penalty_is_unscaled_inside_and_outside
    tensorflow/tensorflow#48662: inner gradients that stay scaled collapse the scale
test_policies.test_no_scale_is_zero_inf_or_nan
    Keras: the scale grows to inf and stays there
    PyTorch, Keras: the scale falls to 0, and NaN is applied
    google/flax#2547, pytorch/pytorch#98828: growth to infinity
    NVIDIA/apex#715: 1e-304, then a division by zero
test_policies.test_every_scale_is_a_power_of_two_where_every_factor_is
    Flax clips to the largest float32, MPX to 65504: unscaling is not exact any more
test_policies.test_no_hyperparameter_is_lost_in_a_tree_map
    google-deepmind/jmp#44: the minimum is not a leaf, and becomes 1 in any jit
test_policies.test_policies_are_plain_values
    google-deepmind/jmp#47: the README's float16 scale raises on every adjust
"""


def test_every_report_is_answered():
    laws = {
        f"{path.stem}.{getattr(node, 'name', '')}"
        for path in pathlib.Path(__file__).parent.parent.rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
    }
    named = {line for line in REPORTS.splitlines() if line.startswith("test_")}
    assert len(named) >= 25
    assert not named - laws


def test_trees_without_gradients_are_stepped():
    tx = jaxscale.loss_scaled(optax.adam(0.1))
    for tree in ({}, None, [], {"w": None}):
        updates, state = tx.update(tree, tx.init(tree), tree)
        assert jax.tree.structure(updates) == jax.tree.structure(tree)
        assert (state.step_applied, state.total_steps) == (True, 1)
