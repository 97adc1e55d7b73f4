// Registers the ring of buffers that Python's Prefetcher fills from a thread of Python.

#include <torch/custom_class.h>
#include <torch/library.h>

#include "data/prefetch_ring.h"

namespace shoestring::data {
namespace {

struct PrefetchRingClass : torch::CustomClassHolder {
  PrefetchRingClass(c10::Device device, int64_t depth, int64_t start, std::optional<int64_t> stop,
                    bool poison)
      : ring(offload::make_process_owned<PrefetchRing>(device, depth, start, stop, poison)) {}

  const offload::ProcessOwned<PrefetchRing> ring;
};

using Self = c10::intrusive_ptr<PrefetchRingClass>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<PrefetchRingClass>("PrefetchRing")
      .def(torch::init<c10::Device, int64_t, int64_t, std::optional<int64_t>, bool>())
      .def("claim", [](const Self& self) { return self->ring->claim(); })
      .def("empty", [](const Self& self, std::vector<int64_t> size,
                       at::ScalarType dtype) { return self->ring->empty(size, dtype); })
      .def("put", [](const Self& self, Batch batch) { self->ring->put(std::move(batch)); })
      .def("finish", [](const Self& self) { self->ring->finish(); })
      .def("fail",
           [](const Self& self, const std::string& message) {
             self->ring->fail(std::make_exception_ptr(std::runtime_error(message)));
           })
      .def("wait", [](const Self& self, double seconds) { return self->ring->wait(seconds); })
      .def("next", [](const Self& self) { return self->ring->next(); })
      .def("position", [](const Self& self) { return self->ring->position(); })
      .def("seconds_waited", [](const Self& self) { return self->ring->seconds_waited(); })
      .def("close", [](const Self& self) { self->ring->close(); });
}

}  // namespace shoestring::data
