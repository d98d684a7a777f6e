"""Cases that `make test` leaves to `make test-exhaustive`, because cheaper ones cover most of what they do.

The number is the CPU time of a case in seconds, as measured on an x86_64 core. A name without brackets stands for a whole test.
"""

import pytest

CASES = {
    "test_compare.py::test_a_sweep_in_parallel": 26,
    "test_e2e.py::test_a_combination_trains_and_resumes[bf16-sr, nvfp4, Adam-mini, gaussws-od, eager, x3, gpt2]": 9,
    "test_e2e.py::test_a_combination_trains_and_resumes"
    "[fp32, fp8-block, dynamic8 states, inputs, snip, eager, x3, huggingface]": 8,
    "test_integrations_transformers.py::test_a_resumed_run_with_everything_on_is_the_straight_run[callback]": 7,
    "test_integrations_transformers.py::test_optimizer_cls_and_kwargs_with_stochastic_rounding[False]": 4,
    "test_loop.py::test_resumed_is_straight[kahan]": 6,
    "test_loop.py::test_resumed_is_straight[schedule]": 7,
    "test_loop.py::test_resumed_is_straight[snip in o2]": 5,
    "test_loss.py::test_any_strides[kernel-dtype4]": 9,
    "test_memory_options.py::test_compiled_blocks_have_the_same_bits[fp8-current]": 8,
    "test_memory_options.py::test_compiled_blocks_have_the_same_bits[fp8-delayed]": 9,
    "test_memory_options.py::test_compiled_blocks_save_neither_codes_nor_inputs[fp8-block]": 7,
    "test_output_loss.py::test_codes_of_the_kernel[e4m3 tile(32) pow2_ceil-144-136-dtype0]": 5,
    "test_output_loss.py::test_codes_of_the_kernel[e5m2 tensor-144-136-dtype0]": 3,
    "test_own_loops.py::test_compiled_blocks_draw_what_eager_blocks_draw[own loop without step_context-gaussws-none-2]": 6,
    "test_pairs.py::test_adam_mini[update0]": 5,
    "test_pairs.py::test_adam_mini[update1]": 4,
    "test_pairs.py::test_adam_mini[update2]": 5,
    "test_pairs.py::test_adamw_in_blocks_of_2048[dynamic8]": 3,
    "test_pairs.py::test_adamw_in_blocks_of_2048[e4m3]": 3,
    "test_pairs.py::test_axes_of_four_dimensions[e4m3 row-0]": 3,
    "test_pairs.py::test_levels[e4m3 row|e2m3 row|e2m1 row|e2m1 row stochastic(16)]": 4,
    "test_pairs.py::test_sampled_gradients[rounded_normal_exact-dtype4]": 7,
    "test_pairs.py::test_sampled_gradients[uniform-dtype8]": 5,
    "test_pairs.py::test_sampled_weights[rounded_normal_exact-dtype6]": 3,
    "test_pairs.py::test_sampled_weights[uniform-dtype12]": 3,
    "test_pairs.py::test_sampled_weights_of_any_shape_and_block[shape0-16]": 9,
    "test_plan_schedule.py::test_a_warm_up_has_no_effect_and_comes_only_with_another_plan": 6,
    "test_quality_benchmark.py::test_runs_are_paired_written_down_and_not_repeated": 11,
    "test_recipes.py::test_eight_bits_learn_as_well_as_bf16[fp8-delayed]": 7,
    "test_report_browser.py::test_a_large_run": 17,
    "test_snip_benchmarks.py::test_arms_part_at_one_place_whichever_process_trains_them": 11,
    "test_snip_benchmarks.py::test_the_truth_takes_as_many_batches_as_there_is_time_for": 9,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these cases as exhaustive. A name that a collected file no longer has is an error."""
    ours = {item.nodeid.rpartition("tests/")[2]: item for item in items}
    for name in CASES:
        if name in ours:
            ours[name].add_marker(pytest.mark.exhaustive)
            continue
        test, _, parameters = name.partition("[")
        beside = [other for other in ours if other.startswith(f"{test}[" if parameters else f"{test.partition('::')[0]}::")]
        if len(beside) > 1:  # one alone was asked for by its name
            raise pytest.UsageError(f"tests/expensive.py names {name}, which does not exist any more: correct the list.")
