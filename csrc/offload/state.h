#pragma once

// Optimizer state in host memory or in a file, for a device that has no room for it. A step copies the state
// to the device and back in chunks, several of them in flight.

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

/// The resources that the arenas of an optimizer on one device share: host memory, the swap file, and the
/// copies to and from the device.
class SHOESTRING_API Offload : public torch::CustomClassHolder {
 public:
  /// where: "cpu" or "stream" (state in host memory), or "nvme:DIR" (in a file in the folder DIR).
  Offload(std::string caller, const std::string& where, c10::Device device);
  /// Raises in a forked child.
  void check() const { process.check(caller); }
  /// Reserves space in the file for `bytes` more bytes of state. Raises if the disk has no room. Has no
  /// effect without a file.
  void reserve(int64_t bytes) {
    if (file != nullptr) file->reserve(bytes);
  }

  const OwnProcess process;
  const std::string caller;
  const c10::Device device;
  HostMemory memory;
  std::unique_ptr<SwapFile> file;  // null if the state is in host memory
  CopyLane in, out;                // copies to the device, and from it
};

/// The state of an arena. It consists of flat parts (codes, scales, ...), each with a fixed number of
/// elements per block of 256 parameter elements. A step takes chunks to the device, updates them, and puts
/// them back. Not thread-safe.
class SHOESTRING_API State : public torch::CustomClassHolder {
 public:
  /// blocks: number of blocks of each parameter. splits: whether a chunk may end within a parameter.
  State(c10::intrusive_ptr<Offload> offload, const std::vector<at::ScalarType>& dtypes,
        std::vector<int64_t> per_block, const std::vector<int64_t>& blocks, bool splits);
  ~State() override;

  /// Returns the size in bytes of such a state in the file.
  static int64_t bytes(const std::vector<at::ScalarType>& dtypes, const std::vector<int64_t>& per_block,
                       const std::vector<int64_t>& blocks, bool splits);

  /// begins() returns the first block of each parameter; total() returns the block after the last one,
  /// rounded up.
  const std::vector<int64_t>& begins() const { return begins_; }
  int64_t total() const { return edges_.back(); }
  /// Returns the whole parts, initially zero, in host memory or in the mapped file. Up to date after
  /// finish().
  const std::vector<Tensor>& values() const { return values_; }

  /// Returns the chunks that contain parameters [first, last).
  std::vector<int64_t> chunks(int64_t first, int64_t last) const;
  /// The part of some parameters that is in one chunk. [first, last) are these parameters. The part begins at
  /// block first_block of the first parameter, at block `offset` of the chunk, and has `blocks` blocks.
  struct Piece {
    int64_t first, last, first_block, offset, blocks;
  };
  Piece piece(int64_t chunk, int64_t first, int64_t last) const;

  /// Announces the chunks that will be taken, in this order, so that they can be read ahead.
  void start(std::vector<int64_t> chunks);
  /// Returns the parts of a chunk on the device. The caller may write to them until put().
  std::vector<Tensor> take(int64_t chunk);
  void put(int64_t chunk);
  /// Waits until all chunks that were put are back in host memory or in the file. If a transfer fails, raises
  /// an error that names the file. Nothing is lost then: chunks that were put stay done(), and calling
  /// finish() again retries.
  void finish();
  /// Returns whether the chunk has been put since the last commit(). A step that is repeated after an error
  /// skips such chunks.
  bool done(int64_t chunk) const { return done_.count(chunk) > 0; }
  bool any_done() const { return !done_.empty(); }
  void commit() { done_.clear(); }
  /// Ends a step in which no chunk has been put. Errors of transfers in flight are ignored.
  void discard();

 private:
  enum class Phase { kClean, kReading, kReady, kTaken, kDirty, kFetching, kWriting };
  struct Slot {
    int64_t chunk = -1, used = 0;
    Phase phase = Phase::kClean;
    // Equal if the device is the CPU and there is a file. `host` is used only with a file.
    std::vector<Tensor> host, device;
    std::vector<int64_t> tickets;  // tickets of transfers between host memory and the file
    // Signals that earlier users of the device memory are done; signals the end of the last copy.
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
  std::vector<int64_t> offsets_;  // offsets of the parts in the file, in bytes
  std::vector<Slot> slots_;
  std::vector<int64_t> plan_;
  size_t planned_ = 0;
  int64_t clock_ = 0;
  std::set<int64_t> done_;
};

}  // namespace shoestring::offload
