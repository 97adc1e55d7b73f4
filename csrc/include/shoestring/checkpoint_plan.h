#pragma once

// Plans which activations of a sequence of blocks are stored, recomputed or moved to the host, so that the
// peak memory stays within a budget in bytes.

#include <cstdint>
#include <string>
#include <vector>

#include <torch/arg.h>

#include <shoestring/export.h>

namespace shoestring {

/// One way to treat the activations of a block.
struct PlanChoice {
  std::string name;
  /// Bytes that stay on the device from the end of the block's forward to the end of its backward.
  int64_t bytes = 0;
  /// Seconds that this choice adds to the block's backward, usually for recomputation.
  double extra_seconds = 0;
  /// Bytes that are copied to the host after the block's forward, and back before its backward.
  int64_t link_bytes = 0;
  /// Peak bytes of the block's own forward, and of its own backward, without what earlier blocks hold. They
  /// include what the block itself holds, so values below bytes + link_bytes are raised to that sum.
  int64_t forward_bytes = 0;
  int64_t backward_bytes = 0;
};

struct PlanBlock {
  double forward_seconds = 0;
  double backward_seconds = 0;
  std::vector<PlanChoice> choices;
};

struct CheckpointPlanOptions {
  /// Bandwidths of the link to the host and back. Copies in the same direction run one after the other; the
  /// two directions do not slow each other down.
  TORCH_ARG(double, out_bytes_per_second) = 0;
  TORCH_ARG(double, in_bytes_per_second) = 0;
  /// Fraction, 0 to 1, of the computation's speed that a copy takes while it runs. On a CPU a copy occupies a
  /// core; on a GPU it costs almost nothing.
  TORCH_ARG(double, copy_share) = 0;
  /// Number of blocks, 1 to 4, by which copies to the device run ahead. The copy for block i may start when
  /// the backward of block i + prefetch starts.
  TORCH_ARG(int64_t, prefetch) = 1;
};

struct CheckpointPlan {
  /// For each block, an index into its choices.
  std::vector<int64_t> choices;
  /// For each block, the bytes of earlier blocks that may still be on their way to the host when the block
  /// begins. With this limit the peak stays within the budget, and at most 5 % above peak_bytes, however slow
  /// the copies are.
  std::vector<int64_t> pending_bytes;
  int64_t peak_bytes = 0;
  double seconds = 0;
  /// Lower bound: no plan takes less time. Equal to `seconds` if the plan is proven to be optimal.
  double least_seconds = 0;
};

/// Finds the choices with the least total time of forward and backward whose peak memory is within
/// budget_bytes. It uses dynamic programming over the Pareto-optimal states and discards states that a lower
/// bound rules out. The result is exact while there are at most 100000 such states, divided evenly among the
/// blocks. Beyond that, only the states with the lowest bounds continue, and least_seconds tells how far from
/// optimal the plan can be.
///
/// The model of forward: the blocks run in order. After each block its link_bytes join the queue of copies to
/// the host; each copied byte is freed at once. At every moment the device holds what the earlier blocks
/// hold, the bytes that are still to be copied, and the running block's forward_bytes. A block waits for
/// copies until this sum fits into the budget.
///
/// The model of backward: it starts when the last copy has reached the host, and runs the blocks in reverse.
/// A block waits until its link_bytes have arrived. The device then holds what the earlier blocks hold, the
/// block's backward_bytes, and the link_bytes of the `prefetch` blocks before it. A block with copies
/// computes longer, by copy_share times the duration of its copies.
///
/// All times are whole picoseconds, so sums are exact.
///
/// Throws c10::Error for an invalid argument. If no plan fits into the budget, the message states the
/// smallest budget that would.
SHOESTRING_API CheckpointPlan checkpoint_plan(const std::vector<PlanBlock>& blocks, int64_t budget_bytes,
                                              const CheckpointPlanOptions& options = {});

/// Predicts memory and time of the given choices with the same model. If the choices do not fit, the
/// predicted peak is above budget_bytes.
SHOESTRING_API CheckpointPlan simulate_checkpoint_plan(const std::vector<PlanBlock>& blocks,
                                                       const std::vector<int64_t>& choices,
                                                       int64_t budget_bytes,
                                                       const CheckpointPlanOptions& options = {});

}  // namespace shoestring
