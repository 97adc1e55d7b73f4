#include "core/row_source.h"

#include <utility>

namespace shoestring {
namespace {

void release_source(void* source) { delete static_cast<std::weak_ptr<RowSource>*>(source); }

}  // namespace

std::shared_ptr<RowSource> row_source_of(const at::Tensor& weight) {
  if (!weight.defined() || !weight.has_storage()) return nullptr;
  // The checked accessors raise an error for a storage that is away.
  const at::DataPtr& data = weight.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (data.get() != nullptr || data.get_deleter() != &release_source) return nullptr;
  return static_cast<std::weak_ptr<RowSource>*>(data.get_context())->lock();
}

at::DataPtr pointer_to_source(std::weak_ptr<RowSource> source, c10::Device device) {
  return {nullptr, new std::weak_ptr<RowSource>(std::move(source)), &release_source, device};
}

}  // namespace shoestring
