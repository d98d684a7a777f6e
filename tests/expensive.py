"""Cases that `make test` leaves to `make test-exhaustive`, because cheaper ones cover most of what they do.

The number of a case is its CPU time in seconds, as measured on an x86_64 core. A name without brackets stands for a whole test.
"""

from collections.abc import Sequence

import pytest
from sweeps import EVERYTHING, covering

CASES = {
    "test_snip_command.py::test_a_run_measures_once[schedule]": 4,
    "test_compare.py::test_a_sweep_in_parallel": 26,
    "test_compare.py::test_the_script_for_machines_without_the_command_line": 5,
    "test_e2e.py::test_a_combination_trains_and_resumes[bf16-sr, nvfp4, Adam-mini, gaussws-od, eager, x3, gpt2]": 9,
    "test_e2e.py::test_a_combination_trains_and_resumes[fp16, fp8-block-2d, bf16 states, snip, eager, x3, huggingface]": 10,
    "test_e2e.py::test_a_combination_trains_and_resumes"
    "[fp32, fp8-block, dynamic8 states, inputs, snip, eager, x3, huggingface]": 8,
    "test_e2e.py::test_bounds_contain_one_more_perturbed_run_and_not_another_recipe": 4,
    "test_hub.py::test_a_wrapped_model_is_converted_compiled_trained_and_saved": 5,
    "test_transformers.py::test_a_resumed_run_with_everything_on_is_the_straight_run[callback]": 7,
    "test_transformers.py::test_optimizer_cls_and_kwargs_with_stochastic_rounding[False]": 4,
    "test_linear.py::test_blocks_compiled_one_by_one": 3,
    "test_linear.py::test_inductor": 5,
    "test_loop.py::test_released_gradients_change_no_bit": 3,
    "test_loop.py::test_resumed_is_straight[kahan]": 6,
    "test_loop.py::test_resumed_is_straight[schedule and snip]": 10,
    "test_loop.py::test_resumed_is_straight[schedule]": 7,
    "test_loop.py::test_resumed_is_straight[snip in o2]": 5,
    "test_loss.py::test_any_strides[kernel-dtype4]": 9,
    "test_memory_options.py::test_compiled_blocks_have_the_same_bits[fp8-current]": 8,
    "test_memory_options.py::test_compiled_blocks_have_the_same_bits[fp8-delayed]": 9,
    "test_memory_options.py::test_compiled_blocks_save_neither_codes_nor_inputs[fp8-block]": 7,
    "test_monitor.py::test_a_run_is_the_same_with_the_monitor_and_after_a_resume[casts and noise]": 12,
    "test_numerics.py::test_counts_are_those_of_exact_arithmetic[e4m3]": 3,
    "test_output_loss.py::test_codes_of_the_kernel[e4m3 tile(32) pow2_ceil-144-136-dtype0]": 5,
    "test_output_loss.py::test_codes_of_the_kernel[e5m2 tensor-144-136-dtype0]": 3,
    "test_own_loops.py::test_checkpointing_within_a_compiled_graph[everything]": 2,
    "test_own_loops.py::test_compiled_blocks_draw_what_eager_blocks_draw[own loop without step_context-gaussws-none-2]": 6,
    "test_own_loops.py::test_compiled_blocks_draw_what_eager_blocks_draw[own loop-everything-non-reentrant-2]": 9,
    "test_pairs.py::test_adam_mini[update0]": 5,
    "test_pairs.py::test_adam_mini[update1]": 4,
    "test_pairs.py::test_adam_mini[update2]": 5,
    "test_pairs.py::test_adamw_in_blocks_of_2048[companded8]": 3,
    "test_pairs.py::test_adamw_in_blocks_of_2048[e4m3]": 3,
    "test_pairs.py::test_axes_of_four_dimensions[e4m3 row-0]": 3,
    "test_pairs.py::test_levels[e4m3 row|e2m3 row|e2m1 row|e2m1 row stochastic(16)]": 4,
    "test_pairs.py::test_sampled_gradients[rounded_normal_exact-dtype4]": 7,
    "test_pairs.py::test_sampled_gradients[uniform-dtype8]": 5,
    "test_pairs.py::test_sampled_weights[rounded_normal_exact-dtype6]": 3,
    "test_pairs.py::test_sampled_weights[uniform-dtype12]": 3,
    "test_pairs.py::test_sampled_weights_of_any_shape_and_block[shape0-16]": 9,
    "test_plan_schedule.py::test_blocks_are_compiled_before_a_plan_takes_effect": 11,
    "test_benchmarks.py::test_runs_are_paired_written_down_and_not_repeated": 11,
    "test_recipes.py::test_eight_bits_learn_as_well_as_bf16[fp8-block]": 6,
    "test_recipes.py::test_eight_bits_learn_as_well_as_bf16[fp8-delayed]": 7,
    "test_recipes.py::test_int8_learns_worse": 4,
    "test_report_browser.py::test_a_large_run": 17,
    "test_benchmarks.py::test_arms_part_at_one_place_whichever_process_trains_them": 11,
    "test_benchmarks.py::test_the_truth_takes_as_many_batches_as_there_is_time_for": 9,
    "test_snip_estimates.py::test_all_layers_at_once_rank_as_one_at_a_time": 4,
    "test_snip_command.py::test_estimates_within_a_budget_are_spread_and_resumed": 12,
    "test_trl.py::test_sft_trainer_trains_and_resumes_a_converted_model": 6,
    "test_trl.py::test_sft_trainer_with_a_peft_config[False]": 2,
}

KEPT = {
    "test_checkpoint.py::test_a_resumed_run_is_the_straight_run": (
        "bf16-sr",
        "dynamic8",
        "adam-mini",
        "fp8-delayed",
        "sampling",
        "torch",
        "dropout",
    ),
    "test_quantize.py::test_one_correction_of_a_product_with_the_inverse_is_the_rounded_quotient": (
        "e4m3",
        "e2m1",
        "int8",
        "e4m10",
    ),
    "test_huggingface.py::test_a_converted_model_goes_through_a_checkpoint": ("llama", "gpt2", "gpt_oss"),
    "test_linear.py::test_compiled_training_is_eager_training": ("nvfp4", "fp8-delayed"),
    "test_memory_options.py::test_eager_steps_have_the_same_bits_with_all_options": ("fp8-block", "fp8-delayed", "nvfp4"),
    "test_models.py::test_gpt2_converts_and_learns": ("fp8-block",),
    "test_ops.py::test_compiled_bits_are_eager_bits_in_one_graph": (
        "e4m3 tile(16)-inductor",
        "e2m1 tile(16) nvfp4 stochastic(16)-aot_eager",
        "bf16 stochastic(16)-aot_eager",
    ),
    "test_optim.py::test_every_mode_trains_and_resumes": ("fp32", "o2-split", "bf16-sr", "bf16-kahan", "fp16"),
    "test_output_loss.py::test_tiles_have_the_bits_of_layer_and_loss_apart": ("mxfp8",),
    "test_own_loops.py::test_recomputation_draws_what_forward_drew": (
        "own loop-inputs-reentrant-2",
        "own loop-bf16-sr-non-reentrant-2",
        "own loop without step_context-gaussws-non-reentrant-1",
        "accelerate-fp4-block-reentrant-1",
        "transformers.Trainer-gaussws-non-reentrant-2",
        "Lightning-inputs-non-reentrant-2",
    ),
    "test_quantize.py::test_strides_do_not_matter": (
        "bf16",
        "e4m3 tensor",
        "e5m2 row",
        "e4m3 tile(4)",
        "e3m4 block(4)",
        "e2m1 tile(4) nvfp4",
        "e2m1 block(4) nvfp4",
        "e4m3 tile(4) fp32 stochastic(16)",
        "e2m1 block(4) stochastic(8)",
    ),
    "test_quantize.py::test_every_group_against_a_slow_loop": (
        "e4m3 tile(4) fp32",
        "e4m3 block(4) fp32",
        "e4m3 row fp32",
        "e5m2 tensor fp32",
        "e3m4 tile(8) pow2",
        "e2m1 tile(8) pow2_ceil",
        "e2m1 block(4) pow2_ceil",
        "e2m1 tile(4) nvfp4",
        "e2m1 block(4) nvfp4",
        "e3m2 row pow2",
        "int8 row fp32",
        "int4 tile(4) fp32",
        "fp16 tensor pow2",
        "e4m10 tile(4) fp32",
        "e4m3 none none",
        "e2m3 none none",
        "int8 none none",
        "bf16 none none",
    ),
    "test_quantize.py::test_stochastic_casts_are_unbiased": ("e4m3 tile(16) fp32 stochastic(16)", "nvfp4 stochastic(16)"),
    "test_gradients.py::test_the_bits_are_those_of_the_ordinary_step_and_after_a_resume": (
        "bf16-sr-{}",
        "bf16-sr-{'states': 'companded8', 'block': 16}",
        "o2-split-{}",
        "o1-{}",
    ),
    "test_sampling_layers.py::test_compiled_and_checkpointed_training_is_eager_training": ("both", "recomputed", "input cast"),
    "test_sampling_layers.py::test_inductor": ("both",),
    "test_snip_controller.py::test_a_resume_at_any_step_gives_the_same_decisions": ("1", "4", "7", "10", "13", "16", "19"),
    "test_solve.py::test_brute_force_finds_nothing_better": ("0",),
}
"""Cases that `make test` keeps of a test. The others are left to `make test-exhaustive`."""

COVERED = {
    "test_adamw.py::test_float32_is_torch_adamw": 1,
    "test_adamw.py::test_steps_of_every_mode_are_those_of_numpy_bit_for_bit": 2,
    "test_advice.py::test_what_is_recommended_fits_and_runs": 1,
    "test_convert.py::test_every_recipe_runs_on_every_gpu": 1,
    "test_data.py::test_each_epoch_is_a_permutation": 1,
    "test_export.py::test_transformers_loads_the_logits_of_the_dequantized_model": 1,
    "test_gradients.py::test_every_mode_trains_with_every_type_of_gradients": 1,
    "test_huggingface.py::test_a_converted_model_learns": 1,
    "test_huggingface.py::test_weights_of_any_model_are_deployed": 1,
    "test_linear.py::test_checkpointing_computes_the_same_bits_again": 1,
    "test_linear.py::test_gradients_are_those_of_the_cast_operands": 1,
    "test_loss.py::test_non_finite_logits_are_those_of_torch": 2,
    "test_loss.py::test_the_mean_is_that_of_torch": 1,
    "test_adamw.py::test_split_masters_take_the_steps_of_float32_masters": 1,
    "test_matmul.py::test_scales_of_groups_lie_where_cublas_reads_them": 1,
    "test_matmul.py::test_units_of_16_bits_get_numbers_that_they_hold": 1,
    "test_memory.py::test_uncompiled_activations_are_what_autograd_keeps": 1,
    "test_models.py::test_one_graph": 1,
    "test_ops.py::test_quantize_operators_keep_the_rules_of_torch": 1,
    "test_torch_optim.py::test_a_state_that_is_cleared_begins_anew": 1,
    "test_torch_optim.py::test_tensors_of_a_state_that_are_replaced": 1,
    "test_pairs.py::test_cross_entropy": 1,
    "test_pairs.py::test_noise": 1,
    "test_pairs.py::test_prepare": 1,
    "test_quantize.py::test_fake_quantize_is_quantize_and_back_bit_for_bit": 1,
    "test_quantize.py::test_quantize_both_is_two_quantizes": 1,
    "test_sampling.py::test_nothing_is_correlated": 1,
    "test_snip_estimates.py::test_a_probe_leaves_everything_as_it_was": 1,
}
"""Sweeps of which `make test` runs cases that cover every value of every parameter (1) or every pair of values (2)."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these cases as exhaustive. A name that a collected file no longer has is an error."""
    ours = {f"{item.path.name}::{item.nodeid.partition('::')[2]}": item for item in items}
    if EVERYTHING:
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                left_out(item)
    cases: dict[str, list[str]] = {}
    for name in ours:
        cases.setdefault(name.partition("[")[0], []).append(name)
    for name in CASES:
        if name in ours:
            left_out(ours[name])
        else:
            test, _, parameters = name.partition("[")
            file = test.partition("::")[0]
            beside = cases.get(test, ()) if parameters else [other for other in ours if other.startswith(f"{file}::")]
            check_alone(beside, name)
    for test, kept in KEPT.items():
        wanted = {f"{test}[{parameters}]" for parameters in kept}
        for missing in wanted - ours.keys():
            check_alone(cases.get(test, ()), missing)
        for name in cases.get(test, ()):
            if name not in wanted and len(cases[test]) > 1:
                left_out(ours[name])
    for test, strength in COVERED.items():
        names = cases.get(test, [])
        kept_places = covering([values_of(ours[name]) for name in names], strength)
        for place, name in enumerate(names):
            if place not in kept_places:
                left_out(ours[name])


def left_out(item: pytest.Item) -> None:
    """Leave a case to `make test-exhaustive`."""
    item.add_marker(pytest.mark.exhaustive)


def check_alone(beside: Sequence[str], name: str) -> None:
    """Raise if a name is missing among others of its file or test: one alone was asked for by its name."""
    if len(beside) > 1:
        raise pytest.UsageError(f"tests/expensive.py names {name}, which does not exist any more: correct the list.")


def values_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the values of a case's parameters in words."""
    assert isinstance(item, pytest.Function)
    return tuple(repr(value) for value in item.callspec.params.values())
