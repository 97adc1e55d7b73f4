// The operators by which the Python module controls the device.

#include <string>
#include <vector>

#include <torch/library.h>

#include "clocks.h"
#include "detector.h"
#include "device_memory.h"
#include "fallback.h"
#include "generator.h"
#include "guard.h"
#include "kernels.h"
#include "streams.h"

namespace simdev {
namespace {

void configure(bool lazy, int64_t delay_us, int64_t seed, bool blocking, bool emulate, bool stacks) {
  Config& c = config();
  c.delay_us = static_cast<int>(delay_us), c.seed = static_cast<uint64_t>(seed);
  c.lazy = lazy, c.blocking = blocking, c.emulate = emulate, c.stacks = stacks;
  // streams that were lazy go on
  for (int stream = 0; stream < kStreams; ++stream) is_over(position_of(stream));
}

std::vector<int64_t> counts(int64_t device) {
  const MemoryCounts memory = memory_counts(static_cast<int>(device));
  return {count_operations(), count_synchronisations(), count_waits(), memory.allocations, memory.fresh,
          memory.bytes,       memory.peak_bytes};
}

TORCH_LIBRARY(simdev, m) {
  m.def("configure(bool lazy, int delay_us, int seed, bool blocking, bool emulate, bool stacks) -> ()",
        configure);
  m.def("register_backend() -> ()", register_backend);
  m.def("connect_kernels() -> ()", connect_kernels);
  m.def("prefer_cpu_kernels(str name_space) -> int",
        [](const std::string& name_space) { return prefer_cpu_kernels(name_space); });
  m.def("separate_host_threads() -> ()", separate_host_threads);
  m.def("take_findings() -> str[]", take_findings);
  m.def("take_synchronisations() -> str[]", take_synchronisations);
  m.def("counts(int device) -> int[]", counts);
  m.def("clear_error() -> ()", clear_error);
  m.def("device_count() -> int", [] { return int64_t{kDevices}; });
  m.def("current_device() -> int", [] { return int64_t{current_device()}; });
  m.def("manual_seed(int seed, int device) -> ()", [](int64_t seed, int64_t device) {
    at::Generator generator = default_generator(static_cast<int>(device));
    generator.set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("get_rng_state(int device) -> Tensor",
        [](int64_t device) { return default_generator(static_cast<int>(device)).get_state(); });
  m.def("set_rng_state(Tensor state, int device) -> ()", [](const at::Tensor& state, int64_t device) {
    at::Generator generator = default_generator(static_cast<int>(device));
    generator.set_state(state);
  });
  m.def("set_device(int device) -> ()", [](int64_t device) { set_current_device(static_cast<int>(device)); });
}

}  // namespace
}  // namespace simdev
