#pragma once

// A row of functions under a byte budget: measured, planned, run.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <shoestring/checkpoint_plan.h>
#include <shoestring/export.h>
#include <shoestring/offload_activations.h>

namespace shoestring {

using BlockFunction = std::function<at::Tensor(const at::Tensor&)>;

struct SequencePlan : CheckpointPlan {
  /// Of each function: "keep" (as without checkpoint), "recompute", "keep attention" (recomputed but for
  /// attention), "keep attention and products", "offload" (what is saved leaves the device), or "recompute,
  /// input offloaded".
  std::vector<std::string> names;
};

/// Chooses how each function treats its activations, so that forward and backward of all of them, one after
/// the other, take the least time within budget_bytes at their peak: of what they allocate besides
/// parameters, gradients and optimizer state. Each function is measured once in each way, alone, forward and
/// backward, on what those before it make of x; then checkpoint_plan decides. Parameters' gradients and
/// random numbers are afterwards as before.
///
/// kinds: functions with the same number cost the same, and one of them is measured for all; empty: each is
/// measured. A whole training step can be planned: the first function may take tokens, and the last return
/// the loss.
///
/// offload: functions may also move what they save (or, recomputed, their input) to the host or a disk,
/// through this; how fast that goes is measured, and part of the plan. It should exclude parameters and
/// whatever else lives on.
///
/// Errors: c10::Error, of a budget that nothing fits, with the least that does; and where checkpoint has one.
SHOESTRING_API SequencePlan plan_sequential(const std::vector<BlockFunction>& functions, const at::Tensor& x,
                                            int64_t budget_bytes, const std::vector<int64_t>& kinds = {},
                                            OffloadActivations* offload = nullptr);

/// Runs the functions one after the other as the plan says, with the `offload` that it was made with. A
/// function begins when copies have left as much memory as was planned, so the peak does not depend on how
/// quick they are.
SHOESTRING_API at::Tensor checkpoint_sequential(const std::vector<BlockFunction>& functions,
                                                const SequencePlan& plan, at::Tensor x,
                                                OffloadActivations* offload = nullptr);

}  // namespace shoestring
