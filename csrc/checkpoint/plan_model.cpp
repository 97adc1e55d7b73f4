#include "checkpoint/plan.h"

// The cost model of a checkpoint plan: how the treatment of each block changes memory and time.

#include <cmath>
#include <utility>

#include <c10/util/Exception.h>

namespace shoestring::plan {
namespace {

constexpr double kTicks = 1e12;  // ticks per second; a tick is a picosecond
// Upper limit of each cost (bytes or picoseconds) of one choice. Sums of a thousand such costs stay exact in
// 64 bits.
constexpr int64_t kMost = int64_t{1} << 52;
constexpr int64_t kLongest = int64_t{1} << 60;

int64_t ticks(const char* op, const char* what, size_t block, double seconds) {
  TORCH_CHECK(seconds >= 0 && seconds * kTicks <= kMost, op, ": ", what, " of block ", block,
              ": expected 0 to 4500 seconds, received ", seconds);
  return std::llround(seconds * kTicks);
}

int64_t bytes(const char* op, const char* what, size_t block, int64_t value) {
  TORCH_CHECK(value >= 0 && value <= kMost, op, ": ", what, " of block ", block,
              ": expected 0 to 2^52 bytes, received ", value);
  return value;
}

int64_t copy_time(int64_t bytes, double per_tick) {
  return bytes == 0 ? 0 : static_cast<int64_t>(std::min(std::floor(bytes / per_tick), double(kLongest)));
}

}  // namespace

Model make_model(const char* op, const std::vector<PlanBlock>& blocks, int64_t budget,
                 const CheckpointPlanOptions& options) {
  TORCH_CHECK(budget >= 0, op, ": budget: expected a number of bytes of at least 0, received ", budget);
  TORCH_CHECK(options.prefetch() >= 1 && options.prefetch() <= kMaxPrefetch, op, ": prefetch: expected 1 to ",
              kMaxPrefetch, " blocks, received ", options.prefetch());
  TORCH_CHECK(options.copy_share() >= 0 && options.copy_share() <= 1, op,
              ": copy_share: expected 0 to 1, received ", options.copy_share());
  TORCH_CHECK(blocks.size() <= 1000, op, ": blocks: expected at most 1000, received ", blocks.size());
  Model model{{},
              options.out_bytes_per_second() / kTicks,
              options.in_bytes_per_second() / kTicks,
              static_cast<int>(options.prefetch()),
              options.copy_share()};
  for (size_t i = 0; i < blocks.size(); ++i) {
    const PlanBlock& from = blocks[i];
    TORCH_CHECK(!from.choices.empty(), op, ": choices of block ", i, ": expected one or more, received none");
    Block to{ticks(op, "forward_seconds", i, from.forward_seconds),
             ticks(op, "backward_seconds", i, from.backward_seconds),
             {}};
    for (const PlanChoice& choice : from.choices) {
      const int64_t held = bytes(op, "bytes", i, choice.bytes),
                    link = bytes(op, "link_bytes", i, choice.link_bytes);
      TORCH_CHECK(link == 0 || (options.out_bytes_per_second() > 0 && options.in_bytes_per_second() > 0), op,
                  ": link_bytes of block ", i, ": expected bandwidths above 0, received ",
                  options.out_bytes_per_second(), " bytes per second out and ", options.in_bytes_per_second(),
                  " in");
      Choice one{held,
                 link,
                 std::max(bytes(op, "forward_bytes", i, choice.forward_bytes), held + link),
                 std::max(bytes(op, "backward_bytes", i, choice.backward_bytes), held + link),
                 ticks(op, "extra_seconds", i, choice.extra_seconds),
                 copy_time(link, model.out_bytes),
                 copy_time(link, model.in_bytes),
                 0};
      TORCH_CHECK(one.out <= kMost && one.in <= kMost, op, ": link_bytes of block ", i,
                  ": expected copies of at most 4500 seconds, received ", link, " bytes for this bandwidth");
      one.slower = std::llround(model.copy_share * static_cast<double>(one.out));
      one.extra += std::llround(model.copy_share * static_cast<double>(one.in));
      to.choices.push_back(one);
    }
    model.blocks.push_back(std::move(to));
  }
  int64_t later = 0;  // bytes that the backward of later blocks has left
  for (size_t i = blocks.size(); i-- > 0;) {
    for (Choice& choice : model.blocks[i].choices) choice.backward += later;
    later += bytes(op, "gradient_bytes", i, blocks[i].gradient_bytes);
  }
  return model;
}

State step(const Model& model, const State& s, const Block& block, const Choice& choice, int64_t budget) {
  State next;
  const int k = model.prefetch;
  // In forward, bytes of earlier blocks that still wait for their copy to the host may occupy what this block
  // leaves of the budget. If these bytes need more, this block waits for copies.
  const int64_t room = budget - s.held - choice.forward;
  const int64_t latest = std::min(room > 0 ? copy_time(room, model.out_bytes) : 0, kLongest);
  const int64_t start = s.out > s.compute ? std::max(s.compute, s.out - latest) : s.compute;
  int64_t waiting = s.out > start ? static_cast<int64_t>(std::ceil((s.out - start) * model.out_bytes)) : 0;
  if (room >= 0) waiting = std::min(waiting, room);
  next.compute = start + block.forward + choice.slower;
  next.out = std::max(s.out, next.compute) + choice.out;
  next.held = s.held + choice.held;

  // In backward, the copy back of the block `prefetch` places before this block starts together with this
  // block's backward. A block's backward waits until the copy back of its own activations has finished.
  int64_t prefetched = 0;
  for (int j = 0; j < k; ++j) prefetched += s.link[j];
  next.rest = std::max(block.backward + choice.extra + s.rest, s.arrival[k - 1]);
  // A block that copies nothing is treated as if it had a copy back that takes no time and starts with its
  // backward.
  next.arrival[0] =
      choice.link > 0 ? choice.in + std::max(next.rest, s.arrival[0]) : std::max(next.rest, s.arrival[0]);
  next.link[0] = choice.link;
  for (int j = 1; j < k; ++j)
    next.arrival[j] = std::max(s.arrival[j - 1], next.rest), next.link[j] = s.link[j - 1];
  next.peak = std::max({s.peak, s.held + choice.forward + waiting, s.held + choice.backward + prefetched});
  return next;
}

CheckpointPlan simulate(const Model& model, std::vector<int64_t> choices, int64_t budget) {
  State state;
  std::vector<int64_t> pending;
  for (size_t i = 0; i < model.blocks.size(); ++i) {
    const Block& block = model.blocks[i];
    const Choice& choice = block.choices[choices[i]];
    pending.push_back(state.held + choice.forward);
    state = step(model, state, block, choice, budget);
  }
  const int64_t most = std::min(budget, state.peak + state.peak / 20);
  for (int64_t& bytes : pending) bytes = std::max<int64_t>(0, most - bytes);
  const double seconds = state.seconds() / kTicks;
  return {std::move(choices), std::move(pending), state.peak, seconds, seconds};
}

}  // namespace shoestring::plan

namespace shoestring {

CheckpointPlan simulate_checkpoint_plan(const std::vector<PlanBlock>& blocks,
                                        const std::vector<int64_t>& choices, int64_t budget,
                                        const CheckpointPlanOptions& options) {
  constexpr const char* op = "simulate_checkpoint_plan";
  const plan::Model model = plan::make_model(op, blocks, budget, options);
  TORCH_CHECK(choices.size() == blocks.size(), op, ": choices: expected one for each of ", blocks.size(),
              " blocks, received ", choices.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    TORCH_CHECK(choices[i] >= 0 && choices[i] < static_cast<int64_t>(blocks[i].choices.size()), op,
                ": choices: expected 0 to ", blocks[i].choices.size() - 1, " for block ", i, ", received ",
                choices[i]);
  }
  return plan::simulate(model, choices, budget);
}

}  // namespace shoestring
