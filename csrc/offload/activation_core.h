#pragma once

// The internals that an ActivationStore shares with the activations that it has returned.

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

/// One offloaded storage. It lives as long as the last StoredActivation that uses it.
struct ActivationEntry {
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  // A storage and the dtype of its elements. The dtype counts only if the elements are compressed.
  using Key = std::pair<c10::StorageImpl*, at::ScalarType>;

  ActivationEntry(std::shared_ptr<ActivationStoreCore> core, const at::Tensor& x);
  ~ActivationEntry();

  std::shared_ptr<ActivationStoreCore> core;
  Key key;
  Weak identity;        // keeps the address of the storage from being reused
  c10::Storage source;  // the storage on the device, until it has been copied and its layer is over
  int64_t bytes;
  at::ScalarType dtype;
  c10::VariableVersion version;
  uint32_t stored_version;
  std::optional<c10::Stream> stream;  // the stream that computed the storage
  int64_t layer = 0, unread = 0;      // unread: activations of this storage that have not been reloaded yet
  std::atomic<bool> dropped{false};

  Encoding encoding;
  at::Tensor host;                  // the encoding; with a swap file, only while it is being written
  int64_t at = -1, disk_bytes = 0;  // offset (-1: none) and size in the swap file
  FencePtr out;                     // signals that the encoding has reached the host or the disk

  c10::Storage copy;  // the storage after it was copied back to the device
  Weak copy_identity;
  std::optional<c10::Stream> copy_stream;
  at::Tensor staging;
  FencePtr in;
};

/// Holds the mutex of a core. Raises in a forked child, where a thread of the parent may hold the mutex
/// forever.
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
  /// Returns the storage on the device: the source if it is still there, else the copy.
  c10::Storage on_device(ActivationEntry& e);
  void prefetch_before(int64_t layer);
  /// Frees sources that have been copied. Waits for copies that are more than max_pending layers behind, or
  /// until at most `most` bytes of sources are left.
  void settle(int64_t most = std::numeric_limits<int64_t>::max());
  at::Tensor host_memory(int64_t bytes);
  /// Frees host memory that a stream may still use, once the fence is done.
  void retire(at::Tensor host, const FencePtr& fence);

  const OwnProcess process;
  const c10::Device device;
  const Compression compression;
  const int64_t prefetch, max_pending, min_bytes, host_bytes;
  const std::string folder;

  mutable std::recursive_mutex mutex;  // recursive: an entry may be destroyed while the mutex is held
  std::map<c10::StorageImpl*, ActivationEntry::Weak> excluded;
  std::map<ActivationEntry::Key, std::weak_ptr<ActivationEntry>> entries;
  std::map<int64_t, std::vector<std::weak_ptr<ActivationEntry>>> layers;
  std::deque<std::weak_ptr<ActivationEntry>> pending;
  std::vector<std::pair<at::Tensor, FencePtr>> retired;
  int64_t layer = 0, live_host = 0, slabs = 0;
  int64_t stored = 0, copied_out = 0, reloaded = 0, alive = 0;
  bool marked = false;
  // Storages to free once `mutex` is unlocked. Freeing may need the GIL, whose owner may wait for `mutex`.
  std::vector<c10::Storage> gone;

  HostMemory memory;
  std::unique_ptr<SwapFile> file;
  // Lanes are destroyed in reverse order: copies to the host finish before the writes to the disk that need
  // them.
  CopyLane write, read, out, in;
};

}  // namespace shoestring::offload
