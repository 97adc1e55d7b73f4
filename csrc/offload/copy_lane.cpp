#include "offload/copy_lane.h"

#include <omp.h>

#include <utility>

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "offload/disturb.h"

namespace shoestring::offload {

std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

FencePtr Fence::now(c10::Device device) {
  FencePtr fence = make();
  fence->issued_ = true;
  if (const auto stream = current_stream(device)) {
    fence->event_.emplace(device.type());
    fence->event_->record(*stream);
  }
  return fence;
}

void Fence::issue(std::optional<c10::Event> event, std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    event_ = std::move(event), error_ = std::move(error), issued_ = true;
  }
  issued_changed_.notify_all();
}

void Fence::wait_issued() const {
  process_.check("offload");
  std::unique_lock lock(mutex_);
  issued_changed_.wait(lock, [&] { return issued_; });
  if (error_) std::rethrow_exception(error_);
}

void Fence::block(const std::optional<c10::Stream>& stream) const {
  wait_issued();
  if (stream && event_) event_->block(*stream);
}

void Fence::synchronize() const {
  wait_issued();
  if (event_) event_->synchronize();
}

bool Fence::is_done() const {
  process_.check("offload");
  const std::lock_guard lock(mutex_);
  return issued_ && (!event_ || event_->query());
}

CopyLane::~CopyLane() {
  if (!process_.is_here()) return;
  {
    const std::lock_guard lock(worker_->mutex);
    worker_->ending = true;
  }
  worker_->changed.notify_all();
  if (worker_->thread.joinable()) worker_->thread.join();
}

FencePtr CopyLane::run(std::vector<FencePtr> after, std::function<void()> copy) {
  process_.check("offload");
  FencePtr fence = Fence::make();
  {
    const std::lock_guard lock(worker_->mutex);
    if (!worker_->thread.joinable()) worker_->thread = std::thread([this] { work(); });
    worker_->jobs.push_back({std::move(after), std::move(copy), fence});
  }
  worker_->changed.notify_all();
  return fence;
}

void CopyLane::work() {
  const c10::NoGradGuard no_grad;
  // Initialise PyTorch's number of threads before limiting it, or the first operator would reset the limit.
  // The limit applies to this copying thread only; other threads compute.
  at::internal::lazy_init_num_threads();
  if (threads_ > 0) omp_set_num_threads(threads_);
  std::optional<c10::Stream> stream;
  if (!device_.is_cpu())
    stream = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
  const c10::OptionalStreamGuard guard(stream);
  while (true) {
    Job job;
    {
      std::unique_lock lock(worker_->mutex);
      worker_->changed.wait(lock, [&] { return worker_->ending || !worker_->jobs.empty(); });
      if (worker_->jobs.empty()) return;
      job = std::move(worker_->jobs.front());
      worker_->jobs.pop_front();
    }
    std::optional<c10::Event> event;
    std::exception_ptr error;
    try {
      for (const FencePtr& fence : job.after) fence->block(stream);
      io::delay();
      job.copy();
      if (stream) event.emplace(device_.type()).record(*stream);
    } catch (...) {
      error = std::current_exception();
    }
    // before the fence signals that the copy is done, free the tensors that the copy function has captured
    job.copy = nullptr;
    job.fence->issue(std::move(event), std::move(error));
  }
}

}  // namespace shoestring::offload
