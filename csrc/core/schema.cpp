// Declares the operators of csrc/core. An operator whose name ends in _ changes an argument in place.

#include <torch/library.h>

TORCH_LIBRARY(shoestring, m) {
  // _cpu_capability returns which build of the CPU kernels is in use: plain, avx2, avx512 or amx.
  // _set_cpu_capability selects another build for tests; it returns false if this machine does not support
  // that build.
  m.def("_cpu_capability() -> str");
  m.def("_set_cpu_capability(str name) -> bool");
  // The allocator of CPU tensors (shoestring/core/host_allocator.h). _host_allocator_stats returns the
  // members of HostAllocatorStats in their order.
  m.def("_host_allocator_enable(int? limit=None) -> ()");
  m.def("_host_allocator_disable() -> ()");
  m.def("_host_allocator_is_enabled() -> bool");
  m.def("_host_allocator_stats() -> int[]");
  m.def("_host_allocator_reset_peaks() -> ()");
  m.def("_host_allocator_empty_cache() -> int");
  // Returns the memory of the machine and what of it this process can still use (core/spare_memory.h).
  m.def("_spare_memory() -> int[]");
  // Multiplies x in place by a factor (one element). Does nothing if the factor is 1; on CUDA, the kernel
  // tests for 1. Backward passes use _scale_ to scale saved gradients.
  m.def("_scale_(Tensor(a!) x, Tensor factor) -> ()");
  // Returns the fp32 sum of x (..., features), fp32, bf16 or fp16, over all dimensions but the last.
  m.def("_column_sums(Tensor x) -> Tensor");
}
