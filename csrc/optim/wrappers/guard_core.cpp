#include "optim/wrappers/guard_core.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include "core/device.h"
#include "optim/core/norm.h"
#include "optim/core/scaled.h"
#include "optim/core/state_numbers.h"
#include "optim/rule.h"
#include "optim/split/all_reduce.h"

namespace shoestring::optim::detail {
namespace {

constexpr const char* kReasons[] = {"loss", "gradient", "spike"};
constexpr double kLeastDeviation = 0.01;  // as a fraction of the mean

template <class Received>
void expect_guard(bool good, const char* argument, const std::string& expected, const Received& received) {
  expect(good, "Guard", argument, expected, c10::str(received));
}

std::string none_or(const std::optional<int64_t>& number) {
  return number ? std::to_string(*number) : "none";
}

void check_guard_options(const GuardOptions& o) {
  const auto& on = o.on();
  expect_guard(on == "skip" || on == "stop" || on == "rollback", "on", "skip, stop or rollback", on);
  expect_guard(!o.spike() || (*o.spike() > 0 && std::isfinite(*o.spike())), "spike",
               "none or a finite number above 0", o.spike().value_or(0));
  expect_guard(o.window() >= 2 && o.window() < 1 << 24, "window", "a number from 2 to 16777215", o.window());
  expect_guard(o.every() >= 1, "every", "a number of at least 1", o.every());
  expect_guard(!o.limit() || on != "stop", "limit",
               "none with on=\"stop\", which stops at the first bad step", none_or(o.limit()));
  expect_guard(o.limit().value_or(1) >= 1, "limit", "none or a number of at least 1", none_or(o.limit()));
}

}  // namespace

GuardCore::GuardCore(GuardOptions options) : options_(std::move(options)) { check_guard_options(options_); }

void GuardCore::watch(const Tensor& loss) {
  expect_guard(loss.defined() && loss.numel() == 1 && loss.is_floating_point(), "loss",
               "a floating-point tensor with one element",
               loss.defined() ? c10::str(loss.scalar_type(), " of shape ", loss.sizes()) : "none");
  const at::NoGradGuard no_grad;
  // The loss is copied, because the program may change it before the step.
  const Tensor copied = loss.detach().reshape({}).to(at::TensorOptions().dtype(at::kFloat),
                                                     /*non_blocking=*/false, /*copy=*/true);
  sum_ = sum_.defined() ? sum_ + number_on(sum_.device(), copied) : copied;
  ++losses_;
}

Tensor GuardCore::judge(const std::vector<Tensor>& gradients) {
  expect_guard(losses_ > 0 || !options_.spike(), "loss", "a loss to look for spikes", "none");
  const at::NoGradGuard no_grad;
  const at::Device device = losses_ > 0         ? sum_.device()
                            : gradients.empty() ? at::Device(at::kCPU)
                                                : gradients[0].device();
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  if (!statistics_.defined()) statistics_ = at::zeros({3}, options);
  if (statistics_.device() != device) statistics_ = statistics_.to(device);
  Tensor bad = non_finite(gradients, device);
  Tensor sum = losses_ > 0 ? sum_ : at::zeros({}, options);
  auto count = at::full({}, static_cast<double>(losses_), options);
  if (!options_.group().empty()) {
    const Tensor all = all_reduce(at::stack({sum, count, bad}), "sum", options_.group());
    sum = all[0], count = all[1], bad = all[2].sign();
  }
  loss_ = sum / count;
  if (losses_ > 0) bad = at::maximum(bad, loss_.isfinite().logical_not().to(at::kFloat));
  if (options_.spike()) {
    const Tensor mean = statistics_[1];
    const Tensor deviation = at::maximum(statistics_[2].sqrt(), mean.abs() * kLeastDeviation);
    const Tensor spike = (loss_ > mean + deviation * *options_.spike())
                             .logical_and(statistics_[0] >= static_cast<double>(options_.window()));
    bad = at::maximum(bad, spike.to(at::kFloat));
  }
  return bad;
}

void GuardCore::record(const Tensor& skipped) {
  const at::NoGradGuard no_grad;
  const at::Device device = loss_.device();
  const Tensor bad = number_on(device, skipped).reshape({});
  // The device copies these numbers to the host while the program goes on.
  const Tensor numbers = at::cat({loss_.reshape({1}), statistics_.slice(0, 1), bad.reshape({1})});
  if (memory_ == nullptr) memory_ = std::make_unique<offload::HostMemory>("Guard", device);
  const Tensor host = memory_->empty({4}, at::kFloat);
  host.copy_(numbers, /*non_blocking=*/true);
  pending_ = Pending{steps_, losses_ > 0, host, offload::Fence::now(device)};
  if (losses_ > 0) {
    // Weights of 1/n give the mean and the variance of the first losses, and constant weights give those of
    // an exponential average.
    const Tensor count = statistics_[0] + 1, difference = loss_ - statistics_[1];
    const Tensor weight = count.clamp_max(static_cast<double>(options_.window())).reciprocal();
    const Tensor mean = statistics_[1] + weight * difference;
    const Tensor variance = (1 - weight) * (statistics_[2] + weight * difference.square());
    statistics_ = at::where(bad > 0, statistics_, at::stack({count, mean, variance}));
  }
  drop();
}

void GuardCore::drop() {
  sum_ = Tensor();
  losses_ = 0;
  ++steps_;
}

/// Reads the pending numbers, if there are any.
void GuardCore::read() {
  if (!pending_) return;
  const Pending step = *std::exchange(pending_, std::nullopt);
  step.done->synchronize();
  const float* numbers = step.numbers.const_data_ptr<float>();
  if (numbers[3] == 0) {
    in_a_row_ = 0;
    return;
  }
  ++in_a_row_;
  is_due_ = true;
  const double loss = step.has_loss ? numbers[0] : NAN, mean = numbers[1];
  const double deviation = std::max(std::sqrt(double{numbers[2]}), kLeastDeviation * std::fabs(mean));
  const bool is_spike = options_.spike() && loss > mean + *options_.spike() * deviation;
  const char* reason = kReasons[1];
  last_ = "finite gradients, received NaN or infinity among them";
  if (step.has_loss && !std::isfinite(loss)) {
    reason = kReasons[0];
    last_ = c10::str("a finite loss, received ", loss);
  } else if (is_spike) {
    reason = kReasons[2];
    last_ = c10::str("a loss of at most ", mean + *options_.spike() * deviation, " (mean ", mean, " + spike ",
                     *options_.spike(), " x deviation ", deviation, "), received ", loss);
  }
  last_ = c10::str("Guard: step ", step.step, ": expected ", last_);
  bad_.push_back({step.step, reason, loss});
}

bool GuardCore::review() {
  read();
  if (!std::exchange(is_due_, false)) return false;
  if (options_.on() == "stop") {
    TORCH_CHECK(false, last_, ". The step was not taken: the weights are those before it");
  }
  if (options_.on() == "skip") {
    const int64_t limit = options_.limit().value_or(10);
    if (in_a_row_ < limit) return false;
    in_a_row_ = 0;
    TORCH_CHECK(false, last_, ". This was bad step ", limit,
                " in a row, and none was taken. Load a checkpoint, or lower the learning rate");
  }
  const int64_t limit = options_.limit().value_or(3);
  if (restored_ >= limit) {
    restored_ = 0;
    TORCH_CHECK(false, last_, ". The copy of step ", std::max<int64_t>(copied_at_, 0), " has been restored ",
                limit, " times. Lower the learning rate, or look at the data from that step on");
  }
  ++restored_;
  ++rollbacks_;
  in_a_row_ = 0;
  return true;
}

bool GuardCore::is_copy_due() const {
  return options_.on() == "rollback" && (copied_at_ < 0 || steps_ - copied_at_ >= options_.every());
}

void GuardCore::copied() {
  copied_at_ = steps_;
  restored_ = 0;
}

// ---- state

TensorDict GuardCore::state() {
  const at::NoGradGuard no_grad;
  read();
  TensorDict state("tensor");
  for (const auto& [name, number] :
       {std::pair("steps", steps_), std::pair("rollbacks", rollbacks_), std::pair("in_a_row", in_a_row_)}) {
    state.insert(name, at::scalar_tensor(number, at::kLong));
  }
  state.insert("statistics", statistics_.defined() ? statistics_.to(at::kCPU) : at::zeros({3}, at::kFloat));
  const auto size = std::ssize(bad_);
  const Tensor steps = at::empty({size}, at::kLong), reasons = at::empty({size}, at::kLong),
               losses = at::empty({size}, at::kDouble);
  for (int64_t i = 0; i < size; ++i) {
    const BadStep& bad = bad_[static_cast<size_t>(i)];
    steps.mutable_data_ptr<int64_t>()[i] = bad.step;
    losses.mutable_data_ptr<double>()[i] = bad.loss;
    reasons.mutable_data_ptr<int64_t>()[i] =
        std::find(std::begin(kReasons), std::end(kReasons), bad.reason) - std::begin(kReasons);
  }
  state.insert("bad_steps", steps);
  state.insert("bad_reasons", reasons);
  state.insert("bad_losses", losses);
  return state;
}

void GuardCore::load_state(const TensorDict& state) {
  const at::NoGradGuard no_grad;
  const auto whole = [&](const char* name) {
    const double number = number_of("Guard", state, name);
    expect_guard(number >= 0 && number < 0x1p53 && number == std::trunc(number), name,
                 "a whole number of at least 0", number);
    return static_cast<int64_t>(number);
  };
  const auto list = [&](const char* name, at::ScalarType dtype, int64_t size) {
    const Tensor* saved = state.find(name);
    const bool is_list = saved != nullptr && saved->defined() && saved->dim() == 1 &&
                         (size < 0 || saved->numel() == size) &&
                         at::isFloatingType(saved->scalar_type()) == at::isFloatingType(dtype);
    expect_guard(is_list, name, size < 0 ? c10::str("numbers") : c10::str(size, " numbers"),
                 saved == nullptr || !saved->defined()
                     ? "none"
                     : c10::str(saved->scalar_type(), " of shape ", saved->sizes()));
    return saved->to(at::kCPU, dtype).contiguous();
  };
  const int64_t steps = whole("steps"), rollbacks = whole("rollbacks"), in_a_row = whole("in_a_row");
  const Tensor statistics = list("statistics", at::kFloat, 3);
  const Tensor numbers = list("bad_steps", at::kLong, -1);
  const Tensor reasons = list("bad_reasons", at::kLong, numbers.numel());
  const Tensor losses = list("bad_losses", at::kDouble, numbers.numel());
  std::vector<BadStep> bad;
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    const int64_t reason = reasons.const_data_ptr<int64_t>()[i];
    expect_guard(reason >= 0 && reason < std::ssize(kReasons), "bad_reasons", "numbers from 0 to 2", reason);
    bad.push_back(
        {numbers.const_data_ptr<int64_t>()[i], kReasons[reason], losses.const_data_ptr<double>()[i]});
  }
  pending_.reset();
  is_due_ = false;
  sum_ = Tensor();
  losses_ = 0;
  steps_ = steps, rollbacks_ = rollbacks, in_a_row_ = in_a_row;
  statistics_ = statistics.clone();
  bad_ = std::move(bad);
  copied_at_ = -1;  // the copy belongs to other weights
  restored_ = 0;
}

}  // namespace shoestring::optim::detail
