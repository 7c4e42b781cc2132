"""Every promise once more, for every row of `instances.py`, in the library form of the operations.

That is the form for accelerators without Triton. `test_forms.py` checks it in the core suite, with fewer cases. These
are a quarter of the rest of the tests, so that they run with `-m slow` only.
"""

import pytest

from hf_efficient_attn.ops.accelerator import use_backend
from test_methods import (  # noqa: F401
    test_gradients_of_the_fast_form_equal_those_of_the_readable_form,
    test_the_fast_form_equals_the_readable_form_at_default_hyperparameters,
    test_the_fast_form_equals_the_readable_form_if_the_lengths_differ,
)
from test_promises import (  # noqa: F401
    test_any_shape,
    test_compiles,
    test_compiles_with_its_gradient,
    test_convergence_to_exact_attention_with_the_budget,
    test_exact_within_the_budget,
    test_finite,
    test_gradients_across_chunks,
    test_gradients_agree_with_finite_differences,
    test_later_tokens_have_no_influence,
    test_later_tokens_have_no_influence_at_block_boundaries,
    test_masked_keys_have_no_influence,
    test_masked_keys_have_no_influence_on_gradients,
    test_masked_tokens_inside_the_sequence_are_like_absent_ones,
    test_no_tensor_holds_all_pairs,
    test_outputs_of_queries_without_keys_are_zero,
    test_padding_does_not_change_the_output,
    test_seeds,
    test_sequences_of_a_batch_are_independent,
    test_sequences_of_a_large_batch_are_independent,
    test_sums_are_kept_in_float32,
    test_the_number_of_later_tokens_has_no_influence,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]


@pytest.fixture(autouse=True, scope="module")
def _library():
    with use_backend("library"):
        yield
