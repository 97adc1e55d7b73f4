#include "offload/state.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

namespace shoestring::offload {
namespace {

// Chunks begin at multiples of this many blocks: then every part of one, if only four bytes a block, is whole pages.
constexpr int64_t kEdge = 1024;
// Of a chunk: parts of a few MiB, which is what a disk needs to be fast, and few enough for the caches' second half.
constexpr int64_t kChunkBytes = int64_t{8} << 20;
// One that is stepped, two that are read, and one that is written.
constexpr size_t kSlots = 4;

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A part of the file as memory.
struct Region {
  c10::intrusive_ptr<Offload> offload;
  int64_t offset, size;
  void* memory;

  ~Region() {
    ::munmap(memory, static_cast<size_t>(size));
    offload->file->free(offset, size);
  }
};

std::shared_ptr<Region> map(const c10::intrusive_ptr<Offload>& offload, int64_t size) {
  SwapFile& file = *offload->file;
  const int64_t before = file.size(), offset = file.allocate(size);
  void* memory = ::mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor(), offset);
  if (memory == MAP_FAILED) file.free(offset, size);
  TORCH_CHECK(memory != MAP_FAILED, offload->caller, ": ", file.path(), ": cannot map ", size,
              " bytes: ", std::strerror(errno));
  if (offset < before) std::memset(memory, 0, static_cast<size_t>(size));  // used before; new space is zeros
  return std::shared_ptr<Region>(new Region{offload, offset, size, memory});
}

}  // namespace

Offload::Offload(std::string caller, const std::string& where, c10::Device device)
    : caller(std::move(caller)), device(device), memory(this->caller, device), copies(device) {
  constexpr const char* kDisk = "nvme:";
  const bool disk = where.rfind(kDisk, 0) == 0 && where.size() > std::strlen(kDisk);
  TORCH_CHECK_VALUE(disk || where == "stream", this->caller, ": expected None, \"stream\" or \"nvme:DIR\", received \"",
                    where, "\"");
  if (disk) file = std::make_unique<SwapFile>(this->caller, where.substr(std::strlen(kDisk)));
}

State::State(c10::intrusive_ptr<Offload> offload, const std::vector<at::ScalarType>& dtypes,
             std::vector<int64_t> per_block, const std::vector<int64_t>& blocks, bool splits)
    : offload_(std::move(offload)), per_block_(std::move(per_block)), blocks_(blocks), edges_{0} {
  int64_t bytes = 0, total = 0;
  for (size_t i = 0; i < dtypes.size(); ++i) bytes += per_block_[i] * static_cast<int64_t>(c10::elementSize(dtypes[i]));
  const int64_t most = up(std::max<int64_t>(kChunkBytes / std::max<int64_t>(bytes, 1), 1), kEdge);
  for (const int64_t n : blocks_) {
    if (!splits && n > 0 && total > edges_.back() && total + n > edges_.back() + most) {
      total = up(total, kEdge);
      edges_.push_back(total);
    }
    begins_.push_back(total);
    total += n;
    if (splits) {
      while (total > edges_.back() + most) edges_.push_back(edges_.back() + most);
    }
  }
  total = std::max(up(total, kEdge), kEdge);
  if (total > edges_.back()) edges_.push_back(total);

  int64_t offset = 0;
  std::shared_ptr<Region> region;
  if (offload_->file != nullptr && bytes > 0) {
    region = map(offload_, total * bytes);
    offset = region->offset;
  }
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const int64_t elements = total * per_block_[i];
    if (region == nullptr) {
      values_.push_back(offload_->memory.empty({elements}, dtypes[i], total * bytes).zero_());
      continue;
    }
    void* begin = static_cast<char*>(region->memory) + (offset - region->offset);
    values_.push_back(at::from_blob(begin, {elements}, [region](void*) {}, at::TensorOptions().dtype(dtypes[i])));
    offsets_.push_back(offset);
    offset += static_cast<int64_t>(values_.back().nbytes());
  }
}

// Buffers must not be freed below a transfer.
State::~State() {
  for (Slot& slot : slots_) {
    try {
      wait_all(slot, Phase::kClean);
    } catch (const std::exception&) {  // nobody is left who would step with it
    }
  }
}

std::vector<int64_t> State::chunks(int64_t first, int64_t last) const {
  std::vector<int64_t> found;
  for (int64_t i = first; i < last; ++i) {
    const int64_t end = begins_[static_cast<size_t>(i)] + blocks_[static_cast<size_t>(i)];
    int64_t chunk = chunk_of(begins_[static_cast<size_t>(i)]);
    do {
      if (found.empty() || found.back() < chunk) found.push_back(chunk);
    } while (edges_[static_cast<size_t>(++chunk)] < end);
  }
  return found;
}

// That of a block, or of a parameter without any that begins there.
int64_t State::chunk_of(int64_t block) const {
  const auto after = std::upper_bound(edges_.begin() + 1, edges_.end() - 1, block);
  return after - edges_.begin() - 1;
}

State::Piece State::piece(int64_t chunk, int64_t first, int64_t last) const {
  const int64_t begin = edges_[static_cast<size_t>(chunk)], end = edges_[static_cast<size_t>(chunk) + 1];
  const auto begin_of = [&](int64_t i) { return begins_[static_cast<size_t>(i)]; };
  const auto end_of = [&](int64_t i) { return begin_of(i) + blocks_[static_cast<size_t>(i)]; };
  // A parameter without elements is stepped as well: it is counted.
  const auto is_in = [&](int64_t i) { return chunk_of(begin_of(i)) <= chunk && (end_of(i) > begin || begin_of(i) == begin); };
  while (first < last && !is_in(first)) ++first;
  while (last > first && chunk_of(begin_of(last - 1)) > chunk) --last;
  if (first == last) return {first, last, 0, 0, 0};
  const int64_t from = std::max(begin, begin_of(first)), to = std::min(end, end_of(last - 1));
  return {first, last, from - begin_of(first), from - begin, std::max<int64_t>(to - from, 0)};
}

std::vector<Tensor> State::parts_of(const std::vector<Tensor>& whole, int64_t begin, int64_t blocks) const {
  std::vector<Tensor> parts;
  for (size_t i = 0; i < whole.size(); ++i) {
    parts.push_back(whole[i].narrow(0, begin * per_block_[i], blocks * per_block_[i]));
  }
  return parts;
}

int64_t State::file_offset(size_t part, int64_t block) const {
  return offsets_[part] + block * per_block_[part] * static_cast<int64_t>(values_[part].element_size());
}

// ---- slots --------------------------------------------------------------------------------------------------------

State::Slot* State::find(int64_t chunk) {
  const auto found = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.chunk == chunk; });
  return found == slots_.end() ? nullptr : &*found;
}

bool State::is_over(const Slot& slot) {
  return std::all_of(slot.tickets.begin(), slot.tickets.end(), [&](int64_t ticket) {
    const bool in_file = offload_->file != nullptr && slot.phase != Phase::kFetching;
    return in_file ? offload_->file->is_finished(ticket) : offload_->copies.is_finished(ticket);
  });
}

// The slot that has been of no use for longest; null where all are needed.
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
  if (oldest->phase == Phase::kReading) await_read(*oldest);  // read ahead, and not taken: the plan has changed
  if (oldest->phase == Phase::kDirty) write(*oldest);
  while (oldest->phase == Phase::kFetching || oldest->phase == Phase::kWriting) await_write(*oldest);
  return *oldest;
}

// Waits for a slot's transfers; where one has failed, all are over nevertheless, and the slot is as `failed` says.
void State::wait_all(Slot& slot, Phase failed) {
  const bool in_file = offload_->file != nullptr && slot.phase != Phase::kFetching;
  std::exception_ptr error;
  for (const int64_t ticket : std::exchange(slot.tickets, {})) {
    try {
      in_file ? offload_->file->wait(ticket) : offload_->copies.wait(ticket);
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
  }
  if (error == nullptr) return;
  slot.phase = failed;
  if (failed == Phase::kClean) slot.chunk = -1;
  std::rethrow_exception(error);
}

void State::read(Slot& slot, int64_t chunk) {
  const int64_t begin = edges_[static_cast<size_t>(chunk)], blocks = edges_[static_cast<size_t>(chunk) + 1] - begin;
  slot.chunk = chunk;
  slot.phase = Phase::kReading;
  if (offload_->file == nullptr) {
    const auto to = parts_of(slot.device, 0, blocks), from = parts_of(values_, begin, blocks);
    std::vector<Copies::Copy> copies;
    for (size_t i = 0; i < to.size(); ++i) copies.push_back({to[i], from[i]});
    slot.tickets = {offload_->copies.send(std::move(copies))};
    return;
  }
  const auto to = parts_of(slot.host, 0, blocks);
  for (size_t i = 0; i < to.size(); ++i) {
    const auto size = static_cast<int64_t>(to[i].nbytes());
    slot.tickets.push_back(offload_->file->read(file_offset(i, begin), to[i].mutable_data_ptr(), size));
  }
}

void State::await_read(Slot& slot) {
  if (offload_->file == nullptr) {
    for (const int64_t ticket : std::exchange(slot.tickets, {})) offload_->copies.receive(ticket);
  } else {
    wait_all(slot, Phase::kClean);
    if (!offload_->device.is_cpu()) {
      std::vector<Copies::Copy> copies;
      for (size_t i = 0; i < slot.host.size(); ++i) copies.push_back({slot.device[i], slot.host[i]});
      offload_->copies.receive(offload_->copies.send(std::move(copies)));
    }
  }
  slot.phase = Phase::kReady;
}

// A file's writes on behalf of a GPU begin once its copy has come.
void State::write(Slot& slot) {
  const int64_t begin = edges_[static_cast<size_t>(slot.chunk)];
  const int64_t blocks = edges_[static_cast<size_t>(slot.chunk) + 1] - begin;
  const bool in_file = offload_->file != nullptr;
  if (slot.phase == Phase::kDirty && !(in_file && offload_->device.is_cpu())) {
    const auto from = parts_of(slot.device, 0, blocks);
    const auto to = in_file ? parts_of(slot.host, 0, blocks) : parts_of(values_, begin, blocks);
    std::vector<Copies::Copy> copies;
    for (size_t i = 0; i < to.size(); ++i) copies.push_back({to[i], from[i]});
    slot.tickets = {offload_->copies.fetch(std::move(copies))};
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

// Or for the copy alone, where a write follows.
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
  for (; planned_ < plan_.size(); ++planned_) {
    const int64_t chunk = plan_[planned_];
    if (done(chunk) || find(chunk) != nullptr) continue;
    Slot* slot = idle();
    if (slot == nullptr) return;
    slot->used = ++clock_;
    read(*slot, chunk);
  }
}

// ---- steps --------------------------------------------------------------------------------------------------------

void State::start(std::vector<int64_t> chunks) {
  int64_t largest = 0;
  for (size_t i = 1; i < edges_.size(); ++i) largest = std::max(largest, edges_[i] - edges_[i - 1]);
  while (slots_.size() < std::min(kSlots, edges_.size() - 1)) {
    Slot& slot = slots_.emplace_back();
    for (size_t i = 0; i < values_.size(); ++i) {
      const int64_t size = largest * per_block_[i];
      const auto dtype = values_[i].scalar_type();
      if (offload_->file != nullptr) slot.host.push_back(offload_->memory.empty({size}, dtype));
      if (offload_->device.is_cpu()) {
        slot.device.push_back(offload_->file != nullptr ? slot.host.back() : offload_->memory.empty({size}, dtype));
      } else {
        slot.device.push_back(at::empty({size}, at::TensorOptions().dtype(dtype).device(offload_->device)));
      }
    }
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
  return parts_of(slot->device, 0, edges_[static_cast<size_t>(chunk) + 1] - edges_[static_cast<size_t>(chunk)]);
}

void State::put(int64_t chunk) {
  Slot* slot = find(chunk);
  TORCH_INTERNAL_ASSERT(slot != nullptr && slot->phase == Phase::kTaken);
  slot->phase = Phase::kDirty;
  done_.insert(chunk);
}

void State::finish() {
  std::exception_ptr error;
  const auto guarded = [&](auto&& what) {
    try {
      what();
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
  };
  write_dirty(nullptr);
  for (Slot& slot : slots_) {
    guarded([&] {
      if (slot.phase == Phase::kReading) await_read(slot);
      while (slot.phase == Phase::kFetching || slot.phase == Phase::kWriting) await_write(slot);
    });
  }
  if (error != nullptr) std::rethrow_exception(error);
  slots_.clear();
}

}  // namespace shoestring::offload
