#pragma once

// Plans which activations of a sequence of blocks are stored, recomputed or moved to the host, so that the
// peak memory stays within a budget in bytes.

#include <cstdint>
#include <string>
#include <vector>

#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring {

/// One way to treat the activations of a block: keep, recompute or copy them to the host.
struct PlanChoice {
  std::string name;
  /// Bytes of activations that stay on the device from the end of the block's forward to the end of its
  /// backward.
  int64_t bytes = 0;
  /// Seconds that this treatment of activations adds to the block's backward, usually for recomputation.
  double extra_seconds = 0;
  /// Bytes of activations that are copied to the host after the block's forward, and back before its
  /// backward.
  int64_t link_bytes = 0;
  /// forward_bytes and backward_bytes: peak memory of the block's forward and of its backward, without the
  /// activations of earlier blocks. Both include the block's own `bytes` and `link_bytes`, so smaller values
  /// are raised to bytes + link_bytes.
  int64_t forward_bytes = 0;
  int64_t backward_bytes = 0;
};

struct PlanBlock {
  double forward_seconds = 0;
  double backward_seconds = 0;
  std::vector<PlanChoice> choices;
  /// Bytes that the block's backward leaves on the device until the end of backward, such as gradients of its
  /// weights. The backward of all earlier blocks has them beside it. The block's own backward_bytes include
  /// them already.
  int64_t gradient_bytes = 0;
};

struct CheckpointPlanOptions {
  /// Bandwidth of copies from the device to the host (out) and from the host to the device (in). Copies in
  /// the same direction run one after the other. Copies in different directions do not slow each other down.
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
  /// For each block, the index of its choice in PlanBlock::choices.
  std::vector<int64_t> choices;
  /// For each block, the maximum bytes of earlier blocks' activations that may still wait for their copy to
  /// the host when the block begins. If each block waits until no more bytes are pending than that, the peak
  /// memory stays within the budget, and at most 5 % above peak_bytes, however slow the copies are.
  std::vector<int64_t> pending_bytes;
  int64_t peak_bytes = 0;
  double seconds = 0;
  /// Lower bound of the time in seconds: no plan within the budget takes less. Equal to `seconds` if the plan
  /// is proven to be optimal.
  double least_seconds = 0;
};

/// Chooses one PlanChoice for each block, so that forward and backward take the least total time and the peak
/// memory is within budget_bytes. Dynamic programming keeps the Pareto-optimal partial plans and discards
/// partial plans that a lower bound rules out. The result is exact while there are at most 100000 partial
/// plans, divided evenly among the blocks. Beyond that, only the partial plans with the lowest bounds
/// continue, and least_seconds tells how far from optimal the result can be. If none of them fits into the
/// budget in the end, the result is the last plan of checkpoint_frontier that does.
///
/// The model of forward: the blocks run in order. After each block its link_bytes join the queue of copies to
/// the host; each copied byte is freed at once. At every moment the device holds the `bytes` of the earlier
/// blocks, the bytes that are still to be copied, and the running block's forward_bytes. A block waits for
/// copies until this sum fits into the budget.
///
/// The model of backward: it starts when the last copy has reached the host, and runs the blocks in reverse.
/// A block waits until its link_bytes have arrived. The device then holds the `bytes` of the earlier blocks,
/// the block's backward_bytes, the gradient_bytes of the later blocks, and the link_bytes of the `prefetch`
/// blocks before it. A block with copies computes longer, by copy_share times the duration of its copies.
///
/// All times are whole picoseconds, so sums are exact.
///
/// Throws c10::Error for an invalid argument. If no plan fits into the budget, the message states the
/// smallest budget with a plan.
SHOESTRING_API CheckpointPlan checkpoint_plan(const std::vector<PlanBlock>& blocks, int64_t budget_bytes,
                                              const CheckpointPlanOptions& options = {});

/// Returns the plans that are the fastest for some budget, in the order of their peak memory: the first one
/// has the smallest peak of all plans, and each has a higher peak and takes less time than the one before it.
/// The fastest plan within a budget is therefore the last one whose peak is within the budget. A plan that is
/// taken from here has the peak and the time that checkpoint_plan predicts.
///
/// Without copies to the host, the result is exact while at most 1024 partial plans remain after each block;
/// with more, the plans are a selection along the whole range of budgets. If some choices have link_bytes,
/// forward waits as it would for one of 9 budgets, and the result is a selection.
SHOESTRING_API std::vector<CheckpointPlan> checkpoint_frontier(const std::vector<PlanBlock>& blocks,
                                                               const CheckpointPlanOptions& options = {});

/// Predicts peak memory and time for given choices, with the model of checkpoint_plan. If the choices do not
/// fit, the predicted peak is above budget_bytes.
SHOESTRING_API CheckpointPlan simulate_checkpoint_plan(const std::vector<PlanBlock>& blocks,
                                                       const std::vector<int64_t>& choices,
                                                       int64_t budget_bytes,
                                                       const CheckpointPlanOptions& options = {});

}  // namespace shoestring
