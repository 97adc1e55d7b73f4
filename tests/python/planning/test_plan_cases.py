"""Test the predicted memory of plans for many drawn cases, each of which is planned and trained in a new process."""

import pytest

from planning.plan_cases import run_cases, sets_of_levers, summary


@pytest.mark.nightly
def test_predicted_memory_is_that_of_training(seed: int) -> None:
    results = []
    for result in run_cases(seed):
        print(result)
        results.append(result)
    print(summary(results))
    for result in results:
        predicted, measured = result.requested
        if "offload" in result.levers:  # the buffers of offloaded state are predicted, but are no tensors
            assert measured <= 1.05 * predicted, str(result)
        else:
            assert predicted == pytest.approx(measured, rel=0.05), str(result)
        predicted, measured = result.process
        assert predicted == pytest.approx(measured, rel=0.10), str(result)
        # Products in bf16 of shapes that were not measured may take a little memory that the plan does not know.
        allowed = 1.005 if result.levers.get("precision") == "bf16" else 1.0
        assert measured <= allowed * result.budget, str(result)
    assert sets_of_levers(results) >= 8
