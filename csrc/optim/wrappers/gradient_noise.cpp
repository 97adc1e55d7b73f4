#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <shoestring/optim/gradient_noise.h>

#include "optim/core/core.h"
#include "optim/core/scaled.h"
#include "optim/core/state_numbers.h"
#include "optim/wrappers/gradient_noise_core.h"

namespace shoestring::optim {

using namespace detail;

namespace {

constexpr const char* kNoise = "GradientNoise";
constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

}  // namespace

// ---- averages

detail::NoiseAverages::NoiseAverages(double decay) : decay_(decay) {
  expect(kFraction.holds(decay), kNoise, "decay", c10::str("a number ", kFraction.expected), c10::str(decay));
}

void detail::NoiseAverages::observe(const Tensor& square, double rows, const Tensor& all_square,
                                    double all_rows) {
  expect(rows > 0 && std::isfinite(all_rows), kNoise, "rows", "a number above 0", c10::str(rows));
  expect(all_rows > rows, kNoise, "micro_batches", "at least 2 micro-batches or processes",
         c10::str(all_rows / rows));
  const at::NoGradGuard no_grad;
  const at::Device device = square.device();
  const Tensor small = square.reshape({}), whole = number_on(device, all_square).reshape({});
  const Tensor noise = (small - whole) * (1 / (1 / rows - 1 / all_rows));
  const Tensor signal = (whole * all_rows - small * rows) * (1 / (all_rows - rows));
  const Tensor now = at::stack({at::ones_like(noise), noise, signal}) * (1 - decay_);
  averages_ = averages_.defined() ? averages_.to(device) * decay_ + now : now;
}

double detail::NoiseAverages::noise() const {
  return averages_.defined() ? (averages_[1] / averages_[0]).item<double>() : kNothing;
}

double detail::NoiseAverages::square() const {
  return averages_.defined() ? (averages_[2] / averages_[0]).item<double>() : kNothing;
}

double detail::NoiseAverages::critical_batch() const {
  const double signal = square();
  if (std::isnan(signal)) return kNothing;
  return signal > 0 ? noise() / signal : std::numeric_limits<double>::infinity();
}

TensorDict detail::NoiseAverages::state() const {
  TensorDict state("tensor");
  state.insert("decay", at::scalar_tensor(decay_, at::kDouble));
  state.insert("averages", averages_.defined() ? averages_.to(at::kCPU) : at::zeros({3}, at::kFloat));
  return state;
}

void detail::NoiseAverages::load_state(const TensorDict& state) {
  const NoiseAverages loaded(number_of(kNoise, state, "decay"));
  const Tensor* saved = state.find("averages");
  const bool fits = saved != nullptr && saved->defined() && saved->dim() == 1 && saved->numel() == 3 &&
                    saved->is_floating_point();
  expect(fits, kNoise, "averages", "3 floating-point numbers",
         saved == nullptr || !saved->defined()
             ? "none"
             : c10::str(saved->scalar_type(), " of shape ", saved->sizes()));
  const Tensor averages = saved->to(at::TensorOptions(at::kCPU).dtype(at::kFloat), /*non_blocking=*/false,
                                    /*copy=*/true);
  averages_ = averages[0].item<double>() > 0 ? averages : Tensor();
  decay_ = loaded.decay_;
}

// ---- the class

GradientNoise::GradientNoise(LowMemoryOptimizer& optimizer, double decay)
    : optimizer_(&optimizer), averages_(std::make_unique<NoiseAverages>(decay)) {
  Access::core(optimizer).takes_norms = true;
}

GradientNoise::~GradientNoise() { Access::core(*optimizer_).takes_norms = false; }

void GradientNoise::update(int64_t rows, int64_t micro_batches) {
  expect(rows >= 1, kNoise, "rows", "a number of at least 1", c10::str(rows));
  expect(micro_batches >= 2, kNoise, "micro_batches", "at least 2 micro-batches or processes",
         c10::str(micro_batches));
  const at::NoGradGuard no_grad;
  Core& core = Access::core(*optimizer_);
  const auto count = static_cast<double>(micro_batches);
  // Each gradient is that of a loss that was divided by their number.
  const Tensor square = core.take_squares() * count;
  observe(square, static_cast<double>(rows), core.whole_square(), static_cast<double>(rows) * count);
}

void GradientNoise::observe(const Tensor& square, double rows, const Tensor& all_square, double all_rows) {
  averages_->observe(square, rows, all_square, all_rows);
}
double GradientNoise::noise() const { return averages_->noise(); }
double GradientNoise::square() const { return averages_->square(); }
double GradientNoise::critical_batch() const { return averages_->critical_batch(); }
TensorDict GradientNoise::state() const { return averages_->state(); }
void GradientNoise::load_state(const TensorDict& state) { averages_->load_state(state); }

// ---- learning rates

double scale_lr(double lr, double base_batch, double batch, const std::string& rule,
                std::optional<double> critical_batch) {
  for (const auto& [name, value] :
       {std::pair("lr", lr), std::pair("base_batch", base_batch), std::pair("batch", batch),
        std::pair("critical_batch", critical_batch.value_or(1))}) {
    expect(value > 0 && std::isfinite(value), "scale_lr", name, "a finite number above 0", c10::str(value));
  }
  expect(rule == "sqrt" || rule == "linear", "scale_lr", "rule", "sqrt or linear", rule);
  const double most = critical_batch.value_or(std::numeric_limits<double>::infinity());
  const double ratio = std::min(batch, most) / std::min(base_batch, most);
  return lr * (rule == "sqrt" ? std::sqrt(ratio) : ratio);
}

}  // namespace shoestring::optim
