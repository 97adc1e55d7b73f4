// Registers the class Averaging, with which Python's DiLoCo and LocalSGD work. Python passes the parameters
// to each step if they are DTensors, whose local parts may be other tensors then.

#include <torch/custom_class.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "distributed/diloco.h"
#include "optim/core/state_entries.h"

namespace shoestring::distributed {
namespace {

struct AveragingHolder : torch::CustomClassHolder {
  AveragingHolder(const std::string& name, std::vector<at::Tensor> params, const std::string& group,
                  int64_t every, double lr, double momentum, const std::string& compress, int64_t fragments,
                  int64_t overlap, std::optional<double> alpha, int64_t bucket_bytes)
      : averaging(name, std::move(params), c10d::resolve_process_group(group),
                  DiLoCoOptions()
                      .every(every)
                      .lr(lr)
                      .momentum(momentum)
                      .compress(compress)
                      .fragments(fragments)
                      .overlap(overlap)
                      .alpha(alpha)
                      .bucket_bytes(bucket_bytes)) {}

  detail::Averaging averaging;
};

using Self = c10::intrusive_ptr<AveragingHolder>;
using optim::detail::StateEntries;

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<AveragingHolder>("Averaging")
      .def(torch::init<std::string, std::vector<at::Tensor>, std::string, int64_t, double, double,
                       std::string, int64_t, int64_t, std::optional<double>, int64_t>())
      .def("use", [](const Self& self, std::vector<at::Tensor> params) { self->averaging.use(params); })
      .def("step", [](const Self& self) { return self->averaging.step(); })
      .def("average", [](const Self& self) { self->averaging.average(); })
      .def("regroup",
           [](const Self& self, const std::string& group) {
             self->averaging.regroup(c10d::resolve_process_group(group));
           })
      .def("steps", [](const Self& self) { return self->averaging.steps(); })
      .def("state", [](const Self& self) { return optim::detail::entries_of(self->averaging.state()); })
      .def("load_state",
           [](const Self& self, const StateEntries& entries) {
             self->averaging.load_state(optim::detail::state_of(entries));
           })
      .def("sent_bytes", [](const Self& self) { return self->averaging.sent_bytes(); })
      .def("residual_bytes", [](const Self& self) { return self->averaging.residual_bytes(); });
}

}  // namespace shoestring::distributed
