// Host functions with a planted mistake, by which tests see that the device notices it.

#include "planted.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <torch/library.h>

#include "streams.h"

namespace simdev {
namespace {

// Multiplies n elements from x on by `factor`, in the current stream of x's device, without a device guard.
void scale(const at::Tensor& x, const at::Tensor& factor, int64_t n) {
  const c10::Stream stream = to_c10(current_stream(x.device().index()));
  const char* error = launch_scale(x.mutable_data_ptr<float>(), n, factor.const_data_ptr<float>(),
                                   stream.native_handle());
  TORCH_CHECK(error == nullptr, "scale: the launch failed: ", error);
}

void without_guard(const at::Tensor& x, const at::Tensor& factor) { scale(x, factor, x.numel()); }

void past_the_end(const at::Tensor& x, const at::Tensor& factor) {
  const c10::OptionalDeviceGuard guard(x.device());
  scale(x, factor, x.numel() + 1);
}

TORCH_LIBRARY(simdev_planted, m) {
  m.def("without_guard(Tensor(a!) x, Tensor factor) -> ()");
  m.def("past_the_end(Tensor(a!) x, Tensor factor) -> ()");
}
TORCH_LIBRARY_IMPL(simdev_planted, PrivateUse1, m) {
  m.impl("without_guard", without_guard);
  m.impl("past_the_end", past_the_end);
}

}  // namespace
}  // namespace simdev
