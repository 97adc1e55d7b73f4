#include <cmath>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <shoestring/optim/grad_scaler.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/serialize/archive.h>

#include "optim/core/core.h"
#include "optim/core/scaled.h"
#include "optim/core/state_numbers.h"

namespace shoestring::optim {

using namespace detail;

namespace {

constexpr const char* kFields[] = {"scale", "growth_factor", "backoff_factor", "growth_interval",
                                   "_growth_tracker"};

void expect_scaler(bool good, const char* argument, const std::string& expected,
                   const std::string& received) {
  expect(good, "GradScaler", argument, expected, received);
}

void check_loss_scale(const char* argument, double scale) {
  const auto rounded = static_cast<float>(scale);
  expect_scaler(rounded > 0 && std::isfinite(rounded), argument, "a finite fp32 number above 0",
                c10::str(scale));
}

void check_scaler_options(const GradScalerOptions& o) {
  check_loss_scale("init_scale", o.init_scale());
  expect_scaler(o.growth_factor() > 1 && std::isfinite(o.growth_factor()), "growth_factor",
                "a finite number above 1", c10::str(o.growth_factor()));
  expect_scaler(o.backoff_factor() > 0 && o.backoff_factor() < 1, "backoff_factor",
                "a number above 0 and below 1", c10::str(o.backoff_factor()));
  expect_scaler(o.growth_interval() >= 1 && o.growth_interval() <= INT32_MAX, "growth_interval",
                "a number from 1 to 2147483647", c10::str(o.growth_interval()));
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options) : options_(options) {
  check_scaler_options(options);
}

void GradScaler::expect_scale(const char* function) const {
  expect_scaler(scale_.defined(), function, "a scaled loss",
                "none. Call backward() on the result of scale(loss) first.");
}

Tensor GradScaler::scale(const Tensor& output) {
  if (!is_enabled()) return output;
  expect_scaler(output.defined(), "scale", "a tensor", "an undefined one");
  if (!scale_.defined()) {
    const auto options = at::TensorOptions(output.device());
    scale_ = at::full({}, options_.init_scale(), options.dtype(at::kFloat));
    growth_tracker_ = at::full({}, init_growth_tracker_, options.dtype(at::kInt));
  }
  return output * number_on(output.device(), scale_);
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return;
  expect_scale("unscale_");
  Progress& progress = progress_[&optimizer];
  expect_scaler(progress.stage == Stage::kReady, "unscale_",
                "one call per optimizer before step() and update()",
                progress.stage == Stage::kUnscaled ? "a second call. Call step() and update() next."
                                                   : "a call after step(). Call update() next.");
  if (const auto* low_memory = divides_within_step(optimizer))
    Access::core(*low_memory).expect_no_sums("unscale_");
  progress.found_inf = unscale(optimizer, scale_);
  progress.stage = Stage::kUnscaled;
}

void GradScaler::step(torch::optim::Optimizer& optimizer, const Tensor& skip) {
  if (!is_enabled()) {
    skip.defined() ? void(scaled_step(optimizer, Tensor(), skip)) : void(optimizer.step());
    return;
  }
  expect_scale("step");
  Progress& progress = progress_[&optimizer];
  expect_scaler(progress.stage != Stage::kStepped, "step", "one call per optimizer before update()",
                "a second call. Call update() next.");
  const auto* low_memory = divides_within_step(optimizer);
  if (low_memory == nullptr || skip.defined()) {
    if (progress.stage == Stage::kReady) unscale_(optimizer);
    expect_scaler(progress.found_inf.defined(), "step", "an optimizer whose parameters have gradients",
                  "no gradient. Call backward() first.");
  }
  const bool ready = progress.stage == Stage::kReady;
  // A step without gradients says nothing about the scale, so update() must not count it.
  const bool counts = ready ? Access::core(*low_memory).has_gradients() : progress.found_inf.defined();
  const Tensor unscaled = ready || counts ? progress.found_inf : at::zeros({}, scale_.options());
  const Tensor skipped = scaled_step(optimizer, ready ? scale_ : Tensor(), either(unscaled, skip));
  if (counts && !skip.defined()) progress.found_inf = skipped;
  progress.stage = Stage::kStepped;
}

void GradScaler::update() {
  if (!is_enabled()) return;
  expect_scale("update");
  const at::NoGradGuard no_grad;
  Tensor found_inf_of_all;
  for (const auto& [optimizer, progress] : progress_) {
    if (progress.found_inf.defined())
      found_inf_of_all = either(found_inf_of_all, number_on(scale_.device(), progress.found_inf));
  }
  expect_scaler(found_inf_of_all.defined(), "update", "a step with gradients since the last update",
                "none. Call step() first.");
  at::_amp_update_scale_(scale_, growth_tracker_, found_inf_of_all, options_.growth_factor(),
                         options_.backoff_factor(), options_.growth_interval());
  progress_.clear();
}

void GradScaler::update(double new_scale) {
  if (!is_enabled()) return;
  expect_scale("update");
  check_loss_scale("new_scale", new_scale);
  scale_.fill_(new_scale);
  progress_.clear();
}

void GradScaler::update(const Tensor& new_scale) {
  if (!is_enabled()) return;
  expect_scale("update");
  expect_scaler(new_scale.defined() && new_scale.numel() == 1 && !new_scale.requires_grad(), "new_scale",
                "a tensor with one element that requires no gradient",
                new_scale.defined()
                    ? c10::str("shape ", new_scale.sizes(),
                               ", requires_grad=", new_scale.requires_grad() ? "true" : "false")
                    : "an undefined one");
  scale_.copy_(new_scale.reshape({}), /*non_blocking=*/!scale_.is_cpu());
  progress_.clear();
}

double GradScaler::get_scale() const {
  if (!is_enabled()) return 1;
  return scale_.defined() ? scale_.item<double>() : options_.init_scale();
}

TensorDict GradScaler::state() const {
  TensorDict state;
  if (!is_enabled()) return state;
  const bool begun = scale_.defined();
  state.insert("scale", begun ? scale_.clone() : at::scalar_tensor(options_.init_scale(), at::kFloat));
  state.insert("growth_factor", at::scalar_tensor(options_.growth_factor(), at::kDouble));
  state.insert("backoff_factor", at::scalar_tensor(options_.backoff_factor(), at::kDouble));
  state.insert("growth_interval", at::scalar_tensor(options_.growth_interval(), at::kLong));
  state.insert("_growth_tracker",
               begun ? growth_tracker_.clone() : at::scalar_tensor(init_growth_tracker_, at::kInt));
  return state;
}

void GradScaler::load_state(const TensorDict& state) {
  if (!is_enabled()) return;
  expect_scaler(!state.is_empty(), "load_state", "the state of a scaler",
                "an empty one. It may come from a disabled scaler.");
  const auto read = [&](const char* name) { return number_of("GradScaler", state, name); };
  GradScalerOptions loaded = options_;
  loaded.init_scale(read(kFields[0])).growth_factor(read(kFields[1])).backoff_factor(read(kFields[2]));
  const double interval = read(kFields[3]), tracker = read(kFields[4]);
  for (const auto& [name, count] : {std::pair(kFields[3], interval), std::pair(kFields[4], tracker)}) {
    expect_scaler(count >= 0 && count <= INT32_MAX && count == std::trunc(count), name,
                  "a whole number from 0 to 2147483647", c10::str(count));
  }
  loaded.growth_interval(static_cast<int64_t>(interval));
  check_loss_scale(kFields[0], loaded.init_scale());
  check_scaler_options(loaded);
  options_ = loaded;
  init_growth_tracker_ = static_cast<int64_t>(tracker);
  if (!scale_.defined()) return;
  scale_.fill_(options_.init_scale());
  growth_tracker_.fill_(init_growth_tracker_);
}

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  for (const auto& field : state()) archive.write(field.key(), field.value(), /*is_buffer=*/true);
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  TensorDict state;
  for (const char* name : kFields) {
    Tensor field;
    if (archive.try_read(name, field, /*is_buffer=*/true)) state.insert(name, field);
  }
  load_state(state);
}

}  // namespace shoestring::optim
