// The C++ interface of weight offloading, over a WeightStore.

#include <shoestring/checkpoint/offload_weights.h>

#include <utility>

#include "offload/weight_store.h"

namespace shoestring {

struct OffloadWeights::Store {
  c10::intrusive_ptr<offload::WeightStore> store;
  int64_t index(int64_t block) const {
    TORCH_CHECK(block >= 0 && block < static_cast<int64_t>(blocks.size()),
                "OffloadWeights: block: expected one of ", blocks.size(), " blocks, received ", block);
    return blocks[static_cast<size_t>(block)];
  }
  std::vector<int64_t> blocks;  // the index in `store` of each block
};

OffloadWeights::OffloadWeights(const OffloadWeightsOptions& o)
    : store_(new Store{c10::make_intrusive<offload::WeightStore>(c10::Device(o.device()), o.folder(),
                                                                 o.keep(), /*steps=*/false),
                       {}}) {}

OffloadWeights::~OffloadWeights() = default;

int64_t OffloadWeights::add(const std::vector<at::Tensor>& frozen, const std::vector<at::Tensor>& trained,
                            const std::vector<at::Tensor>& stacks) {
  const auto block = static_cast<int64_t>(store_->blocks.size());
  store_->blocks.push_back(store_->store->add("block " + std::to_string(block), frozen, trained, stacks));
  return block;
}

void OffloadWeights::add_table(const at::Tensor& weight) {
  store_->store->add_table(c10::str("table ", weight.sizes()), weight.detach());
}

at::Tensor OffloadWeights::embedding(const at::Tensor& weight, const at::Tensor& indices) const {
  return store_->store->embedding(weight, indices);
}

at::Tensor OffloadWeights::run(int64_t block, const at::Tensor& x,
                               const std::function<at::Tensor(const at::Tensor&)>& forward) {
  auto& store = *store_->store;
  const int64_t index = store_->index(block);
  store.enter(index, {x});
  at::Tensor y;
  try {
    y = forward(x);
  } catch (...) {
    store.leave(index, {});
    throw;
  }
  store.leave(index, {y});
  return y;
}

void OffloadWeights::present(int64_t block, const std::function<void()>& function, bool changed) {
  const auto on_device = store_->store->open(store_->index(block), changed);
  function();
}

void OffloadWeights::restore() {
  store_->store->restore();
  store_->blocks.clear();
}

std::map<std::string, int64_t> OffloadWeights::statistics() const {
  std::map<std::string, int64_t> result;
  for (const auto& entry : store_->store->statistics()) result[entry.key()] = entry.value();
  return result;
}

}  // namespace shoestring
