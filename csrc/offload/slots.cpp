// Moves chunks of optimizer state to the device and back, through a few buffers called slots. A slot holds
// one chunk.

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/ops/empty.h>

#include "offload/first_error.h"
#include "offload/state.h"

namespace shoestring::offload {
namespace {

// Number of slots: the optimizer steps on the chunk in one slot, two slots are being read, and one is being
// written.
constexpr size_t kSlots = 4;
// Number of chunks that are read ahead. With more, the chunk for which the optimizer step waits would share
// the disk's bandwidth with too many other chunks.
constexpr int64_t kAhead = 2;

}  // namespace

// Waits for all transfers, which must finish before their buffers are freed.
State::~State() {
  if (offload_->process.is_here()) discard();
}

void State::discard() {
  for (Slot& slot : slots_) {
    FirstError ignored;
    ignored.guard([&] { wait_all(slot, Phase::kClean); });
  }
  slots_.clear();
  done_.clear();
}

State::Slot* State::find(int64_t chunk) {
  const auto found =
      std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.chunk == chunk; });
  return found == slots_.end() ? nullptr : &*found;
}

void State::copy(CopyLane& lane, Slot& slot, FencePtr after, std::vector<Tensor> to,
                 std::vector<Tensor> from) {
  slot.copied = lane.run({std::move(after)}, [to = std::move(to), from = std::move(from)] {
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], /*non_blocking=*/true);
  });
}

bool State::is_over(const Slot& slot) {
  if (!is_in_file(slot)) return slot.copied->is_done();
  return std::all_of(slot.tickets.begin(), slot.tickets.end(),
                     [&](int64_t ticket) { return offload_->file->is_finished(ticket); });
}

// Returns the slot that was used least recently among those without unwritten changes. Returns null if there
// is none.
State::Slot* State::idle() {
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    if (slot.phase == Phase::kFetching && is_over(slot)) await_write(slot);
    if (slot.phase == Phase::kWriting && is_over(slot)) await_write(slot);
    if (slot.phase == Phase::kClean && (oldest == nullptr || slot.used < oldest->used)) oldest = &slot;
  }
  return oldest;
}

State::Slot& State::make_idle() {
  if (Slot* slot = idle()) return *slot;
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    if (slot.phase == Phase::kTaken || (oldest != nullptr && oldest->used <= slot.used)) continue;
    oldest = &slot;
  }
  TORCH_INTERNAL_ASSERT(oldest != nullptr);
  // A chunk in phase kReading was announced and read ahead, but the caller took other chunks instead.
  if (oldest->phase == Phase::kReading) await_read(*oldest);
  if (oldest->phase == Phase::kDirty) write(*oldest);
  while (oldest->phase == Phase::kFetching || oldest->phase == Phase::kWriting) await_write(*oldest);
  return *oldest;
}

// Waits for all transfers of a slot. If a transfer failed, sets the slot's phase to `failed` and rethrows the
// first error.
void State::wait_all(Slot& slot, Phase failed) {
  FirstError error;
  if (!is_in_file(slot)) {
    error.guard([copied = std::exchange(slot.copied, nullptr)] {
      if (copied != nullptr) copied->synchronize();
    });
  }
  for (const int64_t ticket : std::exchange(slot.tickets, {}))
    error.guard([&] { offload_->file->wait(ticket); });
  if (!error) return;
  slot.phase = failed;
  if (failed == Phase::kClean) slot.chunk = -1;
  error.rethrow();
}

void State::read(Slot& slot, int64_t chunk) {
  const int64_t begin = edges_[static_cast<size_t>(chunk)],
                blocks = edges_[static_cast<size_t>(chunk) + 1] - begin;
  slot.chunk = chunk;
  slot.phase = Phase::kReading;
  if (offload_->file == nullptr) {
    return copy(offload_->in, slot, slot.made, parts_of(slot.device, 0, blocks),
                parts_of(values_, begin, blocks));
  }
  const auto to = parts_of(slot.host, 0, blocks);
  for (size_t i = 0; i < to.size(); ++i) {
    const auto size = static_cast<int64_t>(to[i].nbytes());
    slot.tickets.push_back(offload_->file->read(file_offset(i, begin), to[i].mutable_data_ptr(), size));
  }
}

void State::await_read(Slot& slot) {
  if (offload_->file != nullptr) {
    wait_all(slot, Phase::kClean);
    if (!offload_->device.is_cpu()) copy(offload_->in, slot, slot.made, slot.device, slot.host);
  }
  if (const auto copied = std::exchange(slot.copied, nullptr))
    copied->block(current_stream(offload_->device));
  slot.phase = Phase::kReady;
}

// Starts writing a slot's chunk back. With a file and a GPU, the chunk is first copied to the host; a second
// call starts the write to the file.
void State::write(Slot& slot) {
  const int64_t begin = edges_[static_cast<size_t>(slot.chunk)];
  const int64_t blocks = edges_[static_cast<size_t>(slot.chunk) + 1] - begin;
  const bool in_file = offload_->file != nullptr;
  if (slot.phase == Phase::kDirty && !(in_file && offload_->device.is_cpu())) {
    copy(offload_->out, slot, Fence::now(offload_->device),
         in_file ? parts_of(slot.host, 0, blocks) : parts_of(values_, begin, blocks),
         parts_of(slot.device, 0, blocks));
    slot.phase = Phase::kFetching;
    return;
  }
  const auto from = parts_of(slot.host, 0, blocks);
  slot.phase = Phase::kWriting;
  for (size_t i = 0; i < from.size(); ++i) {
    const auto size = static_cast<int64_t>(from[i].nbytes());
    slot.tickets.push_back(offload_->file->write(file_offset(i, begin), from[i].const_data_ptr(), size));
  }
}

// Waits until a slot's write has ended. If the slot's copy to the host comes before a write to the file,
// waits for the copy only and starts the write.
void State::await_write(Slot& slot) {
  const bool fetched = slot.phase == Phase::kFetching && offload_->file != nullptr;
  wait_all(slot, Phase::kDirty);
  if (fetched) return write(slot);
  slot.phase = Phase::kClean;
}

void State::write_dirty(const Slot* but) {
  for (Slot& slot : slots_) {
    if (slot.phase == Phase::kDirty && &slot != but) write(slot);
  }
}

void State::read_ahead() {
  auto ahead = std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.phase == Phase::kReading || slot.phase == Phase::kReady;
  });
  for (; planned_ < plan_.size(); ++planned_) {
    const int64_t chunk = plan_[planned_];
    if (done(chunk) || find(chunk) != nullptr) continue;
    Slot* slot = ahead++ < kAhead ? idle() : nullptr;
    if (slot == nullptr) return;
    slot->used = ++clock_;
    read(*slot, chunk);
  }
}

// ---- steps

void State::start(std::vector<int64_t> chunks) {
  offload_->check();
  int64_t largest = 0;
  for (size_t i = 1; i < edges_.size(); ++i) largest = std::max(largest, edges_[i] - edges_[i - 1]);
  while (slots_.size() < std::min(kSlots, edges_.size() - 1)) {
    Slot& slot = slots_.emplace_back();
    for (size_t i = 0; i < values_.size(); ++i) {
      const int64_t size = largest * per_block_[i];
      const auto dtype = values_[i].scalar_type();
      if (offload_->file != nullptr) slot.host.push_back(offload_->memory.empty({size}, dtype));
      if (offload_->device.is_cpu()) {
        slot.device.push_back(offload_->file != nullptr ? slot.host.back()
                                                        : offload_->memory.empty({size}, dtype));
      } else {
        slot.device.push_back(at::empty({size}, at::TensorOptions().dtype(dtype).device(offload_->device)));
      }
    }
    slot.made = Fence::now(offload_->device);
  }
  plan_ = std::move(chunks);
  planned_ = 0;
  read_ahead();
}

std::vector<Tensor> State::take(int64_t chunk) {
  Slot* slot = find(chunk);
  write_dirty(slot);
  if (slot == nullptr) {
    slot = &make_idle();
    read(*slot, chunk);
  }
  slot->used = ++clock_;
  while (slot->phase == Phase::kFetching || slot->phase == Phase::kWriting) await_write(*slot);
  if (slot->phase == Phase::kReading) await_read(*slot);
  slot->phase = Phase::kTaken;
  read_ahead();
  return parts_of(slot->device, 0,
                  edges_[static_cast<size_t>(chunk) + 1] - edges_[static_cast<size_t>(chunk)]);
}

void State::put(int64_t chunk) {
  Slot* slot = find(chunk);
  TORCH_INTERNAL_ASSERT(slot != nullptr && slot->phase == Phase::kTaken);
  slot->phase = Phase::kDirty;
  done_.insert(chunk);
}

void State::finish() {
  if (slots_.empty()) return;
  offload_->check();
  FirstError error;
  write_dirty(nullptr);
  for (Slot& slot : slots_) {
    error.guard([&] {
      if (slot.phase == Phase::kReading) await_read(slot);
      while (slot.phase == Phase::kFetching || slot.phase == Phase::kWriting) await_write(slot);
    });
  }
  error.rethrow();
  slots_.clear();
}

}  // namespace shoestring::offload
