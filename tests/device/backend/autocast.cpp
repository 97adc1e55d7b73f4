// Autocast, by PyTorch's lists for CUDA.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

namespace at::autocast {
namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIMDEV_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMDEV_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIMDEV_FP32_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIMDEV_FP32_APPEND(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
#define SIMDEV_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIMDEV_LOWER)
  AT_FORALL_FP32(SIMDEV_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIMDEV_FP32_SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(SIMDEV_FP32_APPEND)
  AT_FORALL_PROMOTE(SIMDEV_PROMOTE)
}

}  // namespace
}  // namespace at::autocast
