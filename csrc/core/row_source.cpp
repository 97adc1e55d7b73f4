#include "core/row_source.h"

#include <mutex>
#include <utility>

namespace shoestring {
namespace {

struct Source {
  std::weak_ptr<RowSource> source;
  at::Tensor owner;
};
void release_source(void* source) { delete static_cast<Source*>(source); }

// Returns the source of a storage, which is away or has memory.
std::shared_ptr<RowSource> source_of(const at::Tensor& weight, bool away) {
  if (!weight.defined() || !weight.has_storage()) return nullptr;
  const auto lock = lock_sources();
  // The checked accessors raise an error for a storage that is away.
  const at::DataPtr& data = weight.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if ((away && data.get() != nullptr) || data.get_deleter() != &release_source) return nullptr;
  return static_cast<Source*>(data.get_context())->source.lock();
}

}  // namespace

std::shared_ptr<RowSource> row_source_of(const at::Tensor& weight) {
  return source_of(weight, /*away=*/true);
}

std::unique_ptr<ArrivingMatrices> bring_matrices(const at::Tensor& stack, c10::ArrayRef<int64_t> offsets) {
  const auto source = source_of(stack, /*away=*/false);
  return source == nullptr ? nullptr : source->bring(stack, offsets);
}

std::unique_lock<std::mutex> lock_sources() {
  static std::mutex mutex;
  return std::unique_lock(mutex);
}

at::DataPtr pointer_to_source(std::weak_ptr<RowSource> source, c10::Device device, void* memory,
                              const at::Tensor& owner) {
  return {memory, new Source{std::move(source), owner}, &release_source, device};
}

}  // namespace shoestring
