#pragma once

// Follows the blocks of a model through forward and backward, for classes that bring the weights of each
// block before it runs.

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <shoestring/core/export.h>

namespace shoestring::offload {

/// The uses of a block at present.
struct BlockUses {
  static constexpr int kNoPass =
      -1;  // what PyTorch returns as the number of the backward pass outside of one

  int count = 0;       // enter() and other uses that have not ended
  int pass = kNoPass;  // the backward pass that uses the block
  // The block after this one in the last forward, if its input was the output of this block, or if both are
  // tiles of one input. Its backward has ended when backward of this block begins.
  int64_t next = -1;
  bool none() const { return count == 0 && pass == kNoPass; }
};

/// Says when the weights of a block must be there. Blocks run in the order of their indices, and backward in
/// the reverse order. Hooks on the inputs and outputs of a block say when its backward begins and ends.
/// Thread-safe: `mutex` is held during the functions that a class overrides.
class SHOESTRING_API BlockRuns {
 public:
  virtual ~BlockRuns() = default;

  /// Forward of a block begins, or its forward within a checkpoint in backward. `inputs` are the block's
  /// inputs. When backward has computed their gradients, the block's backward has ended. `can_vanish`:
  /// whether an exception may end the forward without leave(), as Ctrl-C does in Python. The forward has
  /// ended, too, when the same thread enters the next block; so blocks must not run within one another.
  void enter(int64_t block, const std::vector<at::Tensor>& inputs, bool can_vanish = false);
  /// Forward of a block ends. When backward computes the gradients of `outputs`, the block's backward begins.
  void leave(int64_t block, const std::vector<at::Tensor>& outputs);

 protected:
  /// Returns the uses of a block, or raises an error if there is no such block.
  virtual BlockUses& uses_of(int64_t block) = 0;
  virtual int64_t count() const = 0;
  virtual std::weak_ptr<BlockRuns> self() = 0;

  /// Brings the weights of a block, which is about to run.
  virtual void fetch(int64_t block) = 0;
  /// Starts to bring the weights of the block at `index`, or of one that follows it in this direction. There
  /// may be no block at `index`.
  virtual void prefetch(int64_t index, int64_t direction) = 0;
  /// Called when the last use of a block has ended.
  virtual void unused(int64_t block) { static_cast<void>(block); }
  /// Called when backward of a block has ended.
  virtual void ended(int64_t block) = 0;
  /// Called instead of ended() for the blocks of a backward pass that an error has ended.
  virtual void failed(int64_t block) { static_cast<void>(block); }
  /// Called when a backward pass has ended, after ended() of all of its blocks.
  virtual void ended_pass() {}
  /// Whether a forward without gradients follows another one, so that the first block is needed next.
  virtual bool repeats() const { return true; }
  /// Whether consecutive blocks with the same input are tiles, of which backward ends one by one.
  virtual bool has_tiles() const { return false; }
  /// Returns the last block that runs in every forward, or -1.
  virtual int64_t last_block() const { return count() - 1; }

  /// Brings the weights of a block until end_run(). `can_vanish` is that of enter().
  void begin_run(int64_t block, bool can_vanish);
  /// Does nothing if the block does not run in this thread.
  void end_run(int64_t block);
  /// Drops all runs and backward passes, before the blocks go.
  void forget_runs();

  // recursive, because a hook may run while this thread brings weights
  mutable std::recursive_mutex mutex;

 private:
  // A forward that has begun and not ended.
  struct Run {
    int64_t block;
    std::thread::id thread;
    int pass;  // the backward pass in which the block runs
    bool can_vanish;
  };
  void drop(std::vector<Run>::iterator run);
  void end_vanished();
  void begin_backward(int64_t block);
  void end_backward(int64_t block);
  void end_pass(int pass, bool has_failed);

  std::vector<Run> runs_;
  std::vector<int> passes_;  // the backward passes whose end is awaited
  // the first output of the block that ran last, and the index of this block
  c10::weak_intrusive_ptr<c10::TensorImpl> output_{c10::intrusive_ptr<c10::TensorImpl>()};
  int64_t output_of_ = -1;
  // the first input of the block that began last
  c10::weak_intrusive_ptr<c10::TensorImpl> input_{c10::intrusive_ptr<c10::TensorImpl>()};
};

/// Lets a storage point to memory that `owner` keeps.
SHOESTRING_API void place_storage(c10::StorageImpl& storage, void* memory, const at::Tensor& owner);
SHOESTRING_API void place_storage(c10::StorageImpl& storage, at::DataPtr memory);
/// Takes the memory of a storage away. Reads raise an error with this text until place_storage(). `source`:
/// what the storage points to instead; see core/row_source.h.
SHOESTRING_API void empty_storage(c10::StorageImpl& storage, const std::string& error, at::DataPtr source);

}  // namespace shoestring::offload
