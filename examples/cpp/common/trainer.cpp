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

// Returns a source of micro-batches, each one tensor of this process's rows. The tokens are read from the
// file into the memory from which they are copied to the device.
shoestring::data::Prefetcher::FillingSource micro_batches(const Blocks& blocks, const LoopOptions& options,
                                                          const Processes& processes) {
  return [&blocks, &processes, order = BatchOrder(blocks.count, options.batch_size, options.seed)](
             int64_t number, shoestring::data::HostBuffers& buffers) mutable {
    const auto numbers = processes.share(order.batch(number));
    const Tensor rows = buffers.empty({static_cast<int64_t>(numbers.size()), blocks.seq_len + 1}, at::kLong);
    blocks.read(numbers, rows);
    return shoestring::data::Batch{rows};
  };
}

}  // namespace

std::string Speed::text() const {
  char text[96];
  std::snprintf(text, sizeof text, "%.0f tokens/s, waited %.3f s for data", tokens_per_second, data_seconds);
  return text;
}

Progress::Progress(const LoopOptions& options, at::Device device)
    : steps_(options.steps), tokens_(options.batch_size * options.seq_len * options.accumulate),
      terminal_(::isatty(STDOUT_FILENO)), device_(device) {}

void Progress::show(const Reading& reading, std::optional<double> validation) {
  // The first training step also allocates memory, so it is not timed.
  if (shown_++ > 0) timed_ += reading.seconds;
  data_seconds_ += reading.data_seconds;
  if (validation) validation_ = validation;
  const bool last = reading.step == steps_;
  const bool due = last || validation || reading.step % std::max<int64_t>(1, steps_ / 20) == 0;
  if (!terminal_ && !due) return;
  char val[32] = "";
  if (validation_) std::snprintf(val, sizeof val, "  val %.4f", *validation_);
  std::printf("%sstep %lld/%lld  loss %.4f%s  %.0f tokens/s  %s%s", terminal_ ? "\r\033[K" : "",
              static_cast<long long>(reading.step), static_cast<long long>(steps_), reading.loss, val,
              static_cast<double>(tokens_) / reading.seconds, memory_text(device_).c_str(),
              terminal_ && !last ? "" : "\n");
  std::fflush(stdout);
}

Speed Progress::speed() const {
  return {timed_ > 0 ? static_cast<double>(tokens_ * (shown_ - 1)) / timed_ : 0, data_seconds_};
}

Speed Trainer::fit(int64_t start, const std::function<bool(int64_t)>& due,
                   const std::function<void(int64_t)>& after) {
  BatchOrder order(data.train.count, options.batch_size, options.seed);
  forward.begin_training(data.train.rows(processes.share(order.batch(0))));
  // The plan of --memory-budget runs backward, which must not step the parameters.
  if (options.step_in_backward) optimizers.step_in_backward();
  const at::Device device = forward.device();
  Readings readings(device,
                    options.log_every > 0 ? options.log_every
                    : device.is_cpu()     ? 1
                                          : kLogEvery,
                    options.accumulate, /*norm_must_be_finite=*/!options.scales_loss());
  shoestring::data::Prefetcher batches(micro_batches(data.train, options, processes),
                                       shoestring::data::PrefetcherOptions(device)
                                           .start(start * options.accumulate)
                                           .stop(options.steps * options.accumulate));
  Progress progress(options, device);
  for (int64_t step = start; step < options.steps; ++step) {
    const double waited = batches.seconds_waited();
    run_step(step, batches, readings);
    readings.end_step(step + 1, batches.seconds_waited() - waited);
    const bool is_due = due(step + 1), validated = is_validated(step + 1);
    if (!is_due && !validated && !readings.is_full()) continue;
    for (const Reading& reading : readings.end_interval(/*wait=*/is_due || validated)) {
      require_finite("loss", reading.loss, reading.step);
      // Under loss scaling, a norm that is not finite belongs to a step that was skipped.
      if (!options.scales_loss()) {
        require_finite("gradient norm", reading.norm, reading.step,
                       options.step_in_backward ? "after" : "before");
      }
      std::optional<double> validation;
      if (validated && reading.step == step + 1) {
        validation = validate();
        optimizers.set_training(true);
      }
      progress.show(reading, validation);
      on_reading(reading);
    }
    if (is_due) after(step + 1);
    if (is_due || validated) readings.restart_clock();
  }
  return progress.speed();
}

std::optional<double> Trainer::validate() {
  optimizers.set_training(false);
  if (data.validation.count == 0) return std::nullopt;
  const double loss = forward.validate(data.validation);
  if (std::isfinite(loss)) return loss;
  throw InputError(std::string("the validation loss is ") + (std::isnan(loss) ? "nan" : "infinite") +
                   "; lower --lr" + remains());
}

bool Trainer::is_validated(int64_t step) const {
  return data.validation.count > 0 && step % options.eval_every == 0 && step < options.steps;
}

void Trainer::run_step(int64_t step, shoestring::data::Prefetcher& batches, Readings& readings) {
  optimizers.begin_step(step);
  for (int64_t i = 0; i < options.accumulate; ++i) {
    const auto sums = i + 1 < options.accumulate ? optimizers.accumulate() : nullptr;
    const Tensor rows = batches.next().value().front();  // valid until the following next()
    const Tensor part = forward.loss(rows) / options.accumulate;
    readings.add_loss(processes.mean(part));
    // Steps within backward cannot be skipped, so the loss must be known before.
    if (options.step_in_backward) require_finite("loss", part.item<double>(), step + 1);
    optimizers.backward(part, readings.bad(), /*is_last=*/i + 1 == options.accumulate);
  }
  optimizers.unscale();
  const Tensor norm = optimizers.clips()           ? Tensor()
                      : processes.splits_weights() ? processes.clip_grad_norm(options.clip)
                                                   : clip_grad_norm(trained, options.clip);
  if (norm.defined()) readings.add_norm(norm);
  optimizers.step(readings.bad());
  const Tensor later = optimizers.norm_of_step();
  if (later.defined()) readings.add_norm(later);
  optimizers.zero_grad(!keep_gradients);
}

void Trainer::require_finite(const char* what, double value, int64_t step, const char* when) const {
  if (std::isfinite(value)) return;
  throw InputError("step " + std::to_string(step) + ": the " + what + " is " +
                   (std::isnan(value) ? "nan" : "infinite") + "; training stopped " + when +
                   " the weights changed; lower --lr or set --clip" + remains());
}
