#pragma once

// Moves the weights of blocks between their device and host memory or a file: the blocks (weight_core.cpp),
// weights that operators read a few rows at a time (weight_tables.cpp), and stacks of matrices of which they
// read some (weight_stacks.cpp).

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core/row_source.h"
#include "offload/block_runs.h"
#include "offload/checksums.h"
#include "offload/copy_lane.h"
#include "offload/host_memory.h"
#include "offload/own_process.h"
#include "offload/swap_file.h"

namespace shoestring::offload {

constexpr const char* kOffloadWeights = "offload_weights";
constexpr int64_t kPage = SwapFile::kAlignment;

// One storage of a block, and its place in the memory of the block.
struct WeightPiece {
  c10::Storage storage;
  int64_t at, size;

  // A stack: whether each of its matrices is in the memory of the block or on its way there, the copies that
  // are under way, the callers of bring() that use the stack, and the matrices that the last one asked for.
  // Other pieces have no matrices.
  std::vector<bool> arrived{}, used{};
  std::vector<FencePtr> arriving{};
  int users = 0;
  bool is_stack() const { return !arrived.empty(); }
  int64_t matrix() const { return size / std::ssize(arrived); }  // bytes of a matrix
};

// A tensor of a block, to notice that it has changed or is no longer frozen. Does not keep the tensor alive.
struct WatchedWeight {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  bool is_trained;
  uint32_t version;  // the tensor's version counter when its bytes were last those away, or marked as changed
};

// A block's storages lie one after the other in one piece of memory, which is the same in the file, in host
// memory and on the device. Storages of trained weights come first, so that they go back in one write.
//
// The storages point into the memory on the device only while the block is in use. So a read or a write of a
// weight outside of its uses is always an error, also if the memory has not left yet.
//
// Stacks of matrices lie behind all other storages. A run of the block does not bring them: an operator asks
// for some of their matrices (bring), and their storages point into the memory until it has ended. If the
// whole block is opened, all matrices arrive.
//
// A table is a block of one weight (rows, columns), such as that of an embedding or of an output layer.
// Operators read it a few rows at a time. It is on the device as a whole only if its module runs.
struct WeightBlock {
  std::string name;
  std::vector<WeightPiece> pieces;
  std::vector<WatchedWeight> watched;
  int64_t size = 0, trained = 0;  // bytes of all storages, and of those of trained weights at the start
  int64_t stacks = 0;             // where the stacks begin; `size` if there are none
  int64_t row = 0;                // bytes of a row of a table; 0 for other blocks
  bool stays = false;             // whether the weights never leave
  at::Tensor home;                // the weights in host memory, unless there is a file
  int64_t at = -1;                // the offset of the weights in the file
  Checksums sums;                 // checksums of the bytes in the file

  at::Tensor memory;      // on the device, from the start of a copy to it until the weights have left
  at::Tensor staging;     // host memory between file and device
  FencePtr in;            // the copy to `memory`
  bool is_here = false;   // whether the storages point into `memory`
  bool is_whole = false;  // whether those of stacks do, too; all their matrices have arrived then

  int64_t changed = 0;  // bytes from the start that differ from those away
  at::Tensor leaving;   // the former `memory`, while it is written
  FencePtr out;         // the write

  BlockUses uses;
};

struct WeightStoreCore final : RowSource, BlockRuns, std::enable_shared_from_this<WeightStoreCore> {
  WeightStoreCore(c10::Device on, const std::string& folder, int64_t keep, bool steps);

  using BlockRuns::begin_run;
  using BlockRuns::end_run;
  using BlockRuns::forget_runs;
  using BlockRuns::mutex;

  void add(const std::string& name, const std::vector<at::Tensor>& frozen,
           const std::vector<at::Tensor>& trained, const std::vector<at::Tensor>& stacks);
  WeightBlock& block(int64_t index);
  void fetch(WeightBlock& b);
  void unused(WeightBlock& b);
  void settle();

  // ---- tables (weight_tables.cpp)

  void add_table(const std::string& name, const at::Tensor& weight);
  void for_each(const at::Tensor& weight, int64_t step, const Body& body) override;
  at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices);

  // ---- stacks (weight_stacks.cpp)

  std::unique_ptr<ArrivingMatrices> bring(const at::Tensor& stack, c10::ArrayRef<int64_t> offsets) override;
  /// Brings a block with all matrices of its stacks, which stay until nobody uses the block.
  void fetch_whole(WeightBlock& b);
  /// Brings a block for good.
  void give_back(WeightBlock& b);
  /// Returns the bytes of a block that are on the device, or on their way there.
  static int64_t bytes_here(const WeightBlock& b);

  const OwnProcess process;
  const c10::Device device;
  int64_t keep, fetched = 0, written = 0;
  bool steps;  // whether an optimizer steps weights within backward of their block
  std::vector<std::shared_ptr<WeightBlock>> blocks;
  WeightBlock* leaves = nullptr;                         // the block whose changed weights are being written
  std::vector<std::pair<at::Tensor, FencePtr>> retired;  // host memory that a copy may still read
  HostMemory host;
  std::unique_ptr<SwapFile> file;

 private:
  // ---- BlockRuns

  BlockUses& uses_of(int64_t index) override { return block(index).uses; }
  int64_t count() const override { return static_cast<int64_t>(blocks.size()); }
  std::weak_ptr<BlockRuns> self() override { return weak_from_this(); }
  void fetch(int64_t index) override;
  void prefetch(int64_t index, int64_t direction) override;
  void ended(int64_t index) override;
  void failed(int64_t index) override { ended(index); }  // some weights may have been stepped
  void unused(int64_t index) override { unused(block(index)); }
  int64_t last_block() const override;
  bool has_tiles() const override { return true; }

  void check_frozen(const WeightBlock& b) const;
  void add_piece(WeightBlock& b, const at::Tensor& t, int64_t alignment);
  // A range of bytes of a block.
  struct Range {
    int64_t begin, end;
  };
  void transfer(bool is_write, WeightBlock& b, const std::vector<Range>& ranges, char* memory) const;
  void transfer(bool is_write, WeightBlock& b, int64_t first, const at::Tensor& memory) const;
  int64_t check_sums(WeightBlock& b, int64_t from, int64_t end, const char* memory) const;
  void take_away(WeightBlock& b);
  void gather(const WeightBlock& b, int64_t first, const at::Tensor& to) const;
  void write_all(WeightBlock& b);
  void place(WeightBlock& b, const at::Tensor* memory);
  void place(const WeightBlock& b, const WeightPiece& p, const at::Tensor* memory);
  void begin_in(WeightBlock& b);
  void forget(WeightBlock& b);
  void evict(WeightBlock& b);
  void release_retired();

  // The matrices of a stack that a caller of bring() uses.
  struct Matrices;
  void start_matrices(WeightBlock& b, WeightPiece& stack, const std::vector<bool>& wanted, CopyLane& lane);
  void prefetch_matrices(WeightBlock& b, bool is_backward);
  void forget_matrices(WeightBlock& b);

  // Rows of a table on their way to the device.
  struct Arrival {
    at::Tensor rows;     // on the device, as bytes
    at::Tensor staging;  // host memory between file and device
    FencePtr in;
  };
  WeightBlock& table_of(const at::Tensor& weight);
  Arrival start_rows(WeightBlock& b, int64_t first, int64_t count);
  void end_rows(Arrival& a);
  void read_rows(WeightBlock& b, const int64_t* row_indices, int64_t count, uint8_t* to);

  // C++ destroys these members first, and each destructor waits for its copies.
  CopyLane reading, in, out, demand;
};

/// Returns a record of the version of a weight, by which later changes are noticed.
WatchedWeight watch_weight(const at::Tensor& weight, bool is_trained);
// Whether a storage is one of a block.
bool has_storage(const WeightBlock& b, const c10::Storage& storage);

}  // namespace shoestring::offload
