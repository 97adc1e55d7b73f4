// Registers the classes with which Python's optimizers offload their state. They are classes, not operators,
// because they own memory, files and threads.

#include <torch/library.h>

#include "offload/host_params.h"

namespace shoestring::offload {
namespace {

// Returns the dtypes of (empty) tensors. A TorchScript schema cannot have a list of dtypes as an argument, so
// it has a list of tensors.
std::vector<at::ScalarType> dtypes_of(const std::vector<Tensor>& like) {
  std::vector<at::ScalarType> dtypes;
  for (const Tensor& t : like) dtypes.push_back(t.scalar_type());
  return dtypes;
}

c10::intrusive_ptr<State> make_state(const c10::intrusive_ptr<Offload>& offload,
                                     const std::vector<Tensor>& like, std::vector<int64_t> per_block,
                                     const std::vector<int64_t>& blocks, bool splits) {
  return c10::make_intrusive<State>(offload, dtypes_of(like), std::move(per_block), blocks, splits);
}

int64_t state_bytes(const c10::intrusive_ptr<Offload>&, const std::vector<Tensor>& like,
                    const std::vector<int64_t>& per_block, const std::vector<int64_t>& blocks, bool splits) {
  return State::bytes(dtypes_of(like), per_block, blocks, splits);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<Offload>("Offload")
      .def(torch::init<std::string, std::string, c10::Device>())
      .def("check", [](const c10::intrusive_ptr<Offload>& o) { o->check(); })
      .def("state_bytes", &state_bytes)
      .def("reserve", [](const c10::intrusive_ptr<Offload>& o, int64_t bytes) { o->reserve(bytes); })
      .def("host_bytes", [](const c10::intrusive_ptr<Offload>& o) { return o->memory.bytes(); });
  m.class_<State>("OffloadedState")
      .def(torch::init(&make_state))
      .def("begins", [](const c10::intrusive_ptr<State>& s) { return s->begins(); })
      .def("total", [](const c10::intrusive_ptr<State>& s) { return s->total(); })
      .def("values", [](const c10::intrusive_ptr<State>& s) { return s->values(); })
      .def("chunks", &State::chunks)
      .def("piece",
           [](const c10::intrusive_ptr<State>& s, int64_t chunk, int64_t first, int64_t last) {
             const auto [from, to, first_block, offset, blocks] = s->piece(chunk, first, last);
             return std::vector<int64_t>{from, to, first_block, offset, blocks};
           })
      .def("start", &State::start)
      .def("take", &State::take)
      .def("put", &State::put)
      .def("finish", &State::finish)
      .def("done", &State::done)
      .def("any_done", &State::any_done)
      .def("discard", &State::discard)
      .def("commit", &State::commit);
  m.class_<HostParams>("HostParams")
      .def(torch::init<c10::intrusive_ptr<Offload>, std::vector<Tensor>>())
      .def("weights", [](const c10::intrusive_ptr<HostParams>& h) { return h->weights(); })
      .def("fetch", &HostParams::fetch)
      .def("collect", &HostParams::collect)
      .def("send", &HostParams::send)
      .def("receive", &HostParams::receive);
}

}  // namespace shoestring::offload
