#pragma once

// An optimizer's state where its device has no room for it, and how it comes to the device for a step and
// goes back: in chunks, several of them under way.

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

/// What the arenas of an optimizer on one device share: host memory, the file, and the way to the device.
class SHOESTRING_API Offload : public torch::CustomClassHolder {
 public:
  /// where: "cpu" or "stream" (state in host memory), or "nvme:DIR" (in a file in the folder DIR).
  Offload(std::string caller, const std::string& where, c10::Device device);
  /// Raises in a forked child.
  void check() const { process.check(caller); }
  /// Makes room in the file for so many more bytes of state. Raises where the disk has none; does nothing
  /// without a file.
  void reserve(int64_t bytes) {
    if (file != nullptr) file->reserve(bytes);
  }

  const OwnProcess process;
  const std::string caller;
  const c10::Device device;
  HostMemory memory;
  std::unique_ptr<SwapFile> file;  // null: in host memory
  CopyLane in, out;                // to the device, and from it
};

/// The state of an arena: parts (codes, scales, ...), each of them flat and of so many elements for each
/// block of 256 elements of the parameters. Chunks are taken to the device, stepped there, and put back. By
/// one thread at a time.
class SHOESTRING_API State : public torch::CustomClassHolder {
 public:
  /// blocks: of each parameter. splits: whether a chunk may end within a parameter.
  State(c10::intrusive_ptr<Offload> offload, const std::vector<at::ScalarType>& dtypes,
        std::vector<int64_t> per_block, const std::vector<int64_t>& blocks, bool splits);
  ~State() override;

  /// The bytes of such a state in the file.
  static int64_t bytes(const std::vector<at::ScalarType>& dtypes, const std::vector<int64_t>& per_block,
                       const std::vector<int64_t>& blocks, bool splits);

  /// In blocks, of each parameter, and where the last one ends, rounded up.
  const std::vector<int64_t>& begins() const { return begins_; }
  int64_t total() const { return edges_.back(); }
  /// The whole parts, zeros at first: host memory, or the file's, mapped. Up to date after finish().
  const std::vector<Tensor>& values() const { return values_; }

  /// The chunks that parameters [first, last) lie in.
  std::vector<int64_t> chunks(int64_t first, int64_t last) const;
  /// Of parameters [first, last), those in a chunk: the first and behind the last, the first one's block at
  /// which they begin there, where in the chunk that is, and how many blocks there are.
  struct Piece {
    int64_t first, last, first_block, offset, blocks;
  };
  Piece piece(int64_t chunk, int64_t first, int64_t last) const;

  /// What is going to be taken, in this order, so that it can be read ahead.
  void start(std::vector<int64_t> chunks);
  /// A chunk's parts on the device, which may be written to until put().
  std::vector<Tensor> take(int64_t chunk);
  void put(int64_t chunk);
  /// All that was put is back where it lies. An error that names the file where something could not be read
  /// or written: nothing is lost, chunks that were put stay done(), and calling it again tries again.
  void finish();
  /// Has been put since the last commit(): a step that is repeated after an error leaves it out.
  bool done(int64_t chunk) const { return done_.count(chunk) > 0; }
  bool any_done() const { return !done_.empty(); }
  void commit() { done_.clear(); }
  /// Ends a step in which nothing has been put, whatever happens to the transfers under way.
  void discard();

 private:
  enum class Phase { kClean, kReading, kReady, kTaken, kDirty, kFetching, kWriting };
  struct Slot {
    int64_t chunk = -1, used = 0;
    Phase phase = Phase::kClean;
    std::vector<Tensor> host, device;  // the same tensors where the device is the CPU; host alone with a file
    std::vector<int64_t> tickets;      // of the file
    FencePtr made, copied;             // what used the device's memory before is over; the last copy is
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
  std::vector<int64_t> offsets_;  // of the parts, in the file
  std::vector<Slot> slots_;
  std::vector<int64_t> plan_;
  size_t planned_ = 0;
  int64_t clock_ = 0;
  std::set<int64_t> done_;
};

}  // namespace shoestring::offload
