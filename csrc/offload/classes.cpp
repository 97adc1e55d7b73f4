// Registers the classes of offloaded optimizer state, and of memory in a file. They are classes, not
// operators, because they own memory, files and threads. OptimizerCore uses them; Python reads how the state
// is divided into chunks.

#include <torch/library.h>

#include "offload/file_memory.h"
#include "offload/state.h"

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

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<Offload>("Offload").def(torch::init<std::string, std::string, c10::Device>());
  m.class_<FileMemory>("FileMemory")
      .def(torch::init<std::string, std::string>())
      .def("move", &FileMemory::move)
      .def("will_need", &FileMemory::will_need)
      .def("let_go", &FileMemory::let_go);
  m.class_<State>("OffloadedState")
      .def(torch::init(&make_state))
      .def("chunks", &State::chunks)
      .def("total", [](const c10::intrusive_ptr<State>& s) { return s->total(); })
      .def("start", &State::start)
      .def("take", &State::take)
      .def("put", &State::put)
      .def("finish", &State::finish)
      .def("commit", &State::commit);
}

}  // namespace shoestring::offload
