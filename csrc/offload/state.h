#pragma once

// Optimizer state in host memory or in a file, for a device that has no room for it. An optimizer step copies
// the state to the device and back in chunks, several of which are being copied at a time.

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <torch/custom_class.h>

#include "offload/copy_lane.h"
#include "offload/host_memory.h"
#include "offload/swap_file.h"

namespace shoestring::offload {

using at::Tensor;

/// The resources that all offloaded state of an optimizer on one device shares: host memory, the swap file,
/// and the copies to and from the device.
class SHOESTRING_API Offload : public torch::CustomClassHolder {
 public:
  /// `where` says where the state is: "cpu" or "stream" for host memory, "nvme:DIR" for a file in the folder
  /// DIR.
  Offload(std::string caller, const std::string& where, c10::Device device);
  /// Raises if it is called in a forked child of the process that created this object.
  void check() const { process.check(caller); }
  /// Reserves space in the swap file for `bytes` more bytes of state. Raises if the disk has no room. Has no
  /// effect without a swap file.
  void reserve(int64_t bytes) {
    if (file != nullptr) file->reserve(bytes);
  }

  const OwnProcess process;
  const std::string caller;
  const c10::Device device;
  HostMemory memory;
  std::shared_ptr<SwapFile> file;  // swap file; null if the state is in host memory
  CopyLane in, out;                // in: copies to the device; out: copies from the device
};

/// The offloaded state of some parameters of an optimizer. It consists of flat tensors called parts (codes,
/// scales, ...). Each part has a fixed number of elements per block of 256 parameter elements. An optimizer
/// step takes chunks of the state to the device, updates them, and puts them back. Not thread-safe.
class SHOESTRING_API State : public torch::CustomClassHolder {
 public:
  /// `per_block` is the number of elements per block in each part, `blocks` the number of blocks of each
  /// parameter. `splits` tells whether a chunk may end within a parameter.
  State(c10::intrusive_ptr<Offload> offload, const std::vector<at::ScalarType>& dtypes,
        std::vector<int64_t> per_block, const std::vector<int64_t>& blocks, bool splits);
  ~State() override;

  /// Returns the size in bytes that a State with the same arguments takes in the swap file.
  static int64_t bytes(const std::vector<at::ScalarType>& dtypes, const std::vector<int64_t>& per_block,
                       const std::vector<int64_t>& blocks, bool splits);

  /// Returns the blocks at which chunks begin and end, for `bytes` bytes of state per block.
  static std::vector<int64_t> edges(int64_t bytes, const std::vector<int64_t>& blocks, bool splits);

  /// begins() returns the first block of each parameter. total() returns the number of blocks, rounded up to
  /// a multiple of 1024.
  const std::vector<int64_t>& begins() const { return begins_; }
  int64_t total() const { return edges_.back(); }
  /// Returns the parts of the whole state, in host memory or in the mapped file. They are initially zero, and
  /// up to date after finish().
  const std::vector<Tensor>& values() const { return values_; }

  /// Returns the indices of the chunks that contain state of the parameters [first, last).
  std::vector<int64_t> chunks(int64_t first, int64_t last) const;
  /// The section of one chunk that belongs to the parameters [first, last). The section begins at block
  /// first_block of the first parameter, which is block `offset` of the chunk. It has `blocks` blocks.
  struct Piece {
    int64_t first, last, first_block, offset, blocks;
  };
  Piece piece(int64_t chunk, int64_t first, int64_t last) const;

  /// Announces the chunks that take() will ask for, in this order, so that they can be read ahead.
  void start(std::vector<int64_t> chunks);
  /// Returns the parts of a chunk on the device. The caller may write to them until it calls put().
  std::vector<Tensor> take(int64_t chunk);
  void put(int64_t chunk);
  /// Waits until all chunks given to put() are back in host memory or in the file. If a transfer fails,
  /// raises an error that names the file. No state is lost then: done() stays true for these chunks, and
  /// calling finish() again retries.
  void finish();
  /// Returns whether put() was called for the chunk since the last commit(). A step that is repeated after an
  /// error skips such chunks.
  bool done(int64_t chunk) const { return done_.count(chunk) > 0; }
  bool any_done() const { return !done_.empty(); }
  void commit() { done_.clear(); }
  /// Drops all slots, to end a step in which put() was not called for any chunk. Waits for running transfers
  /// and ignores their errors.
  void discard();

 private:
  enum class Phase { kClean, kReading, kReady, kTaken, kDirty, kFetching, kWriting };
  struct Slot {
    int64_t chunk = -1, used = 0;
    Phase phase = Phase::kClean;
    // The slot's buffers in host memory and on the device. `host` is used only with a swap file. On the CPU,
    // both are then the same tensors.
    std::vector<Tensor> host, device;
    std::vector<int64_t> tickets;  // tickets of the swap file's reads or writes that are in progress
    // made: fence for earlier work that uses the slot's device memory. copied: fence for the slot's last
    // copy.
    FencePtr made, copied;
  };

  Slot* find(int64_t chunk);
  Slot* idle();
  Slot& make_idle();
  void read(Slot& slot, int64_t chunk);
  void await_read(Slot& slot);
  void write(Slot& slot);
  void await_write(Slot& slot);
  void write_dirty(const Slot* but);
  void read_ahead();
  static void copy(CopyLane& lane, Slot& slot, FencePtr after, std::vector<Tensor> to,
                   std::vector<Tensor> from);
  bool is_in_file(const Slot& slot) const {
    return offload_->file != nullptr && slot.phase != Phase::kFetching;
  }
  bool is_over(const Slot& slot);
  void wait_all(Slot& slot, Phase failed);
  std::vector<Tensor> parts_of(const std::vector<Tensor>& whole, int64_t begin, int64_t blocks) const;
  int64_t file_offset(size_t part, int64_t block) const;
  int64_t chunk_of(int64_t block) const;

  const c10::intrusive_ptr<Offload> offload_;
  const std::vector<int64_t> per_block_;
  std::vector<int64_t> begins_, blocks_, edges_;
  std::vector<Tensor> values_;
  std::vector<int64_t> offsets_;  // offset in bytes of each part in the swap file
  std::vector<Slot> slots_;
  std::vector<int64_t> plan_;
  size_t planned_ = 0;
  int64_t clock_ = 0;
  std::set<int64_t> done_;
};

}  // namespace shoestring::offload
