#include "offload/weight_core.h"

// The stacks of a WeightStore: weights of which operators read some matrices, such as those of experts.

#include <algorithm>
#include <utility>

#include <ATen/ceil_div.h>
#include <ATen/core/grad_mode.h>

namespace shoestring::offload {

struct WeightStoreCore::Matrices final : ArrivingMatrices {
  Matrices(std::shared_ptr<WeightStoreCore> core, std::shared_ptr<WeightBlock> block, WeightPiece& stack)
      : core(std::move(core)), block(std::move(block)), stack(stack), arriving(stack.arriving) {
    ++this->block->uses.count;
    if (stack.users++ == 0 && !this->block->is_whole)
      this->core->place(*this->block, stack, &this->block->memory);
  }

  ~Matrices() override {
    if (!core->process.is_here()) return;
    try {
      const std::lock_guard lock(core->mutex);
      if (--stack.users == 0 && !block->is_whole) core->place(*block, stack, nullptr);
      --block->uses.count;
      if (block->uses.none()) core->unused(*block);
    } catch (...) {  // a destructor cannot raise
    }
  }

  void wait() override {
    try {
      for (const FencePtr& copy : arriving) copy->wait_issued();
    } catch (...) {
      const std::lock_guard lock(core->mutex);
      core->forget_matrices(*block);
      throw;
    }
  }

  const std::shared_ptr<WeightStoreCore> core;
  const std::shared_ptr<WeightBlock> block;
  WeightPiece& stack;
  const std::vector<FencePtr> arriving;
};

std::unique_ptr<ArrivingMatrices> WeightStoreCore::bring(const at::Tensor& stack,
                                                         c10::ArrayRef<int64_t> offsets) {
  process.check(kOffloadWeights);
  TORCH_CHECK(!stack.requires_grad() || !at::GradMode::is_enabled(), kOffloadWeights,
              ": expected frozen stacks, as when they left, received one of shape ", stack.sizes(),
              " that requires gradients now; bring the weights back (undo) to train them");
  const std::lock_guard lock(mutex);
  for (const auto& b : blocks) {
    for (WeightPiece& p : b->pieces) {
      if (p.storage.unsafeGetStorageImpl() != stack.storage().unsafeGetStorageImpl()) continue;
      TORCH_CHECK(offsets.size() == p.arrived.size() + 1, kOffloadWeights, ": ", b->name,
                  ": expected slots of the ", p.arrived.size(), " matrices of a stack, received those of ",
                  offsets.size() - 1);
      std::vector<bool> wanted(p.arrived.size());
      for (size_t e = 0; e < wanted.size(); ++e) wanted[e] = offsets[e] < offsets[e + 1];
      fetch(*b);
      start_matrices(*b, p, wanted, demand);
      p.used = std::move(wanted);
      return std::make_unique<Matrices>(shared_from_this(), b, p);
    }
  }
  TORCH_CHECK(false, kOffloadWeights, ": expected a stack of a block, received a weight of ", stack.sizes());
}

// Starts to read those of the wanted matrices of a stack that are not there.
void WeightStoreCore::start_matrices(WeightBlock& b, WeightPiece& stack, const std::vector<bool>& wanted,
                                     CopyLane& lane) {
  std::vector<Range> ranges;  // whole pages
  for (size_t e = 0; e < wanted.size(); ++e) {
    if (!wanted[e] || stack.arrived[e]) continue;
    stack.arrived[e] = true;
    fetched += stack.matrix();
    const int64_t begin = stack.at + static_cast<int64_t>(e) * stack.matrix();
    const Range pages{begin / kPage * kPage, at::round_up(begin + stack.matrix(), kPage)};
    if (!ranges.empty() && pages.begin <= ranges.back().end) {
      ranges.back().end = pages.end;
    } else {
      ranges.push_back(pages);
    }
  }
  if (ranges.empty()) return;
  stack.arriving.push_back(lane.run({}, [this, &b, ranges = std::move(ranges), to = b.memory] {
    transfer(false, b, ranges, static_cast<char*>(to.data_ptr()));
  }));
}

// Starts to read the matrices that the last run of a block has used. They are those of its backward, and
// probably those of its next forward, if they are most of all.
void WeightStoreCore::prefetch_matrices(WeightBlock& b, bool is_backward) {
  if (b.stays) return;
  for (size_t i = 0; i < b.pieces.size(); ++i) {
    WeightPiece& p = b.pieces[is_backward ? b.pieces.size() - 1 - i : i];
    if (is_backward || 2 * std::ranges::count(p.used, true) >= std::ssize(p.arrived))
      start_matrices(b, p, p.used, reading);
  }
}

// Says that no matrix is in the memory of a block.
void WeightStoreCore::forget_matrices(WeightBlock& b) {
  for (WeightPiece& p : b.pieces) {
    p.arrived.assign(p.arrived.size(), false);
    p.arriving.clear();
  }
}

void WeightStoreCore::fetch_whole(WeightBlock& b) {
  fetch(b);
  if (b.stays || b.is_whole) return;
  try {
    for (WeightPiece& p : b.pieces) {
      if (p.is_stack()) start_matrices(b, p, std::vector<bool>(p.arrived.size(), true), demand);
    }
    for (const WeightPiece& p : b.pieces) {
      for (const FencePtr& copy : p.arriving) copy->wait_issued();
    }
  } catch (...) {
    forget_matrices(b);
    if (b.uses.none()) forget(b);
    throw;
  }
  b.is_whole = true;
  for (const WeightPiece& p : b.pieces) {
    if (p.is_stack()) place(b, p, &b.memory);
  }
}

void WeightStoreCore::give_back(WeightBlock& b) {
  ++b.uses.count;  // the next fetch must not evict the block
  fetch_whole(b);
  for (WeightPiece& p : b.pieces) {
    if (!p.is_stack()) continue;
    p.arrived.clear();  // operators do not ask for its matrices any more
    if (!b.stays) place(b, p, &b.memory);
  }
}

int64_t WeightStoreCore::bytes_here(const WeightBlock& b) {
  if (!b.memory.defined() && !b.leaving.defined()) return 0;
  int64_t bytes = b.stacks;
  for (const WeightPiece& p : b.pieces) {
    if (p.is_stack()) bytes += p.matrix() * std::ranges::count(p.arrived, true);
  }
  return bytes;
}

}  // namespace shoestring::offload
