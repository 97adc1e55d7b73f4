// What Python's optimizers use: classes, since they hold memory, files and threads.

#include <torch/library.h>

#include "io/disturb.h"
#include "offload/host_params.h"

namespace shoestring::offload {
namespace {

c10::intrusive_ptr<State> make_state(const c10::intrusive_ptr<Offload>& offload, const std::vector<Tensor>& like,
                                     std::vector<int64_t> per_block, const std::vector<int64_t>& blocks, bool splits) {
  std::vector<at::ScalarType> dtypes;  // schemas have no lists of dtypes: of empty tensors
  for (const Tensor& t : like) dtypes.push_back(t.scalar_type());
  return c10::make_intrusive<State>(offload, dtypes, std::move(per_block), blocks, splits);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<Offload>("Offload")
      .def(torch::init<std::string, std::string, c10::Device>())
      .def("host_bytes", [](const c10::intrusive_ptr<Offload>& o) { return o->memory.bytes(); });
  m.class_<State>("OffloadedState")
      .def(torch::init(&make_state))
      .def("begins", [](const c10::intrusive_ptr<State>& s) { return s->begins(); })
      .def("total", [](const c10::intrusive_ptr<State>& s) { return s->total(); })
      .def("values", [](const c10::intrusive_ptr<State>& s) { return s->values(); })
      .def("chunks", &State::chunks)
      .def("piece", [](const c10::intrusive_ptr<State>& s, int64_t chunk, int64_t first, int64_t last) {
        const auto [from, to, first_block, offset, blocks] = s->piece(chunk, first, last);
        return std::vector<int64_t>{from, to, first_block, offset, blocks};
      })
      .def("start", &State::start)
      .def("take", &State::take)
      .def("put", &State::put)
      .def("finish", &State::finish)
      .def("done", &State::done)
      .def("commit", &State::commit);
  m.class_<HostParams>("HostParams")
      .def(torch::init<c10::intrusive_ptr<Offload>, std::vector<Tensor>>())
      .def("weights", [](const c10::intrusive_ptr<HostParams>& h) { return h->weights(); })
      .def("fetch", &HostParams::fetch)
      .def("collect", &HostParams::collect)
      .def("send", &HostParams::send)
      .def("receive", &HostParams::receive);
  // For tests: what happens to every copy, read and write from now on (io/disturb.h).
  m.def("disturb_offload(int max_delay_us=0, int fail_after=-1, int error=0, bool short_transfers=False) -> ()",
        [](int64_t max_delay_us, int64_t fail_after, int64_t error, bool short_transfers) {
          io::disturb({max_delay_us, fail_after, static_cast<int>(error), short_transfers});
        });
}

}  // namespace shoestring::offload
