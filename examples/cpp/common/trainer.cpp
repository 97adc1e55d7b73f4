#include "trainer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/stack.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "device.h"
#include "input_error.h"

using at::Tensor;

namespace {

constexpr int64_t kLogEvery = 10;  // steps between reads from a device other than the CPU

// Clips gradients like torch::nn::utils::clip_grad_norm_, which reads the norm on the host. Returns the norm
// before clipping, as a scalar on the device. A limit of 0 does not clip.
Tensor clip_grad_norm(const std::vector<Tensor>& parameters, double limit) {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> norms;
  for (const Tensor& p : parameters) {
    if (p.grad().defined()) norms.push_back(p.grad().norm(2));
  }
  if (norms.empty()) return {};
  const Tensor norm = norms.size() == 1 ? norms[0] : at::stack(norms).norm(2);
  if (limit == 0) return norm;
  const Tensor factor = at::clamp(limit / (norm + 1e-6), std::nullopt, 1.0);
  for (const Tensor& p : parameters) {
    if (p.grad().defined()) p.mutable_grad().mul_(factor);
  }
  return norm;
}

}  // namespace

Progress::Progress(const LoopOptions& options, at::Device device)
    : steps_(options.steps), tokens_(options.batch_size * options.seq_len * options.accumulate),
      terminal_(::isatty(STDOUT_FILENO)), device_(device) {}

void Progress::show(const Reading& reading) {
  // The first training step also allocates memory, so it is not timed.
  if (shown_++ > 0) timed_ += reading.seconds;
  const bool last = reading.step == steps_;
  if (!terminal_ && !last && reading.step % std::max<int64_t>(1, steps_ / 20) != 0) return;
  std::printf("%sstep %lld/%lld  loss %.4f  %.0f tokens/s  %s%s", terminal_ ? "\r\033[K" : "",
              static_cast<long long>(reading.step), static_cast<long long>(steps_), reading.loss,
              static_cast<double>(tokens_) / reading.seconds, memory_text(device_).c_str(),
              terminal_ && !last ? "" : "\n");
  std::fflush(stdout);
}

double Progress::tokens_per_second() const {
  return timed_ > 0 ? static_cast<double>(tokens_ * (shown_ - 1)) / timed_ : 0;
}

double Trainer::fit(int64_t start, const std::function<bool(int64_t)>& due,
                    const std::function<void(int64_t)>& after) {
  BatchOrder order(blocks.count, options.batch_size, options.seed);
  forward.begin_training(blocks.rows(order.batch(0)));
  // The plan of --memory-budget runs backward, which must not step the parameters.
  if (options.step_in_backward) optimizers.step_in_backward();
  const at::Device device = forward.device();
  Readings readings(device,
                    options.log_every > 0 ? options.log_every
                    : device.is_cpu()     ? 1
                                          : kLogEvery,
                    options.accumulate);
  Progress progress(options, device);
  for (int64_t step = start; step < options.steps; ++step) {
    run_step(step, order, readings);
    readings.end_step(step + 1);
    const bool is_due = due(step + 1);
    if (!is_due && !readings.is_full()) continue;
    for (const Reading& reading : readings.end_interval(/*wait=*/is_due)) {
      require_finite("loss", reading.loss, reading.step);
      require_finite("gradient norm", reading.norm, reading.step,
                     options.step_in_backward ? "after" : "before");
      progress.show(reading);
      on_reading(reading);
    }
    if (is_due) after(step + 1);
    if (is_due) readings.restart_clock();
  }
  return progress.tokens_per_second();
}

void Trainer::run_step(int64_t step, BatchOrder& order, Readings& readings) {
  optimizers.begin_step(step);
  for (int64_t i = 0; i < options.accumulate; ++i) {
    const auto sums = i + 1 < options.accumulate ? optimizers.accumulate() : nullptr;
    const Tensor part =
        forward.loss(blocks.rows(order.batch(step * options.accumulate + i))) / options.accumulate;
    readings.add_loss(part);
    // Steps within backward cannot be skipped, so the loss must be known before.
    if (options.step_in_backward) require_finite("loss", part.item<double>(), step + 1);
    part.backward();
  }
  const Tensor norm = options.step_in_backward ? Tensor() : clip_grad_norm(trained, options.clip);
  if (norm.defined()) readings.add_norm(norm);
  optimizers.step(readings.bad());
  const Tensor later = optimizers.norm_in_backward();
  if (later.defined()) readings.add_norm(later);
  optimizers.zero_grad(!keep_gradients);
}

void Trainer::require_finite(const char* what, double value, int64_t step, const char* when) const {
  if (std::isfinite(value)) return;
  throw InputError("step " + std::to_string(step) + ": the " + what + " is " +
                   (std::isnan(value) ? "nan" : "infinite") + "; training stopped " + when +
                   " the weights changed; lower --lr or set --clip" + remains());
}
