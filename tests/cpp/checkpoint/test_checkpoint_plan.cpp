// Compares the plans of the checkpoint planner with an exhaustive search that uses the planner's own cost
// model. The Python tests compare that cost model with an independent one.

#include <shoestring/checkpoint/checkpoint_plan.h>

#include <algorithm>
#include <limits>
#include <random>

#include "catch.h"

using shoestring::CheckpointPlanOptions;
using shoestring::PlanBlock;

TEST_CASE("checkpoint_plan finds the best of all plans") {
  for (unsigned seed = 0; seed < 12; ++seed) {
    INFO("seed " << seed);
    std::mt19937 random(seed);
    const auto between = [&](int64_t a, int64_t b) { return a + int64_t(random() % (b - a + 1)); };
    std::vector<PlanBlock> blocks;
    for (int64_t i = 0, n = between(4, 7); i < n; ++i) {
      const int64_t size = between(20, 120), least = between(1, 5);
      const double forward = between(1, 9) * 0.01;
      PlanBlock block{forward, between(1, 16) * 0.01, {}};
      block.choices = {{"keep", size, 0, 0, size * 2, size * 2},
                       {"recompute", least, forward, 0, size * 2, size * 3},
                       {"offload", 0, 0, size, size * 2, size * 2}};
      blocks.push_back(std::move(block));
    }
    const auto options = CheckpointPlanOptions()
                             .out_bytes_per_second(2000)
                             .in_bytes_per_second(1500)
                             .copy_share(0.25 * double(between(0, 4)))
                             .prefetch(between(1, 3));
    std::vector<std::vector<int64_t>> plans(1);
    for (const PlanBlock& block : blocks) {
      std::vector<std::vector<int64_t>> longer;
      for (const auto& plan : plans) {
        for (size_t c = 0; c < block.choices.size(); ++c) longer.push_back(plan), longer.back().push_back(c);
      }
      plans = std::move(longer);
    }
    const int64_t budget = between(200, 500);
    int64_t floor = std::numeric_limits<int64_t>::max();
    double best = std::numeric_limits<double>::infinity();
    for (const auto& plan : plans) {
      const auto result = simulate_checkpoint_plan(blocks, plan, budget, options);
      if (result.peak_bytes <= budget) best = std::min(best, result.seconds);
      floor = std::min(floor, simulate_checkpoint_plan(blocks, plan, 0, options).peak_bytes);
    }
    if (floor > budget) {
      CHECK_THROWS_WITH(
          checkpoint_plan(blocks, budget, options),
          Catch::Contains("checkpoint_plan: budget: expected at least " + std::to_string(floor) + " bytes"));
      continue;
    }
    const auto found = checkpoint_plan(blocks, budget, options);
    CHECK(found.seconds == best);
    CHECK(found.least_seconds == best);
    CHECK(found.peak_bytes <= budget);
  }
}
