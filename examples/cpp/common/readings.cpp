#include "readings.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

using at::Tensor;

Readings::Readings(at::Device device, int64_t interval, int64_t micro_batches, bool norm_must_be_finite)
    : interval_(interval), micro_batches_(micro_batches), norm_must_be_finite_(norm_must_be_finite),
      late_(!device.is_cpu()) {
  for (Buffer& buffer : buffers_) {
    buffer.values = at::zeros({interval, micro_batches + 1}, at::device(device).dtype(at::kFloat));
    buffer.host = late_ ? at::zeros(buffer.values.sizes(), at::TensorOptions(at::kFloat).pinned_memory(true))
                        : buffer.values;
    if (late_) copied_.emplace_back(device.type());
  }
  bad_ = at::zeros({}, at::device(device).dtype(at::kFloat));
}

void Readings::add(const Tensor& value, int64_t column, bool must_be_finite) {
  const Tensor plain = value.detach();
  if (must_be_finite) bad_.logical_or_(at::isfinite(plain).logical_not());
  const Buffer& now = buffers_[current_];
  now.values[static_cast<int64_t>(now.waiting.size())][column].copy_(plain);
}

void Readings::add_loss(const Tensor& loss) { add(loss, losses_++, /*must_be_finite=*/true); }

void Readings::add_norm(const Tensor& norm) { add(norm, micro_batches_, norm_must_be_finite_); }

void Readings::end_step(int64_t step, double data_seconds) {
  buffers_[current_].waiting.push_back({step, 0, 0, 0, data_seconds});
  losses_ = 0;
}

std::vector<Reading> Readings::end_interval(bool wait) {
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began_;
  restart_clock();
  Buffer& now = buffers_[current_];
  for (Reading& reading : now.waiting)
    reading.seconds = seconds.count() / static_cast<double>(now.waiting.size());
  if (late_) {
    now.host.copy_(now.values, /*non_blocking=*/true);
    copied_[current_].record(
        c10::impl::VirtualGuardImpl(now.values.device().type()).getStream(now.values.device()));
  }
  std::vector<Reading> done;
  const size_t other = 1 - current_;
  read(buffers_[other], late_ ? &copied_[other] : nullptr, done);
  if (wait || !late_) read(now, late_ ? &copied_[current_] : nullptr, done);
  current_ = other;
  return done;
}

void Readings::read(Buffer& buffer, c10::Event* copied, std::vector<Reading>& to) {
  if (buffer.waiting.empty()) return;
  if (copied != nullptr) copied->synchronize();
  const float* values = buffer.host.const_data_ptr<float>();
  for (Reading& reading : buffer.waiting) {
    for (int64_t i = 0; i < micro_batches_; ++i) reading.loss += *values++;
    reading.norm = *values++;
    to.push_back(reading);
  }
  buffer.waiting.clear();
}
