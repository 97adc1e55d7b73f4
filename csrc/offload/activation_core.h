#pragma once

// What an ActivationStore and the activations that it has given out share.

#include <atomic>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include <c10/core/Storage.h>

#include "offload/activation_codec.h"
#include "offload/activation_store.h"
#include "offload/copy_lane.h"
#include "offload/host_memory.h"
#include "offload/swap_file.h"

namespace shoestring::offload {

/// A storage. It goes with the last StoredActivation over it.
struct ActivationEntry {
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  using Key = std::pair<c10::StorageImpl*, at::ScalarType>;  // the type counts where elements are compressed

  ActivationEntry(std::shared_ptr<ActivationStoreCore> core, const at::Tensor& x);
  ~ActivationEntry();

  std::shared_ptr<ActivationStoreCore> core;
  Key key;
  Weak identity;        // no other storage has its address while this is held
  c10::Storage source;  // until it has been copied, and its layer is over
  int64_t bytes;
  at::ScalarType dtype;
  c10::VariableVersion version;
  uint32_t stored_version;
  std::optional<c10::Stream> stream;  // that made it
  int64_t layer = 0, unread = 0;      // activations over it that have not been reloaded yet
  std::atomic<bool> dropped{false};

  Encoding encoding;
  at::Tensor host;                  // encoded; with a disk, while it is on its way
  int64_t at = -1, disk_bytes = 0;  // in the swap file
  FencePtr out;                     // it is where it stays

  c10::Storage copy;  // back on the device
  Weak copy_identity;
  std::optional<c10::Stream> copy_stream;
  at::Tensor staging;
  FencePtr in;
};

/// Holds the mutex of a core. Raises in a forked child, where a thread that does not exist may hold it.
class ActivationTurn {
 public:
  explicit ActivationTurn(std::shared_ptr<ActivationStoreCore> core);
  ~ActivationTurn();

 private:
  std::shared_ptr<ActivationStoreCore> core_;
};

struct ActivationStoreCore : std::enable_shared_from_this<ActivationStoreCore> {
  ActivationStoreCore(c10::Device device, Compression compression, int64_t prefetch, int64_t max_pending,
                      int64_t min_bytes, const std::string& folder, int64_t host_bytes);

  bool stays(const at::Tensor& x) const;
  std::shared_ptr<ActivationEntry> entry_of(const at::Tensor& x);
  void begin_out(ActivationEntry& e);
  void begin_in(ActivationEntry& e);
  void forget_copy(ActivationEntry& e);
  /// The storage on the device, from where it is quickest.
  c10::Storage on_device(ActivationEntry& e);
  void prefetch_before(int64_t layer);
  /// Gives sources back that have been copied, and waits for those that are too far behind, or until at most
  /// `most` bytes of them are left.
  void settle(int64_t most = std::numeric_limits<int64_t>::max());
  at::Tensor host_memory(int64_t bytes);
  /// Host memory that a stream may still use.
  void retire(at::Tensor host, const FencePtr& fence);

  const OwnProcess process;
  const c10::Device device;
  const Compression compression;
  const int64_t prefetch, max_pending, min_bytes, host_bytes;
  const std::string folder;

  mutable std::recursive_mutex mutex;  // an entry may go while it is held
  std::map<c10::StorageImpl*, ActivationEntry::Weak> excluded;
  std::map<ActivationEntry::Key, std::weak_ptr<ActivationEntry>> entries;
  std::map<int64_t, std::vector<std::weak_ptr<ActivationEntry>>> layers;
  std::deque<std::weak_ptr<ActivationEntry>> pending;
  std::vector<std::pair<at::Tensor, FencePtr>> retired;
  int64_t layer = 0, live_host = 0, slabs = 0;
  int64_t stored = 0, copied_out = 0, reloaded = 0, alive = 0;
  bool marked = false;
  std::vector<c10::Storage>
      gone;  // freed when `mutex` is free: that may need Python's lock, whose owner may wait for it

  HostMemory memory;
  std::unique_ptr<SwapFile> file;
  CopyLane write, read, out,
      in;  // they end in reverse order: copies to the host before what is written of them
};

}  // namespace shoestring::offload
