#pragma once

// Which activations of a row of blocks are kept, recomputed or moved to the host, so that a byte budget
// holds.

#include <cstdint>
#include <string>
#include <vector>

#include <torch/arg.h>

#include <shoestring/export.h>

namespace shoestring {

/// One way to treat a block's activations.
struct PlanChoice {
  std::string name;
  /// Held on the device from the end of the block's forward to the end of its backward.
  int64_t bytes = 0;
  /// Spent in backward besides the block's own backward: its recomputation.
  double extra_seconds = 0;
  /// Copied to the host behind the block's forward, and back before its backward.
  int64_t link_bytes = 0;
  /// The peak of the block's own forward, and of its own backward, besides what the blocks before it hold:
  /// what the block itself holds by then counts, so bytes + link_bytes is the least that is reckoned with.
  int64_t forward_bytes = 0;
  int64_t backward_bytes = 0;
};

struct PlanBlock {
  double forward_seconds = 0;
  double backward_seconds = 0;
  std::vector<PlanChoice> choices;
};

struct CheckpointPlanOptions {
  /// Of the link to the host. Copies of one direction follow one another; the directions do not disturb each
  /// other.
  TORCH_ARG(double, out_bytes_per_second) = 0;
  TORCH_ARG(double, in_bytes_per_second) = 0;
  /// Of the computation's speed that a copy takes while it runs, 0 to 1: on a CPU it wants a core, on a GPU
  /// next to nothing.
  TORCH_ARG(double, copy_share) = 0;
  /// A block's copy back may start when the backward of the block so many places behind it starts: 1 to 4.
  TORCH_ARG(int64_t, prefetch) = 1;
};

struct CheckpointPlan {
  /// Of each block, an index into its choices.
  std::vector<int64_t> choices;
  /// Of each block, how many bytes of those before it may still be on their way to the host when it begins,
  /// so that the peak is within the budget, and at most 5 % above peak_bytes, however slow copies are.
  std::vector<int64_t> pending_bytes;
  int64_t peak_bytes = 0;
  double seconds = 0;
  /// No plan takes less. Equal to seconds where the plan is proven to be the best.
  double least_seconds = 0;
};

/// The choices with the least time of forward and backward whose peak is within budget_bytes, by dynamic
/// programming over the states that none other is at least as good as in every respect, without those that a
/// lower bound rules out. That is exact up to 100000 such states, evenly behind the blocks; beyond, those
/// with the lowest bounds go on, and least_seconds tells how far off the plan can be.
///
/// The model. Forward runs the blocks in order; behind each, its link_bytes join the copies to the host,
/// which free their bytes as they go. At every moment of forward the device has: what the blocks before hold,
/// what is still to be copied, and the running block's forward_bytes; a block waits for copies until that
/// fits. Backward starts when the last copy is out, and runs the blocks in reverse; a block waits until its
/// link_bytes have arrived. The device then has: what the blocks before hold, the block's backward_bytes, and
/// the link_bytes of the `prefetch` blocks before it. A block that copies computes longer, by copy_share of
/// its copies' time.
///
/// Times are sums of whole picoseconds. Errors: c10::Error, of an argument, and of a budget that nothing
/// fits, with the least that does.
SHOESTRING_API CheckpointPlan checkpoint_plan(const std::vector<PlanBlock>& blocks, int64_t budget_bytes,
                                              const CheckpointPlanOptions& options = {});

/// What the same model predicts for given choices. Where they do not fit, the peak is above budget_bytes.
SHOESTRING_API CheckpointPlan simulate_checkpoint_plan(const std::vector<PlanBlock>& blocks,
                                                       const std::vector<int64_t>& choices,
                                                       int64_t budget_bytes,
                                                       const CheckpointPlanOptions& options = {});

}  // namespace shoestring
