#include "offload/weight_core.h"

// The blocks of a WeightStore: how they leave, come back, and are written.

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/ceil_div.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <torch/csrc/autograd/graph_task.h>

#include "core/device.h"

namespace shoestring::offload {
namespace {

// Storages begin at multiples of this many bytes, as those of PyTorch's CUDA allocator do.
constexpr int64_t kAlignment = 512;
// Size of one read or write. Several are under way at a time, since one alone does not use a disk fully.
constexpr int64_t kPiece = int64_t{4} << 20;
// Bytes of weights that are copied at a time on their way to the file.
constexpr int64_t kStaging = 4 * kPiece;

at::Tensor bytes_at(void* memory, int64_t size, c10::Device device = c10::kCPU) {
  return at::from_blob(memory, {size}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

WatchedWeight watch_weight(const at::Tensor& weight, bool is_trained) {
  const uint32_t version = weight.is_inference() ? 0 : static_cast<uint32_t>(weight._version());
  return {c10::weak_intrusive_ptr<c10::TensorImpl>(weight.getIntrusivePtr()), is_trained, version};
}

bool has_storage(const WeightBlock& b, const c10::Storage& storage) {
  return std::any_of(b.pieces.begin(), b.pieces.end(), [&](const WeightPiece& p) {
    return p.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  });
}

WeightStoreCore::WeightStoreCore(c10::Device on, const std::string& folder, int64_t keep, bool steps)
    : device(on), keep(keep), steps(steps), host(kOffloadWeights, on), reading(on), in(on), out(on),
      demand(on) {
  if (folder.empty()) return;
  file = std::make_unique<SwapFile>(kOffloadWeights, folder);
  if (!file->is_direct()) {
    TORCH_WARN(kOffloadWeights, ": ", folder,
               ": this file system has no O_DIRECT, so weights also take room in the "
               "page cache; a local disk is faster");
  }
}

WeightBlock& WeightStoreCore::block(int64_t index) {
  process.check(kOffloadWeights);
  TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(blocks.size()), kOffloadWeights,
              ": block: expected one of ", blocks.size(), " blocks, received ", index);
  return *blocks[static_cast<size_t>(index)];
}

// Reads or writes ranges of a block that begins at `memory`, and returns when it is done. What is read must
// have the checksums of what was written.
void WeightStoreCore::transfer(bool is_write, WeightBlock& b, const std::vector<Range>& ranges,
                               char* memory) const {
  std::vector<SwapFile::Ticket> tickets;
  std::exception_ptr error;
  for (const Range& range : ranges) {
    for (int64_t i = range.begin; i < range.end; i += kPiece) {
      const int64_t count = std::min(kPiece, range.end - i);
      tickets.push_back(is_write ? file->write(b.at + i, memory + i, count)
                                 : file->read(b.at + i, memory + i, count));
    }
    if (!is_write) continue;
    b.sums.for_each(range.begin, range.end,
                    [&](int64_t at, int64_t count, uint32_t& sum) { sum = checksum(memory + at, count); });
  }
  auto ticket = tickets.begin();
  for (const Range& range : ranges) {
    int64_t arrived = range.begin;
    for (int64_t i = range.begin; i < range.end; i += kPiece) {
      try {
        file->wait(*ticket++);
        if (is_write || error) continue;
        arrived = check_sums(b, arrived, std::min(arrived + kPiece, range.end), memory);
      } catch (...) {
        error = std::current_exception();
      }
    }
  }
  if (error) std::rethrow_exception(error);
}

// Reads or writes the bytes of a block from `first` on.
void WeightStoreCore::transfer(bool is_write, WeightBlock& b, int64_t first, const at::Tensor& memory) const {
  transfer(is_write, b, {{first, first + memory.numel()}}, static_cast<char*>(memory.data_ptr()) - first);
}

// Checks whole units of [from, end) of a block whose bytes begin at `memory`, and returns where the first
// one begins that has not arrived.
int64_t WeightStoreCore::check_sums(WeightBlock& b, int64_t from, int64_t end, const char* memory) const {
  b.sums.for_each(from, end, [&](int64_t at, int64_t count, uint32_t sum) {
    TORCH_CHECK(
        checksum(memory + at, count) == sum, kOffloadWeights, ": ", file->path(), ": expected the ", count,
        " bytes at ", b.at + at,
        " that were written, received others: the disk, its driver or the memory is faulty, or another "
        "program has written to the file; load the model again");
    from = at + count;
  });
  return from;
}

// Adds the storage of a tensor to a block, unless the block has it.
void WeightStoreCore::add_piece(WeightBlock& b, const at::Tensor& t, int64_t alignment) {
  TORCH_CHECK(t.device() == device && t.has_storage(), kOffloadWeights, ": ", b.name,
              ": expected weights with storages on ", device, ", received one on ", t.device());
  const auto size = static_cast<int64_t>(t.storage().nbytes());
  if (size == 0 || has_storage(b, t.storage())) return;
  for (const auto& other_block : blocks) {
    TORCH_CHECK(!has_storage(*other_block, t.storage()), kOffloadWeights, ": ", b.name,
                ": expected weights of its own, received one "
                "that ",
                other_block->name, " has, too");
  }
  b.pieces.push_back({t.storage(), b.size, size});
  b.size = at::round_up(b.size + size, alignment);
}

void WeightStoreCore::add(const std::string& name, const std::vector<at::Tensor>& frozen,
                          const std::vector<at::Tensor>& trained, const std::vector<at::Tensor>& stacks) {
  if (!device.is_cpu() && !stacks.empty()) {  // they travel with the block
    std::vector<at::Tensor> all = frozen;
    all.insert(all.end(), stacks.begin(), stacks.end());
    return add(name, all, trained, {});
  }
  auto b = std::make_shared<WeightBlock>();
  b->name = name;
  for (const auto* tensors : {&trained, &frozen}) {
    for (const at::Tensor& t : *tensors) {
      b->watched.push_back(watch_weight(t, tensors == &trained));
      add_piece(*b, t, kAlignment);
    }
    b->size = at::round_up(b->size, kPage);
    if (tensors == &trained) b->trained = b->size;
  }
  b->stacks = b->size;
  for (const at::Tensor& t : stacks) {
    TORCH_CHECK(
        t.dim() > 1 && t.is_contiguous() && t.has_storage() && t.nbytes() > 0 &&
            t.nbytes() == t.storage().nbytes() && !has_storage(*b, t.storage()),
        kOffloadWeights, ": ", name,
        ": expected contiguous stacks (matrices, ...), each with a storage of its own, received one of ",
        t.sizes());
    b->watched.push_back(watch_weight(t, /*is_trained=*/false));
    add_piece(*b, t, kPage);
    b->pieces.back().arrived.resize(static_cast<size_t>(t.size(0)));
  }
  if (b->size <= keep) {
    b->stays = true;
    keep -= b->size;
  } else {
    // A matrix has checksums of its own, with the pages around it.
    b->sums = Checksums(b->size, stacks.empty() ? kPiece : kPage, b->trained);
    take_away(*b);
  }
  steps |= !trained.empty();
  blocks.push_back(std::move(b));
}

void WeightStoreCore::take_away(WeightBlock& b) {
  const at::NoGradGuard no_grad;
  if (file) b.at = file->allocate(b.size);
  try {
    if (file) {
      write_all(b);
    } else {
      b.home = host.empty({b.size}, at::kByte, b.size);
      gather(b, 0, b.home);
    }
  } catch (...) {
    if (file) file->free(b.at, b.size);
    throw;
  }
  place(b, nullptr);
}

// Copies the bytes of a block from `first` on to host memory.
void WeightStoreCore::gather(const WeightBlock& b, int64_t first, const at::Tensor& to) const {
  const int64_t last = first + to.numel();
  for (const WeightPiece& p : b.pieces) {
    const int64_t begin = std::max(first, p.at), end = std::min(last, p.at + p.size);
    if (begin >= end) continue;
    auto* const from = static_cast<char*>(p.storage.unsafeGetStorageImpl()->mutable_data());
    to.narrow(0, begin - first, end - begin).copy_(bytes_at(from + begin - p.at, end - begin, device));
  }
}

// Writes a block to the file. The parts begin where units of the checksums do.
void WeightStoreCore::write_all(WeightBlock& b) {
  const int64_t unit = b.row == 0 ? kPiece : std::lcm(b.row, kPage);
  const int64_t step = std::max(unit, kStaging / unit * unit);
  const at::Tensor staging = host.empty({std::min(at::round_up(step, kPage), b.size)}, at::kByte);
  for (int64_t first = 0; first < b.size;) {
    const int64_t end =
        first < b.trained ? std::min(first + step, b.trained) : std::min(first + step, b.size);
    const at::Tensor part = staging.narrow(0, 0, end - first);
    gather(b, first, part);
    transfer(true, b, first, part);
    first = end;
  }
}

// Lets the storages of a block point into `memory`, or nowhere.
void WeightStoreCore::place(WeightBlock& b, const at::Tensor* memory) {
  for (const WeightPiece& p : b.pieces)
    place(b, p, p.is_stack() && !b.is_whole && p.users == 0 ? nullptr : memory);
  b.is_here = memory != nullptr;
}

void WeightStoreCore::place(const WeightBlock& b, const WeightPiece& p, const at::Tensor* memory) {
  auto& storage = *p.storage.unsafeGetStorageImpl();
  const auto at_source = [&](void* to, const at::Tensor& owner) {
    return pointer_to_source(weak_from_this(), device, to, owner);
  };
  const auto lock = lock_sources();
  if (memory == nullptr) {
    const std::string error =
        c10::str(kOffloadWeights, ": ", b.name, ": expected weights on ", device, ", received some that are ",
                 file ? "in a file" : "in host memory", ": read or change them within present()");
    empty_storage(storage, error,
                  b.row != 0 || p.is_stack() ? at_source(nullptr, {}) : at::DataPtr(nullptr, device));
    return;
  }
  char* const to = static_cast<char*>(memory->data_ptr()) + p.at;
  p.is_stack() ? place_storage(storage, at_source(to, *memory)) : place_storage(storage, to, *memory);
}

// Starts to bring a block's weights, after all blocks that nobody uses have begun to leave.
void WeightStoreCore::begin_in(WeightBlock& b) {
  const at::NoGradGuard no_grad;
  const c10::OptionalDeviceGuard guard(device);
  for (const auto& other_block : blocks) {
    if (other_block.get() != &b && other_block->uses.none()) evict(*other_block);
  }
  release_retired();
  if (b.leaving.defined()) {
    // The weights are still there. They count as changed, so that a write that has failed is repeated, and
    // later changes are written, too.
    leaves = nullptr;
    b.memory = std::exchange(b.leaving, at::Tensor());
    try {
      b.out->block(current_stream(device));
    } catch (...) {
    }
    return;
  }
  if (device.is_cpu()) {
    b.memory = host.empty({b.size}, at::kByte, b.size);
    forget_matrices(b);
    b.in = reading.run({}, [this, &b, to = b.memory.narrow(0, 0, b.stacks)] { transfer(false, b, 0, to); });
  } else {
    b.memory = at::empty({b.size}, at::TensorOptions().dtype(at::kByte).device(device));
    // The memory may still be in use in the current stream, up to this point.
    std::vector<FencePtr> after{Fence::now(device)};
    at::Tensor from = b.home;
    if (file) {
      from = b.staging = host.empty({b.size}, at::kByte, b.size);
      after.push_back(reading.run({}, [this, &b, to = from] { transfer(false, b, 0, to); }));
    }
    b.in = in.run(std::move(after), [from, to = b.memory] { to.copy_(from, /*non_blocking=*/true); });
  }
  fetched += b.stacks;
}

// Raises if backward would compute gradients of weights that nobody steps while their block is there.
void WeightStoreCore::check_frozen(const WeightBlock& b) const {
  if (b.stays || steps || !at::GradMode::is_enabled()) return;
  for (const WatchedWeight& w : b.watched) {
    const auto tensor = w.tensor.lock();
    TORCH_CHECK(tensor == nullptr || w.is_trained || !tensor->requires_grad(), kOffloadWeights, ": ", b.name,
                ": expected frozen weights, as when they left, received one of shape ", tensor->sizes(),
                " that requires gradients now. Bring the weights back (undo), and offload them again with "
                "trained weights, which an optimizer steps within backward.");
  }
}

void WeightStoreCore::fetch(int64_t index) {
  WeightBlock& b = block(index);
  check_frozen(b);
  fetch(b);
  prefetch_matrices(b, torch::autograd::get_current_graph_task_id() != BlockUses::kNoPass);
}

void WeightStoreCore::fetch(WeightBlock& b) {
  if (b.stays || b.is_here) return;
  if (!b.memory.defined()) begin_in(b);
  try {
    if (b.in) b.in->block(current_stream(device));
  } catch (...) {
    forget(b);
    throw;
  }
  place(b, &b.memory);
}

// Starts to bring the block at `index`, or else the next one in this direction that is no table.
void WeightStoreCore::prefetch(int64_t index, int64_t direction) {
  while (index >= 0 && index < count() && blocks[static_cast<size_t>(index)]->row != 0) index += direction;
  if (index < 0 || index >= count()) return;
  WeightBlock& b = block(index);
  if (b.stays || b.memory.defined()) return;
  begin_in(b);
  prefetch_matrices(b, /*is_backward=*/direction < 0);
}

// Takes a block's memory on the device away, after a copy to it has ended.
void WeightStoreCore::forget(WeightBlock& b) {
  try {
    if (b.in) b.in->block(current_stream(device));
  } catch (...) {
  }
  if (b.is_here) place(b, nullptr);
  if (b.staging.defined()) retired.emplace_back(std::move(b.staging), b.in);
  b.memory = b.staging = at::Tensor();
  b.in = nullptr;
  if (b.row != 0) host.trim();  // a table may be far larger than a block
}

// Lets a block's weights leave the device. Changed weights are written meanwhile; one block at a time.
void WeightStoreCore::evict(WeightBlock& b) {
  if (b.stays || !b.memory.defined()) return;
  if (b.changed == 0) return forget(b);
  settle();
  const at::NoGradGuard no_grad;
  const at::Tensor from = b.memory.narrow(0, 0, b.changed);
  if (device.is_cpu()) {
    b.out = out.run({}, [this, &b, from] { transfer(true, b, 0, from); });
  } else {
    const at::Tensor to =
        file ? host.empty({b.changed}, at::kByte, b.changed) : b.home.narrow(0, 0, b.changed);
    b.out = out.run({Fence::now(device)}, [from, to] { to.copy_(from, /*non_blocking=*/true); });
    if (file) {
      b.out = reading.run({}, [this, &b, to, copied = b.out] {
        copied->synchronize();
        transfer(true, b, 0, to);
      });
    }
  }
  written += b.changed;
  place(b, nullptr);
  b.leaving = std::exchange(b.memory, at::Tensor());
  if (b.staging.defined()) retired.emplace_back(std::move(b.staging), b.in);
  b.staging = at::Tensor();
  b.in = nullptr;
  leaves = &b;
}

// Waits until the changed weights that leave are written. If that fails, they come back and stay changed.
void WeightStoreCore::settle() {
  WeightBlock* const b = std::exchange(leaves, nullptr);
  if (b == nullptr) return;
  try {
    b->out->synchronize();
  } catch (...) {
    b->memory = std::exchange(b->leaving, at::Tensor());
    throw;
  }
  b->changed = 0;
  b->leaving = at::Tensor();
}

void WeightStoreCore::release_retired() {
  std::erase_if(retired, [](const auto& r) { return r.second == nullptr || r.second->is_done(); });
}

// Returns the index of the last block that is no table, or -1.
int64_t WeightStoreCore::last_block() const {
  auto last = static_cast<int64_t>(blocks.size()) - 1;
  while (last >= 0 && blocks[static_cast<size_t>(last)]->row != 0) --last;
  return last;
}

// The optimizer has stepped the trained weights, and others that require gradients by now.
void WeightStoreCore::ended(int64_t index) {
  WeightBlock& b = block(index);
  b.changed = std::max(b.changed, b.trained);
  for (const WatchedWeight& w : b.watched) {
    const auto tensor = w.tensor.lock();
    if (tensor != nullptr && !w.is_trained && tensor->requires_grad())
      b.changed = std::max(b.changed, b.is_whole ? b.size : b.stacks);
  }
}

// Called when nobody uses a block any more. Its memory may stay for the next use, but nobody can reach it.
void WeightStoreCore::unused(WeightBlock& b) {
  if (b.stays || !b.is_here) return;
  for (WatchedWeight& w : b.watched) {
    const auto tensor = w.tensor.lock();
    if (tensor == nullptr || tensor->is_inference()) continue;
    const uint32_t version = tensor->version_counter().current_version();
    if (std::exchange(w.version, version) != version)
      b.changed = std::max(b.changed, w.is_trained ? b.trained : b.is_whole ? b.size : b.stacks);
  }
  b.is_whole = false;
  place(b, nullptr);
}

}  // namespace shoestring::offload
