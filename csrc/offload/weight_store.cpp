#include "offload/weight_store.h"

// Moves the weights of blocks between their device and host memory or a file.
//
// A block's storages lie one after the other in one piece of memory, which is the same in the file, in host
// memory and on the device. Storages of trained weights come first, so that they go back in one write.
//
// A table is a block of one weight (rows, columns), such as that of an embedding or of an output layer.
// Operators read it a few rows at a time. It is on the device as a whole only if its module runs.

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <utility>

#include <ATen/ceil_div.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include "core/device.h"
#include "core/row_source.h"
#include "offload/block_runs.h"
#include "offload/checksums.h"
#include "offload/copy_lane.h"
#include "offload/host_memory.h"
#include "offload/swap_file.h"

namespace shoestring::offload {
namespace {

constexpr const char* kOffloadWeights = "offload_weights";
constexpr int64_t kPage = SwapFile::kAlignment;
// Storages begin at multiples of this many bytes, as those of PyTorch's CUDA allocator do.
constexpr int64_t kAlignment = 512;
// Size of one read or write. Several are under way at a time, since one alone does not use a disk fully.
constexpr int64_t kPiece = int64_t{4} << 20;
// Bytes of weights that are copied at a time on their way to the file.
constexpr int64_t kStaging = 4 * kPiece;
// Rows of a table that embedding() reads at a time.
constexpr int64_t kRowsAtATime = 512;

at::Tensor bytes_at(void* memory, int64_t size, c10::Device device = c10::kCPU) {
  return at::from_blob(memory, {size}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

// One storage of a block, and its place in the memory of the block.
struct WeightPiece {
  c10::Storage storage;
  int64_t at, size;
};

struct WeightBlock {
  std::string name;
  std::vector<WeightPiece> pieces;
  int64_t size = 0, trained = 0;  // bytes of all storages, and of those of trained weights at the start
  int64_t row = 0;                // bytes of a row of a table; 0 for other blocks
  bool stays = false;             // whether the weights never leave
  at::Tensor home;                // the weights in host memory, unless there is a file
  int64_t at = -1;                // the offset of the weights in the file
  Checksums sums;                 // of the bytes in the file

  at::Tensor memory;   // on the device, from the start of a copy to it until the weights have left
  at::Tensor staging;  // host memory between file and device
  FencePtr in;         // the copy to `memory`
  bool here = false;   // whether the storages point into `memory`

  int64_t changed = 0;  // bytes from the start that differ from those away
  at::Tensor leaving;   // the former `memory`, while it is written
  FencePtr out;         // the write

  BlockUses uses;
};

struct WeightStoreCore final : RowSource, BlockRuns, std::enable_shared_from_this<WeightStoreCore> {
  WeightStoreCore(c10::Device on, const std::string& folder, int64_t keep)
      : device(on), keep(keep), host(kOffloadWeights, on), reading(on), in(on), out(on) {
    if (folder.empty()) return;
    file = std::make_unique<SwapFile>(kOffloadWeights, folder);
    if (!file->is_direct()) {
      TORCH_WARN(kOffloadWeights, ": ", folder,
                 ": this file system has no O_DIRECT, so weights also take room in the "
                 "page cache; a local disk is faster");
    }
  }

  using BlockRuns::mutex;

  WeightBlock& block(int64_t index) {
    process.check(kOffloadWeights);
    TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(blocks.size()), kOffloadWeights,
                ": block: expected one of ", blocks.size(), " blocks, received ", index);
    return *blocks[static_cast<size_t>(index)];
  }

  // Reads or writes the bytes of a block from `first` on, and returns when it is done. What is read must have
  // the checksums of what was written.
  void transfer(bool is_write, WeightBlock& b, int64_t first, const at::Tensor& memory) const {
    std::vector<SwapFile::Ticket> tickets;
    std::exception_ptr error;
    char* const begin = static_cast<char*>(memory.data_ptr());
    const int64_t size = memory.numel();
    for (int64_t i = 0; i < size; i += kPiece) {
      const int64_t count = std::min(kPiece, size - i), at = b.at + first + i;
      tickets.push_back(is_write ? file->write(at, begin + i, count) : file->read(at, begin + i, count));
    }
    if (is_write) {
      b.sums.for_each(first, first + size, [&](int64_t at, int64_t count, uint32_t& sum) {
        sum = checksum(begin + at - first, count);
      });
    }
    int64_t arrived = first;
    for (const auto ticket : tickets) {
      try {
        file->wait(ticket);
        if (is_write || error) continue;
        const int64_t end = std::min(arrived + kPiece, first + size);
        arrived = check_sums(b, arrived, end, begin - first);
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }

  // Checks whole units of [from, end) of a block whose bytes begin at `memory`, and returns where the first
  // one begins that has not arrived.
  int64_t check_sums(WeightBlock& b, int64_t from, int64_t end, const char* memory) const {
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

  void add(const std::string& name, const std::vector<at::Tensor>& frozen,
           const std::vector<at::Tensor>& trained) {
    auto b = std::make_unique<WeightBlock>();
    b->name = name;
    for (const auto* tensors : {&trained, &frozen}) {
      for (const at::Tensor& t : *tensors) {
        TORCH_CHECK(t.device() == device && t.has_storage(), kOffloadWeights, ": ", name,
                    ": expected weights with storages on ", device, ", received one on ", t.device());
        const auto size = static_cast<int64_t>(t.storage().nbytes());
        if (size == 0 || has(*b, t.storage())) continue;
        for (const auto& other : blocks) {
          TORCH_CHECK(!has(*other, t.storage()), kOffloadWeights, ": ", name,
                      ": expected weights of its own, received one "
                      "that ",
                      other->name, " has, too");
        }
        b->pieces.push_back({t.storage(), b->size, size});
        b->size = at::round_up(b->size + size, kAlignment);
      }
      b->size = at::round_up(b->size, kPage);
      if (tensors == &trained) b->trained = b->size;
    }
    if (b->size <= keep) {
      b->stays = true;
      keep -= b->size;
    } else {
      b->sums = Checksums(b->size, kPiece, b->trained);
      take_away(*b);
    }
    blocks.push_back(std::move(b));
  }

  void add_table(const std::string& name, const at::Tensor& weight) {
    TORCH_CHECK(weight.device() == device && weight.has_storage(), kOffloadWeights, ": ", name,
                ": expected a weight with a storage on ", device, ", received one on ", weight.device());
    const auto size = static_cast<int64_t>(weight.storage().nbytes());
    TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.storage_offset() == 0 && size > 0 &&
                    size == static_cast<int64_t>(weight.nbytes()),
                kOffloadWeights, ": ", name,
                ": expected a contiguous weight (rows, columns) with a storage of its own, received ",
                weight.sizes(), " in a storage of ", size, " bytes");
    for (const auto& other : blocks) {
      TORCH_CHECK(!has(*other, weight.storage()), kOffloadWeights, ": ", name,
                  ": expected a weight of its own, received one that ", other->name, " has, too");
    }
    auto b = std::make_unique<WeightBlock>();
    b->name = name;
    b->pieces.push_back({weight.storage(), 0, size});
    b->size = at::round_up(size, kPage);
    b->row = size / weight.size(0);
    b->sums = Checksums(size, b->row);
    take_away(*b);
    blocks.push_back(std::move(b));
  }

  WeightBlock& table_of(const at::Tensor& weight) {
    process.check(kOffloadWeights);
    for (const auto& b : blocks) {
      if (b->row != 0 && has(*b, weight.storage())) return *b;
    }
    TORCH_CHECK(false, kOffloadWeights, ": table: expected the weight of a table, received one of ",
                weight.sizes());
  }

  // Rows of a table on their way to the device.
  struct Arrival {
    at::Tensor rows;     // on the device, as bytes
    at::Tensor staging;  // host memory between file and device
    FencePtr in;
  };

  Arrival start_rows(WeightBlock& b, int64_t first, int64_t count) {
    const int64_t begin = first * b.row, end = begin + count * b.row;
    Arrival a;
    at::Tensor from = b.home;
    std::vector<FencePtr> after;
    if (file) {
      const int64_t page = begin / kPage * kPage;
      a.staging = host.empty({at::round_up(end, kPage) - page}, at::kByte);
      after.push_back(
          a.in = reading.run({}, [this, &b, page, to = a.staging] { transfer(false, b, page, to); }));
      from = a.staging.narrow(0, begin - page, end - begin);
    } else {
      from = b.home.narrow(0, begin, end - begin);
    }
    fetched += end - begin;
    if (device.is_cpu()) {
      a.rows = from;
      return a;
    }
    a.rows = at::empty({end - begin}, at::TensorOptions().dtype(at::kByte).device(device));
    after.push_back(Fence::now(device));  // the memory may still be in use in the current stream
    a.in = in.run(std::move(after), [from, to = a.rows] { to.copy_(from, /*non_blocking=*/true); });
    return a;
  }

  void for_each(const at::Tensor& weight, int64_t step, const Body& body) override {
    const at::NoGradGuard no_grad;
    const c10::OptionalDeviceGuard guard(device);
    std::unique_lock lock(mutex);
    WeightBlock& b = table_of(weight);
    if (b.leaving.defined()) settle();
    const int64_t rows = weight.size(0);
    const auto count_from = [&](int64_t first) {
      const int64_t left = rows - first;
      return left < step + kLeast ? left : step;
    };
    Arrival now, next = start_rows(b, 0, count_from(0));
    try {
      for (int64_t first = 0; first < rows;) {
        now = std::exchange(next, {});
        const int64_t count = count_from(first), then = first + count;
        if (then < rows) next = start_rows(b, then, count_from(then));
        lock.unlock();
        now.in->block(current_stream(device));
        body(first, now.rows.view(weight.scalar_type()).view({count, weight.size(1)}));
        lock.lock();
        end_rows(now);
        first = then;
      }
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      end_rows(now);
      end_rows(next);
      throw;
    }
  }

  // Lets memory of rows be reused as soon as no copy needs it.
  void end_rows(Arrival& a) {
    if (a.in == nullptr) return;
    try {
      a.in->block(current_stream(device));
    } catch (...) {  // the caller has had the error, or does not need these rows
    }
    if (a.staging.defined()) retired.emplace_back(std::move(a.staging), a.in);
    a = {};
    release_retired();
  }

  at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices) {
    if (row_source_of(weight) == nullptr) return at::embedding(weight, indices);
    const at::NoGradGuard no_grad;
    WeightBlock* b = nullptr;
    {
      const std::lock_guard lock(mutex);
      b = &table_of(weight);
      if (b->leaving.defined()) settle();
    }
    const at::Tensor places = indices.to(c10::kCPU, at::kLong).contiguous();
    const auto* place = places.const_data_ptr<int64_t>();
    const int64_t count = places.numel();
    for (int64_t i = 0; i < count; ++i) {
      TORCH_CHECK_INDEX(place[i] >= 0 && place[i] < weight.size(0), kOffloadWeights, ": ", b->name,
                        ": expected indices in [0, ", weight.size(0), "), received ", place[i]);
    }
    const at::Tensor out = at::empty({count * b->row}, at::kByte);
    auto* const to = out.mutable_data_ptr<uint8_t>();
    if (file) {
      read_rows(*b, place, count, to);
    } else {
      const auto* from = b->home.const_data_ptr<uint8_t>();
      for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * b->row, from + place[i] * b->row, b->row);
    }
    auto shape = indices.sizes().vec();
    shape.push_back(weight.size(1));
    return out.view(weight.scalar_type()).view(shape).to(device);
  }

  // Reads rows of a table from the file, many at a time, each with the pages around it.
  void read_rows(WeightBlock& b, const int64_t* place, int64_t count, uint8_t* to) {
    const int64_t slot = at::round_up(b.row, kPage) + kPage;
    const at::Tensor pages = host.empty({std::min(count, kRowsAtATime) * slot}, at::kByte);
    auto* const memory = pages.mutable_data_ptr<uint8_t>();
    for (int64_t begin = 0; begin < count; begin += kRowsAtATime) {
      const int64_t some = std::min(kRowsAtATime, count - begin);
      std::vector<SwapFile::Ticket> tickets;
      for (int64_t i = 0; i < some; ++i) {
        const int64_t at = place[begin + i] * b.row, page = at / kPage * kPage;
        tickets.push_back(file->read(b.at + page, memory + i * slot, at::round_up(at + b.row, kPage) - page));
      }
      std::exception_ptr error;
      for (int64_t i = 0; i < some; ++i) {
        const int64_t at = place[begin + i] * b.row;
        const uint8_t* const row = memory + i * slot + at % kPage;
        try {
          file->wait(tickets[static_cast<size_t>(i)]);
          if (!error) check_sums(b, at, at + b.row, reinterpret_cast<const char*>(row) - at);
        } catch (...) {
          error = std::current_exception();
        }
        std::memcpy(to + (begin + i) * b.row, row, static_cast<size_t>(b.row));
      }
      if (error) std::rethrow_exception(error);
      const std::lock_guard lock(mutex);
      fetched += some * b.row;
    }
  }

  static bool has(const WeightBlock& b, const c10::Storage& storage) {
    return std::any_of(b.pieces.begin(), b.pieces.end(), [&](const WeightPiece& p) {
      return p.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
    });
  }

  void take_away(WeightBlock& b) {
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
  void gather(const WeightBlock& b, int64_t first, const at::Tensor& to) const {
    const int64_t last = first + to.numel();
    for (const WeightPiece& p : b.pieces) {
      const int64_t begin = std::max(first, p.at), end = std::min(last, p.at + p.size);
      if (begin >= end) continue;
      auto* const from = static_cast<char*>(p.storage.unsafeGetStorageImpl()->mutable_data());
      to.narrow(0, begin - first, end - begin).copy_(bytes_at(from + begin - p.at, end - begin, device));
    }
  }

  // Writes a block to the file. The parts begin where units of the checksums do.
  void write_all(WeightBlock& b) {
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
  void place(WeightBlock& b, const at::Tensor* memory) {
    for (const WeightPiece& p : b.pieces) {
      auto& storage = *p.storage.unsafeGetStorageImpl();
      if (memory != nullptr) {
        place_storage(storage, static_cast<char*>(memory->data_ptr()) + p.at, *memory);
        continue;
      }
      empty_storage(storage,
                    c10::str(kOffloadWeights, ": ", b.name, ": expected weights on ", device,
                             ", received some that are ", file ? "in a file" : "in host memory",
                             ": read or change them within present()"),
                    b.row != 0 ? pointer_to_source(weak_from_this(), device) : at::DataPtr(nullptr, device));
    }
    b.here = memory != nullptr;
  }

  // Starts to bring a block's weights, after all blocks that nobody uses have begun to leave.
  void begin_in(WeightBlock& b) {
    const at::NoGradGuard no_grad;
    const c10::OptionalDeviceGuard guard(device);
    for (const auto& other : blocks) {
      if (other.get() != &b && other->uses.none()) evict(*other);
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
      b.in = reading.run({}, [this, &b, to = b.memory] { transfer(false, b, 0, to); });
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
    fetched += b.size;
  }

  BlockUses& uses_of(int64_t index) override { return block(index).uses; }
  int64_t count() const override { return static_cast<int64_t>(blocks.size()); }
  std::weak_ptr<BlockRuns> self() override { return weak_from_this(); }
  void fetch(int64_t index) override { fetch(block(index)); }

  void fetch(WeightBlock& b) {
    if (b.stays || b.here) return;
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
  void prefetch(int64_t index, int64_t direction) override {
    while (index >= 0 && index < count() && blocks[static_cast<size_t>(index)]->row != 0) index += direction;
    if (index < 0 || index >= count()) return;
    WeightBlock& b = block(index);
    if (!b.stays && !b.memory.defined()) begin_in(b);
  }

  // Takes a block's memory on the device away, after a copy to it has ended.
  void forget(WeightBlock& b) {
    try {
      if (b.in) b.in->block(current_stream(device));
    } catch (...) {
    }
    if (b.here) place(b, nullptr);
    if (b.staging.defined()) retired.emplace_back(std::move(b.staging), b.in);
    b.memory = b.staging = at::Tensor();
    b.in = nullptr;
    if (b.row != 0) host.trim();  // a table may be far larger than a block
  }

  // Lets a block's weights leave the device. Changed weights are written meanwhile; one block at a time.
  void evict(WeightBlock& b) {
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
  void settle() {
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

  void release_retired() {
    std::erase_if(retired, [](const auto& r) { return r.second == nullptr || r.second->is_done(); });
  }

  // Returns the index of the last block that is no table, or -1.
  int64_t last_block() const override {
    auto last = static_cast<int64_t>(blocks.size()) - 1;
    while (last >= 0 && blocks[static_cast<size_t>(last)]->row != 0) --last;
    return last;
  }

  void ended(int64_t index) override {
    WeightBlock& b = block(index);
    b.changed = std::max(b.changed, b.trained);
  }

  const OwnProcess process;
  const c10::Device device;
  int64_t keep, fetched = 0, written = 0;
  std::vector<std::unique_ptr<WeightBlock>> blocks;
  WeightBlock* leaves = nullptr;                         // the block whose changed weights are being written
  std::vector<std::pair<at::Tensor, FencePtr>> retired;  // host memory that a copy may still read
  HostMemory host;
  std::unique_ptr<SwapFile> file;
  // C++ destroys these members first, and each destructor waits for its copies.
  CopyLane reading, in, out;
};

WeightStore::WeightStore(c10::Device device, const std::string& folder, int64_t keep) {
  device = with_index(device);
  TORCH_CHECK(!folder.empty() || !device.is_cpu(), kOffloadWeights,
              ": to: expected nvme:DIR for weights on the CPU, received "
              "cpu: they are in host memory already");
  TORCH_CHECK(keep >= 0, kOffloadWeights, ": keep: expected a number of bytes of at least 0, received ",
              keep);
  core_ = std::make_shared<WeightStoreCore>(device, folder, keep);
}

WeightStore::~WeightStore() = default;

int64_t WeightStore::add(const std::string& name, const std::vector<at::Tensor>& frozen,
                         const std::vector<at::Tensor>& trained) {
  core_->process.check(kOffloadWeights);
  const std::lock_guard lock(core_->mutex);
  core_->add(name, frozen, trained);
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

void WeightStore::enter(int64_t index, const std::vector<at::Tensor>& inputs) { core_->enter(index, inputs); }

void WeightStore::leave(int64_t index, const std::vector<at::Tensor>& outputs) {
  core_->leave(index, outputs);
}

void WeightStore::open(int64_t index) {
  const std::lock_guard lock(core_->mutex);
  WeightBlock& b = core_->block(index);
  core_->fetch(b);
  ++b.uses.count;
}

void WeightStore::close(int64_t index, bool changed) {
  const std::lock_guard lock(core_->mutex);
  WeightBlock& b = core_->block(index);
  b.uses.count = std::max(0, b.uses.count - 1);
  if (changed) b.changed = b.size;
}

void WeightStore::restore() {
  const std::lock_guard lock(core_->mutex);
  core_->process.check(kOffloadWeights);
  core_->settle();
  for (const auto& b : core_->blocks) {
    ++b->uses.count;  // the next fetch must not evict the block
    core_->fetch(*b);
  }
  core_->blocks.clear();
}

c10::Dict<std::string, int64_t> WeightStore::statistics() const {
  const std::lock_guard lock(core_->mutex);
  core_->process.check(kOffloadWeights);
  int64_t away = 0, on_device = 0;
  for (const auto& b : core_->blocks) {
    if (!b->stays) away += b->size;
    if (b->memory.defined() || b->leaving.defined()) on_device += b->size;
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
  library.class_<WeightStore>("WeightStore")
      .def(torch::init<c10::Device, std::string, int64_t>())
      .def("add", &WeightStore::add)
      .def("add_table", &WeightStore::add_table)
      .def("embedding", &WeightStore::embedding)
      .def("enter", &WeightStore::enter)
      .def("leave", &WeightStore::leave)
      .def("open", &WeightStore::open)
      .def("close", &WeightStore::close)
      .def("restore", &WeightStore::restore)
      .def("statistics", &WeightStore::statistics);
}

}  // namespace shoestring::offload
