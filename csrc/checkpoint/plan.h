#pragma once

// The model behind a checkpoint plan, in integers: bytes and picoseconds. Integer sums do not depend on their
// order, so plans of equal cost compare as equal.

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include <shoestring/checkpoint_plan.h>

namespace shoestring::plan {

constexpr int kMaxPrefetch = 4;  // a state has one number for each block in flight

struct Choice {
  int64_t held, link;         // bytes that stay on the device; bytes that are copied to the host
  int64_t forward, backward;  // peak bytes of each pass, at least held + link
  int64_t extra, out, in;     // picoseconds: recomputation; copy to the host; copy back
  int64_t slower;             // picoseconds that the copy to the host adds to forward
};

struct Block {
  int64_t forward, backward;
  std::vector<Choice> choices;
};

struct Model {
  std::vector<Block> blocks;
  double out_bytes, in_bytes;  // bytes per picosecond
  int prefetch;
  double copy_share;
};

/// The state of the search after some blocks. Times of forward count from its start. Times of backward count
/// from its end: they say how much longer backward lasts from the moment at which a block's backward, or its
/// copy back, starts. So one pass over the blocks computes both.
struct State {
  // Times at which the last block's forward, and its copy to the host, have finished: compute <= out.
  int64_t held = 0;
  int64_t compute = 0, out = 0;
  int64_t rest = 0;  // remaining time of backward, from the start of the last block's backward
  // Remaining time of backward, from the start of the copy back: of the last block, of the block before it,
  // and so on.
  std::array<int64_t, kMaxPrefetch> arrival{};
  std::array<int64_t, kMaxPrefetch> link{};  // bytes of the copies in `arrival`
  int64_t peak = 0;

  int64_t seconds() const { return out + arrival[0]; }  // total time if no block follows
};

Model make_model(const char* op, const std::vector<PlanBlock>& blocks, int64_t budget,
                 const CheckpointPlanOptions& options);

/// Returns the state after one more block. Its peak exceeds the budget if the choice does not fit.
State step(const Model& model, const State& before, const Block& block, const Choice& choice, int64_t budget);

/// Returns the prediction of the model in bytes and seconds.
CheckpointPlan simulate(const Model& model, std::vector<int64_t> choices, int64_t budget);

/// The numbers by which two states are compared. A state with no larger number than another state is at least
/// as good, whatever blocks follow.
constexpr int kMaxCriteria = 2 * (kMaxPrefetch + 1) + kMaxPrefetch + 1;
using Criteria = std::array<int64_t, kMaxCriteria>;

/// Returns the Pareto-optimal members of `all` by the first `count` criteria. Of equal members it returns the
/// first.
std::vector<int64_t> best(const std::vector<Criteria>& all, int count);

}  // namespace shoestring::plan
