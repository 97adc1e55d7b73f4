#include <algorithm>
#include <cmath>

#include <ATen/Context.h>
#include <shoestring/runs/find_lr.h>

#include "runs/generators.h"
#include "runs/run_copy.h"

namespace shoestring {
namespace {

using at::Tensor;

constexpr double kSmoothing = 0.9;  // factor of the old value in the smoothed loss
constexpr double kRise = 3;         // a smoothed loss this many times above the least one has diverged

/// Returns the exponential average of the losses, without a bias to 0, up to the first one that diverges.
std::vector<double> smoothed(const std::vector<double>& losses) {
  std::vector<double> averages;
  double sum = 0, weight = 0, least = INFINITY;
  for (const double loss : losses) {
    sum = kSmoothing * sum + (1 - kSmoothing) * loss;
    weight = kSmoothing * weight + (1 - kSmoothing);
    const double value = sum / weight;
    if (!std::isfinite(value) || value - least > kRise * std::fabs(least)) break;
    least = std::min(least, value);
    averages.push_back(value);
  }
  return averages;
}

void expect_finding(bool good, const char* argument, const std::string& expected,
                    const std::string& received) {
  TORCH_CHECK_VALUE(good, "find_lr: ", argument, ": expected ", expected, ", received ", received);
}

struct Rates {
  std::vector<torch::optim::OptimizerParamGroup*> groups;
  std::vector<double> shares;
};

Rates rates_of(TrainingRun& run) {
  Rates rates;
  double highest = 0;
  for (auto* optimizer : run.optimizers) {
    for (auto& group : optimizer->param_groups()) {
      rates.groups.push_back(&group);
      rates.shares.push_back(group.options().get_lr());
      highest = std::max(highest, rates.shares.back());
    }
  }
  expect_finding(highest > 0, "run", "an optimizer with a learning rate above 0", c10::str(highest));
  for (double& share : rates.shares) share /= highest;
  return rates;
}

LrPass try_rates(const std::function<Tensor()>& step, const Rates& rates, const FindLrOptions& o) {
  std::vector<double> lrs, losses;
  for (int64_t i = 0; i < o.steps(); ++i) {
    const double share = static_cast<double>(i) / static_cast<double>(o.steps() - 1);
    const double lr = o.start() * std::pow(o.end() / o.start(), share);
    for (size_t g = 0; g < rates.groups.size(); ++g) rates.groups[g]->options().set_lr(lr * rates.shares[g]);
    const Tensor loss = step();
    expect_finding(loss.defined() && loss.numel() == 1, "step", "a function that returns one loss",
                   loss.defined() ? c10::str("a tensor of shape ", loss.sizes()) : "none");
    for (size_t g = 0; g < rates.groups.size(); ++g) {
      const double now = rates.groups[g]->options().get_lr();
      expect_finding(now == lr * rates.shares[g], "step", "a step that leaves the learning rate alone",
                     c10::str("one that has set it to ", now, ". Leave out the schedule"));
    }
    lrs.push_back(lr);
    losses.push_back(loss.item<double>());
    if (lr_losses_diverge(losses)) break;
  }
  return judge_lrs(lrs, losses);
}

}  // namespace

bool lr_losses_diverge(const std::vector<double>& losses) { return smoothed(losses).size() < losses.size(); }

LrPass judge_lrs(const std::vector<double>& lrs, const std::vector<double>& losses) {
  TORCH_CHECK_VALUE(lrs.size() == losses.size(), "judge_lrs: losses: expected ", lrs.size(),
                    " losses, received ", losses.size());
  const std::vector<double> curve = smoothed(losses);
  const auto least = std::min_element(curve.begin(), curve.end()) - curve.begin();
  // The smoothed loss follows each loss a few steps late, so the first of its values are nearly equal.
  expect_finding(curve.size() >= 3 && least >= 2 && curve[0] > curve[static_cast<size_t>(least)], "step",
                 c10::str("a loss that falls at some learning rate from ", lrs.empty() ? 0 : lrs.front(),
                          " to ", lrs.empty() ? 0 : lrs.back()),
                 "one that never fell below its start. Look for a mistake in step, or try a smaller start");
  size_t steepest = 1;
  double fastest = INFINITY;
  for (size_t i = 1; i + 1 < curve.size() && static_cast<std::ptrdiff_t>(i) <= least; ++i) {
    const double slope = (curve[i + 1] - curve[i - 1]) / std::log(lrs[i + 1] / lrs[i - 1]);
    if (slope < fastest) fastest = slope, steepest = i;
  }
  return {lrs, losses, lrs[steepest], lrs[static_cast<size_t>(least)] / 10};
}

LrRange find_lr(const std::function<Tensor()>& step, TrainingRun& run, const FindLrOptions& o) {
  expect_finding(o.start() > 0 && std::isfinite(o.end()), "start", "a number above 0", c10::str(o.start()));
  expect_finding(o.end() > o.start(), "end", c10::str("a number above start, ", o.start()),
                 c10::str(o.end()));
  expect_finding(o.steps() >= 10, "steps", "a number of at least 10", c10::str(o.steps()));
  expect_finding(o.passes() >= 1, "passes", "a number of at least 1", c10::str(o.passes()));
  const Rates rates = rates_of(run);
  runs::RunCopy copy(run, "find_lr");
  LrRange range{{}, 1, 1};
  double least = INFINITY, most = 0, product = 0;
  runs::restoring(copy, [&] {
    for (int64_t pass = 0; pass < o.passes(); ++pass) {
      if (pass > 0) {
        copy.restore();
        runs::each_generator([&](const std::string&, at::Generator generator) {
          const std::lock_guard lock(generator.mutex());
          generator.set_current_seed(static_cast<uint64_t>(pass));
        });
      }
      range.passes.push_back(try_rates(step, rates, o));
      const double steepest = range.passes.back().steepest;
      least = std::min(least, steepest), most = std::max(most, steepest);
      product += std::log(steepest);
    }
  });
  range.suggestion = std::exp(product / static_cast<double>(o.passes()));
  range.spread = most / least;
  return range;
}

}  // namespace shoestring
