#pragma once

// Measures a sequence of functions, plans their checkpointing within a memory budget, and runs them as
// planned.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <shoestring/checkpoint/checkpoint_plan.h>
#include <shoestring/checkpoint/offload_activations.h>
#include <shoestring/core/export.h>

namespace shoestring {

using BlockFunction = std::function<at::Tensor(const at::Tensor&)>;

struct SequencePlan : CheckpointPlan {
  /// For each function, how its activations are treated:
  /// - "keep": stored, as without checkpoint
  /// - "recompute": computed again in backward
  /// - "keep attention": recomputed, except for the results of attention operators
  /// - "keep attention and products": recomputed, except for attention and matrix products
  /// - "offload": stored outside the device
  /// - "recompute, input offloaded": recomputed from an input that is stored outside the device
  std::vector<std::string> names;
};

/// Chooses how each function treats its activations, so that forward and backward of the whole sequence take
/// the least time within budget_bytes. The budget limits the peak of what the functions allocate besides
/// parameters, gradients and optimizer state.
///
/// Each function is measured alone, with its forward and backward, once for each treatment in
/// SequencePlan::names. Its input is computed from x by the functions before it. checkpoint_plan then chooses
/// the treatments. Afterwards the gradients of parameters, the states of the random number generators and
/// `buffers` are restored.
///
/// kinds: a number for each function. Functions with the same number cost the same, so only one of them is
/// measured. If `kinds` is empty, each function is measured. A whole training step can be planned: the first
/// function may take tokens, and the last may return the loss.
///
/// offload: if given, functions may also move the tensors that they save (or their input, if they are
/// recomputed) to the host or to a disk. The speed of this transfer is measured and is part of the plan.
/// `offload` should exclude parameters and all other tensors that stay alive anyway.
///
/// buffers: the buffers that the functions change, such as `model->buffers()` with running statistics.
///
/// Throws c10::Error in the same cases as checkpoint. If no plan fits into the budget, the message states the
/// smallest budget with a plan.
SHOESTRING_API SequencePlan plan_sequential(const std::vector<BlockFunction>& functions, const at::Tensor& x,
                                            int64_t budget_bytes, const std::vector<int64_t>& kinds = {},
                                            OffloadActivations* offload = nullptr,
                                            const std::vector<at::Tensor>& buffers = {});

/// Runs the functions one after the other as `plan` says. Pass the `offload` with which the plan was made. A
/// function begins only when copies have freed as much memory as planned, so the peak memory does not depend
/// on the speed of the copies. `buffers` are those of CheckpointOptions.
SHOESTRING_API at::Tensor checkpoint_sequential(const std::vector<BlockFunction>& functions,
                                                const SequencePlan& plan, at::Tensor x,
                                                OffloadActivations* offload = nullptr,
                                                const std::vector<at::Tensor>& buffers = {});

}  // namespace shoestring
