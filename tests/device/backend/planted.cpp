// Host functions with planted mistakes, by which tests see that the device notices them.

#include "planted.h"

#include <atomic>
#include <thread>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <torch/library.h>

#include "streams.h"
#include "tensors.h"

namespace simdev {
namespace {

// Multiplies n elements from x on by `factor`, in the current stream of x's device, without a device guard.
void scale(const at::Tensor& x, const at::Tensor& factor, int64_t n) {
  const c10::Stream stream = to_c10(current_stream(x.device().index()));
  const char* error =
      launch_scale(x.mutable_data_ptr<float>(), n, factor.const_data_ptr<float>(), stream.native_handle());
  TORCH_CHECK(error == nullptr, "scale: the launch failed: ", error);
}

void without_guard(const at::Tensor& x, const at::Tensor& factor) { scale(x, factor, x.numel()); }

void past_the_end(const at::Tensor& x, const at::Tensor& factor) {
  const c10::OptionalDeviceGuard guard(x.device());
  scale(x, factor, x.numel() + 1);
}

// Adds 1 to x in another stream, once a host thread has waited for x's stream. The caller learns of the wait
// by the end of that thread or, if `joins` is false, by an atomic variable alone.
void after_wait_of_thread(const at::Tensor& x, bool joins) {
  const int stream = current_stream(x.device().index());
  std::atomic<bool> is_over{false};
  std::thread waiter([&] {
    synchronize_stream(stream, "a thread waits");
    is_over = true;
  });
  if (joins) waiter.join();
  while (!is_over) std::this_thread::yield();
  const int other = next_pool_stream(x.device().index());
  enqueue(other, {"add after the wait", [x = for_kernel(x)] { x.add_(1); }, {range_of(x, true)}});
  if (!joins) waiter.join();
  synchronize_stream(other, "the caller waits");
}

TORCH_LIBRARY(simdev_planted, m) {
  m.def("without_guard(Tensor(a!) x, Tensor factor) -> ()");
  m.def("past_the_end(Tensor(a!) x, Tensor factor) -> ()");
  m.def("after_wait_of_thread(Tensor(a!) x, bool joins) -> ()");
}
TORCH_LIBRARY_IMPL(simdev_planted, PrivateUse1, m) {
  m.impl("without_guard", without_guard);
  m.impl("past_the_end", past_the_end);
  m.impl("after_wait_of_thread", after_wait_of_thread);
}

}  // namespace
}  // namespace simdev
