#pragma once

// The cost model behind a checkpoint plan, in integers: bytes and picoseconds. Integer sums do not depend on
// the order of their terms, so plans of equal cost compare as equal.

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include <shoestring/checkpoint/checkpoint_plan.h>

namespace shoestring::plan {

// maximum number of blocks that are prefetched; the arrays of State have this size
constexpr int kMaxPrefetch = 4;

struct Choice {
  // held: bytes of the block that stay on the device; link: bytes that are copied to the host
  int64_t held, link;
  // peak bytes of the block's forward and backward pass, each at least held + link
  int64_t forward, backward;
  // extra, out, in: picoseconds of the recomputation, the copy to the host and the copy back
  int64_t extra, out, in;
  int64_t slower;  // picoseconds by which the copy to the host slows forward down
};

struct Block {
  int64_t forward, backward;
  std::vector<Choice> choices;
};

struct Model {
  std::vector<Block> blocks;
  double out_bytes, in_bytes;  // bandwidths of copies to and from the host, in bytes per picosecond
  int prefetch;
  double copy_share;
};

/// The state of the search for a plan, after some blocks. Forward times count from the start of forward.
/// Backward times count down to the end of backward: each is the time from the start of a block's backward,
/// or of its copy back, to the end. One pass over the blocks, in forward order, can therefore compute the
/// times of forward and of backward.
struct State {
  // held: bytes that stay on the device. compute and out: times at which the last block's forward, and the
  // last copy to the host, have finished, with compute <= out.
  int64_t held = 0;
  int64_t compute = 0, out = 0;
  int64_t rest = 0;  // remaining time of backward when the last block's backward starts
  // arrival[j] belongs to the block j places before the last block. It is the remaining time of backward when
  // the copy back of this block starts.
  std::array<int64_t, kMaxPrefetch> arrival{};
  // link[j]: bytes to copy back for the block j places before the last block
  std::array<int64_t, kMaxPrefetch> link{};
  int64_t peak = 0;

  int64_t seconds() const { return out + arrival[0]; }  // total time in picoseconds, if no block follows
};

/// Checks the blocks and options, and converts them to the units of the search. `op` begins error messages.
Model make_model(const char* op, const std::vector<PlanBlock>& blocks, int64_t budget,
                 const CheckpointPlanOptions& options);

/// Returns the state after one more block, whose activations are treated by `choice`. If the choice does not
/// fit into the budget, the peak of the returned state exceeds the budget.
State step(const Model& model, const State& before, const Block& block, const Choice& choice, int64_t budget);

/// Predicts memory and time of a plan with the given choices, in bytes and seconds.
CheckpointPlan simulate(const Model& model, std::vector<int64_t> choices, int64_t budget);

/// The numbers by which the search compares two states. If none of a state's numbers is larger than the other
/// state's, the state is at least as good, whatever blocks follow.
constexpr int kMaxCriteria = 2 * (kMaxPrefetch + 1) + kMaxPrefetch + 2;
using Criteria = std::array<int64_t, kMaxCriteria>;

/// Returns the indices of the Pareto-optimal elements of `all`, compared by their first `count` criteria. Of
/// equal elements, only the first is returned.
std::vector<int64_t> best(const std::vector<Criteria>& all, int count);

}  // namespace shoestring::plan
