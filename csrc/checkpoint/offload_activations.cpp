// The C++ interface of activation offloading: saved-tensor hooks that move tensors into an ActivationStore.

#include <shoestring/checkpoint/offload_activations.h>

#include <utility>

#include "checkpoint/hooks.h"
#include "core/device.h"
#include "offload/activation_store.h"

namespace shoestring {
namespace {

struct Packed : activations::Packed {
  explicit Packed(c10::intrusive_ptr<offload::StoredActivation> activation)
      : activation(std::move(activation)) {}
  at::Tensor unpack() override { return activation->reload(); }
  c10::intrusive_ptr<offload::StoredActivation> activation;
};

struct StoringHooks : activations::SavedTensorHooks {
  explicit StoringHooks(c10::intrusive_ptr<offload::ActivationStore> store) : store(std::move(store)) {}
  std::shared_ptr<activations::Packed> pack(const at::Tensor& tensor) override {
    return std::make_shared<Packed>(store->store(tensor));
  }
  c10::intrusive_ptr<offload::ActivationStore> store;
};

}  // namespace

struct OffloadActivations::Store {
  c10::intrusive_ptr<offload::ActivationStore> store;
};

struct OffloadActivations::Scope::Hooks {
  activations::HooksGuard guard;
};

OffloadActivations::Scope::Scope(std::unique_ptr<Hooks> hooks) : hooks_(std::move(hooks)) {}
OffloadActivations::Scope::~Scope() = default;

OffloadActivations::OffloadActivations(const OffloadActivationsOptions& o,
                                       const std::vector<at::Tensor>& exclude) {
  TORCH_CHECK(o.host_bytes() == 0 || !o.folder().empty(),
              "offload_activations: host_bytes: expected a folder for tensors beyond this limit, received ",
              o.host_bytes(), " and no folder");
  const std::string device = o.device().empty() ? default_device().str() : o.device();
  store_ = std::make_unique<Store>(Store{c10::make_intrusive<offload::ActivationStore>(
      device, o.compression(), o.prefetch(), o.max_pending(), o.min_bytes(), o.folder(), o.host_bytes())});
  this->exclude(exclude);
}

OffloadActivations::~OffloadActivations() = default;

OffloadActivations::Scope OffloadActivations::scope() {
  return Scope(std::unique_ptr<Scope::Hooks>(
      new Scope::Hooks{{"offload_activations", std::make_shared<StoringHooks>(store_->store)}}));
}

void OffloadActivations::exclude(const std::vector<at::Tensor>& tensors) { store_->store->exclude(tensors); }

void OffloadActivations::mark() { store_->store->mark(); }

void OffloadActivations::wait(int64_t bytes) { store_->store->wait(bytes); }

CheckpointPlanOptions OffloadActivations::measure_link(int64_t bytes) const {
  const offload::LinkSpeed link = store_->store->measure_link(bytes);
  return CheckpointPlanOptions()
      .out_bytes_per_second(link.out_bytes_per_second)
      .in_bytes_per_second(link.in_bytes_per_second)
      .copy_share(link.copy_share)
      .prefetch(link.prefetch);
}

std::map<std::string, int64_t> OffloadActivations::statistics() const {
  std::map<std::string, int64_t> result;
  for (const auto& entry : store_->store->statistics()) result[entry.key()] = entry.value();
  return result;
}

}  // namespace shoestring
