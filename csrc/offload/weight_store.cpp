#include "offload/weight_store.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include "core/device.h"
#include "offload/weight_core.h"

namespace shoestring::offload {

WeightStore::WeightStore(c10::Device device, const std::string& folder, int64_t keep, bool steps) {
  device = with_index(device);
  TORCH_CHECK(!folder.empty() || !device.is_cpu(), kOffloadWeights,
              ": to: expected nvme:DIR for weights on the CPU, received "
              "cpu: they are in host memory already");
  TORCH_CHECK(keep >= 0, kOffloadWeights, ": keep: expected a number of bytes of at least 0, received ",
              keep);
  core_ = std::make_shared<WeightStoreCore>(device, folder, keep, steps);
}

WeightStore::~WeightStore() = default;

int64_t WeightStore::add(const std::string& name, const std::vector<at::Tensor>& frozen,
                         const std::vector<at::Tensor>& trained, const std::vector<at::Tensor>& stacks) {
  core_->process.check(kOffloadWeights);
  const std::lock_guard lock(core_->mutex);
  core_->add(name, frozen, trained, stacks);
  return static_cast<int64_t>(core_->blocks.size()) - 1;
}

int64_t WeightStore::add_table(const std::string& name, const at::Tensor& weight) {
  core_->process.check(kOffloadWeights);
  const std::lock_guard lock(core_->mutex);
  core_->add_table(name, weight);
  return static_cast<int64_t>(core_->blocks.size()) - 1;
}

at::Tensor WeightStore::embedding(const at::Tensor& weight, const at::Tensor& indices) {
  return core_->embedding(weight, indices);
}

void WeightStore::enter(int64_t index, const std::vector<at::Tensor>& inputs, bool can_vanish) {
  core_->enter(index, inputs, can_vanish);
}

void WeightStore::leave(int64_t index, const std::vector<at::Tensor>& outputs) {
  core_->leave(index, outputs);
}

void WeightStore::begin(int64_t index, bool changed) {
  const std::lock_guard lock(core_->mutex);
  core_->begin_run(index, /*can_vanish=*/true);
  WeightBlock& b = core_->block(index);
  try {
    core_->fetch_whole(b);
  } catch (...) {
    core_->end_run(index);
    throw;
  }
  if (changed) b.changed = b.size;
}

void WeightStore::end(int64_t index) { core_->end_run(index); }

c10::intrusive_ptr<WeightsHere> WeightStore::open(int64_t index, bool changed) {
  const std::lock_guard lock(core_->mutex);
  core_->block(index);
  return c10::make_intrusive<WeightsHere>(core_, core_->blocks[static_cast<size_t>(index)], changed);
}

WeightsHere::WeightsHere(std::shared_ptr<WeightStoreCore> core, std::shared_ptr<WeightBlock> block,
                         bool changed)
    : core_(std::move(core)), block_(std::move(block)) {
  core_->fetch_whole(*block_);
  ++block_->uses.count;
  if (changed) block_->changed = block_->size;
}

WeightsHere::~WeightsHere() {
  if (!core_->process.is_here()) return;
  try {
    close();
  } catch (...) {  // a destructor cannot raise
  }
}

void WeightsHere::close() {
  const std::lock_guard lock(core_->mutex);
  if (block_ == nullptr) return;
  const auto block = std::exchange(block_, nullptr);
  --block->uses.count;
  if (block->uses.none()) core_->unused(*block);
}

void WeightStore::restore() {
  const std::lock_guard lock(core_->mutex);
  core_->process.check(kOffloadWeights);
  core_->settle();
  for (const auto& b : core_->blocks) core_->give_back(*b);
  core_->forget_runs();
  core_->blocks.clear();
}

c10::Dict<std::string, int64_t> WeightStore::statistics() const {
  const std::lock_guard lock(core_->mutex);
  core_->process.check(kOffloadWeights);
  int64_t away = 0, on_device = 0;
  for (const auto& b : core_->blocks) {
    if (!b->stays) away += b->size;
    on_device += WeightStoreCore::bytes_here(*b);
  }
  c10::Dict<std::string, int64_t> result;
  result.insert("fetched", core_->fetched);
  result.insert("written", core_->written);
  result.insert("away", away);
  result.insert("device", on_device);
  result.insert("host", core_->host.bytes());
  result.insert("disk", core_->file ? core_->file->size() : 0);
  return result;
}

void register_weight_store(torch::Library& library) {
  library.class_<WeightsHere>("WeightsHere").def("close", &WeightsHere::close);
  library.class_<WeightStore>("WeightStore")
      .def(torch::init<c10::Device, std::string, int64_t, bool>())
      .def("add", &WeightStore::add)
      .def("add_table", &WeightStore::add_table)
      .def("embedding", &WeightStore::embedding)
      .def("enter",
           [](const c10::intrusive_ptr<WeightStore>& store, int64_t index,
              const std::vector<at::Tensor>& inputs) { store->enter(index, inputs, /*can_vanish=*/true); })
      .def("leave", &WeightStore::leave)
      .def("open", &WeightStore::open)
      .def("begin", &WeightStore::begin)
      .def("end", &WeightStore::end)
      .def("restore", &WeightStore::restore)
      .def("statistics", &WeightStore::statistics);
}

}  // namespace shoestring::offload
