#pragma once

// The internal state of an ActivationStore, shared with the StoredActivation objects that the store has
// returned.

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

/// One offloaded storage. The entry lives as long as the last StoredActivation that uses it.
struct ActivationEntry {
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  // Identifies an entry: a storage and the dtype of its elements. The dtype is kByte unless the elements are
  // compressed.
  using Key = std::pair<c10::StorageImpl*, at::ScalarType>;

  ActivationEntry(std::shared_ptr<ActivationStoreCore> core, const at::Tensor& x);
  ~ActivationEntry();

  std::shared_ptr<ActivationStoreCore> core;
  Key key;
  Weak identity;  // weak reference to the storage; keeps its address from being reused
  // the storage on the device; released when it has been copied and the next layer has begun
  c10::Storage source;
  int64_t bytes;
  at::ScalarType dtype;
  c10::VariableVersion version;
  uint32_t stored_version;
  std::optional<c10::Stream> stream;  // the stream on which the storage was computed
  // unread: number of StoredActivations of this storage that have not been reloaded yet
  int64_t layer = 0, unread = 0;
  std::atomic<bool> dropped{false};  // whether copies that have not begun are left out

  Encoding encoding;
  // the encoded storage in host memory; with a swap file, released after the write to the file
  at::Tensor host;
  int64_t at = -1, disk_bytes = 0;  // offset in the swap file (-1 if not there) and size in bytes
  FencePtr out;                     // signals that the encoding has reached the host or the disk

  c10::Storage copy;  // the new storage on the device, after it was copied back
  Weak copy_identity;
  std::optional<c10::Stream> copy_stream;
  at::Tensor staging;
  FencePtr in;
};

/// An ActivationTurn holds the mutex of an ActivationStoreCore while it lives. The constructor raises in a
/// forked child, where a thread of the parent may hold the mutex forever.
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
  /// Waits for the copies that may still use retired host memory.
  ~ActivationStoreCore();

  bool stays(const at::Tensor& x) const;
  std::shared_ptr<ActivationEntry> entry_of(const at::Tensor& x);
  void begin_out(ActivationEntry& e);
  void begin_in(ActivationEntry& e);
  /// Gives up the copy of the entry's storage to the host, which nobody will need any more. Work that the
  /// current stream gets from now on may overwrite the storage.
  void end_copy(ActivationEntry& e);
  void forget_copy(ActivationEntry& e);
  /// Returns the entry's storage on the device: the source if it is still there, otherwise a copy that is
  /// loaded back.
  c10::Storage on_device(ActivationEntry& e);
  void prefetch_before(int64_t layer);
  /// Frees the device storages of earlier layers whose copies to the host have finished. First waits for the
  /// copies of layers more than max_pending layers back. Also waits until the earlier layers' storages that
  /// are still on the device take at most `most` bytes.
  ///
  /// With compression, frees only the storages that it would wait for. Backward reads the compressed values
  /// of a freed storage, so the order of saving alone decides which values it reads, not the speed of copies.
  void settle(int64_t most = std::numeric_limits<int64_t>::max());
  at::Tensor host_memory(int64_t bytes);
  /// Frees host memory once `fence` is done, since a copy may use the memory until then.
  void retire(at::Tensor host, const FencePtr& fence);
  /// Frees the retired host memory whose fences are done.
  void release_retired();

  const OwnProcess process;
  const c10::Device device;
  const Compression compression;
  const int64_t prefetch, max_pending, min_bytes, host_bytes;
  const std::string folder;

  // recursive, because an entry may be destroyed while this thread holds the mutex
  mutable std::recursive_mutex mutex;
  std::map<c10::StorageImpl*, ActivationEntry::Weak> excluded;
  std::map<ActivationEntry::Key, std::weak_ptr<ActivationEntry>> entries;
  std::map<int64_t, std::vector<std::weak_ptr<ActivationEntry>>> layers;
  std::deque<std::weak_ptr<ActivationEntry>> pending;
  std::vector<std::pair<at::Tensor, FencePtr>> retired;
  int64_t layer = 0, live_host = 0, slabs = 0;
  int64_t stored = 0, copied_out = 0, reloaded = 0, alive = 0;
  bool marked = false;
  // Storages to free after `mutex` is unlocked. Freeing a storage may need the GIL, and the thread that holds
  // the GIL may wait for `mutex`.
  std::vector<c10::Storage> gone;

  HostMemory memory;
  std::unique_ptr<SwapFile> file;
  // C++ destroys these members in reverse order, and each destructor waits for its copies. Copies to the host
  // (`out`) thus finish before the writes to the disk (`write`) that need them.
  CopyLane write, read, out, in;
};

}  // namespace shoestring::offload
