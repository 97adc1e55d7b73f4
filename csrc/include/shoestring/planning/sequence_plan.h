#pragma once

// Gives the blocks of a model the treatments of a training plan.

#include <cstdint>
#include <string>
#include <vector>

#include <shoestring/checkpoint/checkpoint_sequence.h>
#include <shoestring/core/export.h>
#include <shoestring/planning/plan_training.h>

namespace shoestring {

/// Returns the treatments of a training plan for checkpoint_sequential, which runs a model as a sequence of
/// functions: `before` functions, one function for each block, and `after` functions. Functions that are no
/// blocks keep their activations. `choices` and the predictions of the result are empty, since those of
/// `plan` are of a whole training step.
///
/// blocks: names of the model's blocks, such as "layers.0", in the order in which they run.
///
/// Throws c10::ValueError, which names the first difference, if the plan is of a model with other blocks.
SHOESTRING_API SequencePlan sequence_plan(const TrainingPlan& plan, const std::vector<std::string>& blocks,
                                          int64_t before = 0, int64_t after = 0);

}  // namespace shoestring
