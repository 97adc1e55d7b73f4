// Registers the Compressor that Python's hooks of DistributedDataParallel and fully_shard use.

#include <torch/custom_class.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "distributed/compressor.h"

namespace shoestring::distributed {
namespace {

struct CompressorHolder : torch::CustomClassHolder {
  CompressorHolder(const std::string& group, int64_t bits)
      : compressor(c10d::resolve_process_group(group), bits) {}

  Compressor compressor;
};

using CompressorSelf = c10::intrusive_ptr<CompressorHolder>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<CompressorHolder>("Compressor")
      .def(torch::init<std::string, int64_t>())
      .def("all_reduce",
           [](const CompressorSelf& self, const at::Tensor& gradient, const std::vector<at::Tensor>& params,
              int64_t index, bool is_last) {
             return c10::IValue(self->compressor.all_reduce(gradient, params, index, is_last));
           })
      .def("reduce_scatter",
           [](const CompressorSelf& self, const at::Tensor& output, const at::Tensor& input, int64_t key) {
             self->compressor.end_scatter(self->compressor.begin_scatter(input, key), output);
           })
      .def("reset", [](const CompressorSelf& self) { self->compressor.reset(); })
      .def("sent_bytes", [](const CompressorSelf& self) { return self->compressor.sent_bytes(); })
      .def("residual_bytes", [](const CompressorSelf& self) { return self->compressor.residual_bytes(); })
      .def("residual_of", [](const CompressorSelf& self,
                             const at::Tensor& param) { return self->compressor.residual(param); })
      .def("residual_of_means", [](const CompressorSelf& self,
                                   int64_t index) { return self->compressor.residual_of_means(index); })
      .def("residual",
           [](const CompressorSelf& self, int64_t key) { return self->compressor.residual(key); });
}

}  // namespace shoestring::distributed
