#include "offload/activation_store.h"

// Implements ActivationStore and StoredActivation over ActivationStoreCore, and registers them with PyTorch.

#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/graph_task.h>

#include "core/device.h"
#include "offload/activation_core.h"

namespace shoestring::offload {

StoredActivation::StoredActivation(const at::Tensor& x)
    : version_(x.unsafeGetTensorImpl()->version_counter()), stored_version_(x._version()), sizes_(x.sizes()),
      dtype_(x.scalar_type()) {}

StoredActivation::~StoredActivation() {
  if (core_ == nullptr) return;
  if (core_->process.is_here()) {
    const ActivationTurn turn(core_);
    if (!read_) --entry_->unread;
  }
  entry_.reset();
}

at::Tensor StoredActivation::reload() {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(version_.current_version() == stored_version_, "offload_activations: a tensor of shape ",
              at::IntArrayRef(sizes_),
              " that backward needs was changed in place after it was saved: expected version ",
              stored_version_, ", received ", version_.current_version(), "; clone it before the change");
  if (entry_ == nullptr) return kept_;
  const ActivationTurn turn(core_);
  const c10::Storage storage = core_->on_device(*entry_);
  if (!std::exchange(read_, true)) --entry_->unread;
  if (entry_->unread == 0) {
    // a reloaded tensor that is still in use keeps the storage alive
    entry_->copy = c10::Storage();
    // Backward may overwrite what it reads for the last time, such as a gradient that forward has computed.
    if (!torch::autograd::get_current_graph_task_keep_graph()) core_->end_copy(*entry_);
  }
  core_->prefetch_before(entry_->layer);
  at::Tensor x = at::empty({0}, at::TensorOptions().dtype(dtype_).device(core_->device));
  x.set_(storage, offset_, sizes_, strides_);
  return x;
}

ActivationStore::ActivationStore(const std::string& device, const std::string& compression, int64_t prefetch,
                                 int64_t max_pending, int64_t min_bytes, const std::string& folder,
                                 int64_t host_bytes) {
  const c10::Device on(device);
  TORCH_CHECK(on.is_cpu() || (is_asynchronous(on) && c10::impl::hasDeviceGuardImpl(on.type())),
              "offload_activations: device: expected the CPU or an accelerator of this PyTorch, received ",
              on);
  core_ = std::make_shared<ActivationStoreCore>(with_index(on),
                                                compression_of("offload_activations", compression), prefetch,
                                                max_pending, min_bytes, folder, host_bytes);
}

ActivationStore::~ActivationStore() = default;

c10::intrusive_ptr<StoredActivation> ActivationStore::store(const at::Tensor& x) {
  const at::NoGradGuard no_grad;
  core_->process.check("offload_activations");
  auto stored = c10::make_intrusive<StoredActivation>(x);
  if (core_->stays(x)) {
    // Keep a detached tensor. x itself may own the autograd graph that owns `stored`, so keeping x would make
    // a reference cycle.
    stored->kept_ = x.requires_grad() ? x.detach() : x;
    return stored;
  }
  const ActivationTurn turn(core_);
  stored->strides_ = x.strides();
  stored->offset_ = x.storage_offset();
  stored->entry_ = core_->entry_of(x);
  stored->core_ = core_;
  ++stored->entry_->unread;
  return stored;
}

void ActivationStore::exclude(const std::vector<at::Tensor>& tensors) {
  const ActivationTurn turn(core_);
  std::erase_if(core_->excluded, [](const auto& e) { return e.second.expired(); });
  for (const at::Tensor& x : tensors) {
    if (!x.has_storage()) continue;
    core_->excluded.insert_or_assign(x.storage().unsafeGetStorageImpl(),
                                     ActivationEntry::Weak(x.storage().getWeakStorageImpl()));
  }
}

void ActivationStore::mark() {
  const ActivationTurn turn(core_);
  core_->marked = true;
  ++core_->layer;
  core_->settle();
}

void ActivationStore::wait(int64_t bytes) {
  const ActivationTurn turn(core_);
  core_->settle(bytes);
}

c10::Dict<std::string, int64_t> ActivationStore::statistics() const {
  const ActivationTurn turn(core_);
  core_->settle();
  core_->release_retired();
  c10::Dict<std::string, int64_t> result;
  result.insert("stored", core_->stored);
  result.insert("copied_out", core_->copied_out);
  result.insert("reloaded", core_->reloaded);
  result.insert("host", core_->memory.bytes());
  result.insert("live", core_->live_host);
  result.insert("disk", core_->file ? core_->file->size() : 0);
  result.insert("entries", core_->alive);
  return result;
}

void register_activation_store(torch::Library& library) {
  library.class_<StoredActivation>("StoredActivation");
  library.class_<ActivationStore>("ActivationStore")
      .def(torch::init<std::string, std::string, int64_t, int64_t, int64_t, std::string, int64_t>())
      .def("exclude", &ActivationStore::exclude)
      .def("mark", &ActivationStore::mark)
      .def("wait", &ActivationStore::wait)
      .def("measure_link",
           [](const c10::intrusive_ptr<ActivationStore>& store, int64_t bytes) {
             const LinkSpeed link = store->measure_link(bytes);
             return std::tuple(link.out_bytes_per_second, link.in_bytes_per_second, link.copy_share,
                               link.prefetch);
           })
      .def("statistics", &ActivationStore::statistics);
  // The operators are implemented here, not in a TORCH_LIBRARY_IMPL block. The signature of a kernel may name
  // a custom class only after the class is registered.
  constexpr auto key = c10::DispatchKey::CompositeExplicitAutograd;
  const auto store = [](const c10::intrusive_ptr<ActivationStore>& store, const at::Tensor& x) {
    return store->store(x);
  };
  const auto reload = [](const c10::intrusive_ptr<StoredActivation>& activation) {
    return activation->reload();
  };
  library.impl("_store_activation", torch::dispatch(key, store));
  library.impl("_reload_activation", torch::dispatch(key, reload));
}

}  // namespace shoestring::offload
