// The C++ interface of weight offloading, over a WeightStore.

#include <shoestring/offload_weights.h>

#include <utility>

#include "offload/weight_store.h"

namespace shoestring {

struct OffloadWeights::Store {
  c10::intrusive_ptr<offload::WeightStore> store;
  int64_t blocks = 0;
};

OffloadWeights::OffloadWeights(const OffloadWeightsOptions& o)
    : store_(new Store{
          c10::make_intrusive<offload::WeightStore>(c10::Device(o.device()), o.folder(), o.keep())}) {}

OffloadWeights::~OffloadWeights() = default;

int64_t OffloadWeights::add(const std::vector<at::Tensor>& frozen, const std::vector<at::Tensor>& trained) {
  const int64_t index = store_->store->add("block " + std::to_string(store_->blocks), frozen, trained);
  ++store_->blocks;
  return index;
}

at::Tensor OffloadWeights::run(int64_t block, const at::Tensor& x,
                               const std::function<at::Tensor(const at::Tensor&)>& forward) {
  auto& store = *store_->store;
  store.enter(block, {x});
  at::Tensor y;
  try {
    y = forward(x);
  } catch (...) {
    store.leave(block, {});
    throw;
  }
  store.leave(block, {y});
  return y;
}

void OffloadWeights::present(int64_t block, const std::function<void()>& function, bool changed) {
  auto& store = *store_->store;
  store.open(block);
  try {
    function();
  } catch (...) {
    store.close(block, changed);
    throw;
  }
  store.close(block, changed);
}

void OffloadWeights::restore() {
  store_->store->restore();
  store_->blocks = 0;
}

std::map<std::string, int64_t> OffloadWeights::statistics() const {
  std::map<std::string, int64_t> result;
  for (const auto& entry : store_->store->statistics()) result[entry.key()] = entry.value();
  return result;
}

}  // namespace shoestring
