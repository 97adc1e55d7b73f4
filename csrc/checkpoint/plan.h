#pragma once

// The model of a plan, in whole numbers: bytes and picoseconds. Sums of them do not depend on their order, so
// that plans which are equally good are found to be.

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include <shoestring/checkpoint_plan.h>

namespace shoestring::plan {

constexpr int kMaxPrefetch = 4;  // a state has a number for each block in flight

struct Choice {
  int64_t held, link;         // bytes
  int64_t forward, backward;  // bytes at the peak of either pass, held and link at least
  int64_t extra, out, in;     // time
  int64_t slower;             // forward, for its copy
};

struct Block {
  int64_t forward, backward;
  std::vector<Choice> choices;
};

struct Model {
  std::vector<Block> blocks;
  double out_bytes, in_bytes;  // a picosecond
  int prefetch;
  double copy_share;
};

/// After some blocks. Forward's times count from its start; backward's are known from its end: how long it
/// still lasts from the moment on that a block's backward, or its copy back, starts. So one pass over the
/// blocks settles both.
struct State {
  int64_t held = 0;
  int64_t compute = 0,
          out = 0;   // when the last block's forward, and its copy to the host, are done: compute <= out
  int64_t rest = 0;  // of backward, from the last block on
  std::array<int64_t, kMaxPrefetch>
      arrival{};  // of backward, from the copy back on: of the last block, the one before it ...
  std::array<int64_t, kMaxPrefetch> link{};  // their bytes
  int64_t peak = 0;

  int64_t seconds() const { return out + arrival[0]; }  // if no block follows
};

Model make_model(const char* op, const std::vector<PlanBlock>& blocks, int64_t budget,
                 const CheckpointPlanOptions& options);

/// The state after one more block. Its peak is above the budget where the choice does not fit.
State step(const Model& model, const State& before, const Block& block, const Choice& choice, int64_t budget);

/// The model's prediction in the units of the caller.
CheckpointPlan simulate(const Model& model, std::vector<int64_t> choices, int64_t budget);

/// What two states are compared by: one that has no larger number than another is at least as good, whatever
/// follows.
constexpr int kMaxCriteria = 2 * (kMaxPrefetch + 1) + kMaxPrefetch + 1;
using Criteria = std::array<int64_t, kMaxCriteria>;

/// The members of `all` that no other is at least as good as, by the first `count` criteria; of equals the
/// first.
std::vector<int64_t> best(const std::vector<Criteria>& all, int count);

}  // namespace shoestring::plan
