#include "checkpoint/kept_buffers.h"

// Puts buffers back that the second run of a checkpointed function has changed.

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <string_view>

namespace shoestring::activations {
namespace {

// Batch norms update their running statistics in place, although their schemas do not say so.
bool writes_to(const c10::Argument& argument) {
  return (argument.alias_info() && argument.alias_info()->isWrite()) ||
         std::string_view(argument.name()).starts_with("running_");
}

bool same_geometry(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

// Returns a tensor over the memory of `storage` with the geometry of `like`.
at::Tensor over(const c10::Storage& storage, const at::Tensor& like) {
  return at::empty({0}, like.options()).set_(storage, like.storage_offset(), like.sizes(), like.strides());
}

}  // namespace

KeptBuffers::KeptBuffers(const std::vector<at::Tensor>& buffers) {
  for (const at::Tensor& tensor : buffers) {
    if (!tensor.defined() || !tensor.has_storage()) continue;
    buffers_.emplace(tensor.storage().unsafeGetStorageImpl(),
                     Buffer{tensor, tensor.variable_data(), {}, {}, tensor.storage().nbytes()});
  }
}

void KeptBuffers::begin(bool all) {
  all_ = all;
  if (!all) return watch();
  for (auto& [storage, buffer] : buffers_) keep(buffer);
}

void KeptBuffers::before(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  const auto& named = op.schema().arguments();
  for (size_t i = 0; i < named.size(); ++i) {
    if (!writes_to(named[i])) continue;
    each_tensor(arguments.slice(i, 1), [&](const at::Tensor& tensor) {
      if (!tensor.has_storage()) return;
      auto [first, last] = buffers_.equal_range(tensor.storage().unsafeGetStorageImpl());
      for (; first != last; ++first) keep(first->second);
    });
  }
}

void KeptBuffers::keep(Buffer& buffer) {
  if (buffer.copy.defined()) return;
  const c10::NoGradGuard no_grad;
  buffer.region = buffer.at_first;
  // The elements of an expanded buffer share memory, so its whole storage is put back.
  if (!buffer.region.is_non_overlapping_and_dense()) {
    buffer.region = at::empty({0}, buffer.region.options().dtype(at::kByte))
                        .set_(buffer.region.storage(), 0, {static_cast<int64_t>(buffer.bytes)}, {1});
  }
  buffer.copy = buffer.region.clone();
}

void KeptBuffers::put_back(Buffer& buffer) {
  at::Tensor original = buffer.at_first;
  if (buffer.copy.defined()) {
    if (buffer.region.storage().nbytes() >= buffer.bytes) {
      buffer.region.copy_(buffer.copy);
    } else {  // the run has resized the storage
      original = buffer.region.is_same(original) ? buffer.copy : over(buffer.copy.storage(), original);
    }
  }
  // the run has given the buffer other memory, as `buffer.data = x` does
  if (!same_geometry(buffer.tensor, original)) buffer.tensor.set_data(original);
}

void KeptBuffers::end() {
  if (!all_) unwatch();
  const c10::NoGradGuard no_grad;
  for (auto& [storage, buffer] : buffers_) put_back(buffer);
}

}  // namespace shoestring::activations

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  using shoestring::activations::KeptBuffers;
  m.class_<KeptBuffers>("KeptBuffers")
      .def(torch::init<std::vector<at::Tensor>>())
      .def("begin", &KeptBuffers::begin)
      .def("end", &KeptBuffers::end);
}
