// Registers the operators checkpoint_plan, checkpoint_frontier, simulate_checkpoint_plan and
// _checkpoint_choices for Python.

#include <string>
#include <tuple>
#include <vector>

#include <torch/library.h>

#include <shoestring/checkpoint/checkpoint_plan.h>

#include "checkpoint/choices.h"

namespace shoestring {
namespace {

using Ints = std::vector<int64_t>;
using Floats = std::vector<double>;

// Converts the arguments of the operators, which are flat lists, to one PlanBlock per block. `choices` holds
// the number of choices of each block. The lists from `bytes` on concatenate the choices of all blocks.
std::vector<PlanBlock> unpack(const char* op, const Floats& forward_seconds, const Floats& backward_seconds,
                              const Ints& choices, const Ints& bytes, const Floats& extra_seconds,
                              const Ints& link_bytes, const Ints& forward_bytes, const Ints& backward_bytes,
                              const Ints& gradient_bytes) {
  const size_t blocks = choices.size();
  TORCH_CHECK(forward_seconds.size() == blocks && backward_seconds.size() == blocks, op,
              ": choices: expected one number of "
              "choices for each time of forward and backward, received ",
              blocks, " for ", forward_seconds.size(), " and ", backward_seconds.size());
  TORCH_CHECK(gradient_bytes.size() == blocks, op, ": gradient_bytes: expected one number of each of ",
              blocks, " blocks, received ", gradient_bytes.size());
  size_t total = 0;
  for (const int64_t count : choices) {
    TORCH_CHECK(count > 0, op, ": choices: expected 1 or more of each block, received ", count);
    total += count;
  }
  for (const size_t size :
       {bytes.size(), extra_seconds.size(), link_bytes.size(), forward_bytes.size(), backward_bytes.size()}) {
    TORCH_CHECK(size == total, op, ": expected lists of ", total,
                " numbers, one for each choice of each block, received one of ", size);
  }
  std::vector<PlanBlock> result;
  size_t at = 0;
  for (size_t i = 0; i < blocks; ++i) {
    PlanBlock block{forward_seconds[i], backward_seconds[i], {}, gradient_bytes[i]};
    for (int64_t c = 0; c < choices[i]; ++c, ++at) {
      block.choices.push_back(
          {"", bytes[at], extra_seconds[at], link_bytes[at], forward_bytes[at], backward_bytes[at]});
    }
    result.push_back(std::move(block));
  }
  return result;
}

CheckpointPlanOptions options_of(double out_bytes_per_second, double in_bytes_per_second, double copy_share,
                                 int64_t prefetch) {
  return CheckpointPlanOptions()
      .out_bytes_per_second(out_bytes_per_second)
      .in_bytes_per_second(in_bytes_per_second)
      .copy_share(copy_share)
      .prefetch(prefetch);
}

using Names = std::vector<std::string>;

std::tuple<Names, c10::List<bool>, std::vector<Names>, c10::List<bool>> names_of_choices() {
  std::tuple<Names, c10::List<bool>, std::vector<Names>, c10::List<bool>> all;
  auto& [names, recomputed, keep, offloaded] = all;
  for (const auto& choice : activations::choices()) {
    names.push_back(choice.name);
    recomputed.push_back(choice.recomputed);
    keep.push_back(choice.keep);
    offloaded.push_back(choice.offloaded);
  }
  return all;
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_checkpoint_choices", names_of_choices);
  m.impl("checkpoint_plan",
         [](Floats forward_seconds, Floats backward_seconds, Ints choices, Ints bytes, Floats extra_seconds,
            Ints link_bytes, Ints forward_bytes, Ints backward_bytes, Ints gradient_bytes, int64_t budget,
            double out_bytes_per_second, double in_bytes_per_second, double copy_share,
            int64_t prefetch) -> std::tuple<Ints, Ints, int64_t, double, double> {
           const auto blocks =
               unpack("checkpoint_plan", forward_seconds, backward_seconds, choices, bytes, extra_seconds,
                      link_bytes, forward_bytes, backward_bytes, gradient_bytes);
           CheckpointPlan plan = checkpoint_plan(
               blocks, budget, options_of(out_bytes_per_second, in_bytes_per_second, copy_share, prefetch));
           return {std::move(plan.choices), std::move(plan.pending_bytes), plan.peak_bytes, plan.seconds,
                   plan.least_seconds};
         });
  m.impl("checkpoint_frontier",
         [](Floats forward_seconds, Floats backward_seconds, Ints choices, Ints bytes, Floats extra_seconds,
            Ints link_bytes, Ints forward_bytes, Ints backward_bytes, Ints gradient_bytes,
            double out_bytes_per_second, double in_bytes_per_second, double copy_share,
            int64_t prefetch) -> std::tuple<std::vector<Ints>, std::vector<Ints>, Ints, Floats> {
           const auto blocks =
               unpack("checkpoint_frontier", forward_seconds, backward_seconds, choices, bytes, extra_seconds,
                      link_bytes, forward_bytes, backward_bytes, gradient_bytes);
           std::tuple<std::vector<Ints>, std::vector<Ints>, Ints, Floats> all;
           auto& [plans, pending, peaks, seconds] = all;
           for (CheckpointPlan& plan : checkpoint_frontier(
                    blocks, options_of(out_bytes_per_second, in_bytes_per_second, copy_share, prefetch))) {
             plans.push_back(std::move(plan.choices)), pending.push_back(std::move(plan.pending_bytes));
             peaks.push_back(plan.peak_bytes), seconds.push_back(plan.seconds);
           }
           return all;
         });
  m.impl("simulate_checkpoint_plan",
         [](Floats forward_seconds, Floats backward_seconds, Ints choices, Ints bytes, Floats extra_seconds,
            Ints link_bytes, Ints forward_bytes, Ints backward_bytes, Ints gradient_bytes, Ints plan,
            int64_t budget, double out_bytes_per_second, double in_bytes_per_second, double copy_share,
            int64_t prefetch) -> std::tuple<Ints, int64_t, double> {
           const auto blocks =
               unpack("simulate_checkpoint_plan", forward_seconds, backward_seconds, choices, bytes,
                      extra_seconds, link_bytes, forward_bytes, backward_bytes, gradient_bytes);
           CheckpointPlan simulated = simulate_checkpoint_plan(
               blocks, plan, budget,
               options_of(out_bytes_per_second, in_bytes_per_second, copy_share, prefetch));
           return {std::move(simulated.pending_bytes), simulated.peak_bytes, simulated.seconds};
         });
}

}  // namespace
}  // namespace shoestring
