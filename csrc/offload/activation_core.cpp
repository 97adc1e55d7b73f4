#include "offload/activation_core.h"

// Moves the storages of saved activations to host memory or to a disk, and back.

#include <algorithm>
#include <utility>

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

namespace shoestring::offload {
namespace {

constexpr const char* kOp = "offload_activations";
// In the first training step, host memory grows in slabs of at least this many bytes. Later steps use a
// single slab as large as all slabs of the first step.
constexpr int64_t kGrowth = int64_t{16} << 20;

int64_t pages(int64_t bytes) { return at::round_up(bytes, SwapFile::kAlignment); }

// Returns a flat tensor over the elements of a storage. The caller must keep the storage alive as long as the
// tensor.
at::Tensor elements(const c10::Storage& storage, at::ScalarType dtype, int64_t count) {
  return at::from_blob(storage.mutable_data(), {count},
                       at::TensorOptions().dtype(dtype).device(storage.device()));
}

ActivationEntry::Weak weak(const c10::Storage& storage) {
  return ActivationEntry::Weak(storage.getWeakStorageImpl());
}

c10::Storage present(const ActivationEntry::Weak& identity, int64_t bytes) {
  c10::Storage storage(identity.lock());
  return storage && static_cast<int64_t>(storage.nbytes()) == bytes ? storage : c10::Storage();
}

}  // namespace

ActivationEntry::ActivationEntry(std::shared_ptr<ActivationStoreCore> owner, const at::Tensor& x)
    : core(std::move(owner)), identity(weak(x.storage())), source(x.storage()),
      bytes(static_cast<int64_t>(x.storage().nbytes())), version(x.unsafeGetTensorImpl()->version_counter()),
      stored_version(x._version()), stream(current_stream(x.device())), copy_identity(identity) {
  const auto size = static_cast<int64_t>(x.element_size());
  const bool whole = compresses(core->compression, x.scalar_type()) && bytes % size == 0;
  dtype = whole ? x.scalar_type() : at::kByte;
  key = {x.storage().unsafeGetStorageImpl(), dtype};
  encoding = encoding_of(core->compression, whole ? bytes / size : bytes, dtype);
}

ActivationEntry::~ActivationEntry() {
  dropped = true;
  if (!core->process.is_here()) return;
  const std::lock_guard lock(core->mutex);
  const auto found = core->entries.find(key);
  if (found != core->entries.end() && found->second.expired()) core->entries.erase(found);
  if (const auto l = core->layers.find(layer); l != core->layers.end()) {
    std::erase_if(l->second, [](const auto& e) { return e.expired(); });
    if (l->second.empty()) core->layers.erase(l);
  }
  std::erase_if(core->pending, [](const auto& e) { return e.expired(); });
  // Wait for the copy to the host. Its result and its errors do not matter any more, but it must not use
  // memory that is freed here.
  try {
    if (out) out->block(source ? stream : std::nullopt);
  } catch (...) {
  }
  core->forget_copy(*this);
  core->retire(std::move(host), in ? in : out);
  if (at >= 0) core->file->free(at, disk_bytes);
  --core->alive;
}

ActivationTurn::ActivationTurn(std::shared_ptr<ActivationStoreCore> core) : core_(std::move(core)) {
  core_->process.check(kOp);
  core_->mutex.lock();
}

ActivationTurn::~ActivationTurn() {
  const std::vector<c10::Storage> gone = std::exchange(core_->gone, {});
  core_->mutex.unlock();
}

ActivationStoreCore::ActivationStoreCore(c10::Device on, Compression compress, int64_t ahead, int64_t behind,
                                         int64_t least, const std::string& in_folder, int64_t limit)
    : device(on), compression(compress), prefetch(ahead), max_pending(behind), min_bytes(least),
      host_bytes(limit), folder(in_folder), memory(kOp, on), write(c10::kCPU), read(c10::kCPU), out(on),
      in(on) {
  TORCH_CHECK(prefetch >= 0, kOp, ": prefetch: expected a number of layers of at least 0, received ",
              prefetch);
  TORCH_CHECK(max_pending >= 0, kOp, ": max_pending: expected a number of layers of at least 0, received ",
              max_pending);
  TORCH_CHECK(min_bytes >= 0, kOp, ": min_bytes: expected at least 0, received ", min_bytes);
  TORCH_CHECK(host_bytes >= 0, kOp, ": host_bytes: expected at least 0, received ", host_bytes);
  if (!folder.empty()) file = std::make_unique<SwapFile>(kOp, folder);
}

ActivationStoreCore::~ActivationStoreCore() {
  if (!process.is_here()) return;
  for (const auto& [host, fence] : retired) {
    // The errors of copies do not matter any more.
    try {
      if (!fence->is_done()) fence->synchronize();
    } catch (...) {
    }
  }
}

bool ActivationStoreCore::stays(const at::Tensor& x) const {
  const auto* impl = x.unsafeGetTensorImpl();
  if (x.device() != device || x.layout() != at::kStrided || impl->is_python_dispatch() || !x.has_storage())
    return true;
  if (x.is_conj() || x.is_neg() || x.is_quantized()) return true;
  const auto bytes = static_cast<int64_t>(x.storage().nbytes());
  if (bytes == 0 || bytes < min_bytes) return true;
  const at::Tensor base = x.is_view() ? at::Tensor(x._base()) : x;
  // a parameter stays alive anyway, so offloading it would free no memory
  if (base.is_leaf() && base.requires_grad()) return true;
  const std::lock_guard lock(mutex);
  const auto found = excluded.find(x.storage().unsafeGetStorageImpl());
  return found != excluded.end() && !found->second.expired();
}

void ActivationStoreCore::release_retired() {
  std::erase_if(retired, [&](const auto& r) {
    if (!r.second->is_done()) return false;
    live_host -= pages(r.first.numel());
    return true;
  });
}

at::Tensor ActivationStoreCore::host_memory(int64_t bytes) {
  release_retired();
  int64_t slab = kGrowth;
  // No host memory is in use, so a training step has ended: replace the slabs of the step by one slab of
  // their total size.
  if (live_host == 0 && slabs > 1) {
    slab = memory.bytes();
    memory.trim();
    slabs = 0;
  }
  const int64_t before = memory.bytes();
  at::Tensor host = memory.empty({pages(bytes)}, at::kByte, slab);
  if (memory.bytes() > before) ++slabs;
  live_host += pages(bytes);
  return host;
}

void ActivationStoreCore::retire(at::Tensor host, const FencePtr& fence) {
  if (!host.defined()) return;
  if (fence == nullptr || device.is_cpu() || fence->is_done()) {
    live_host -= pages(host.numel());
  } else {
    retired.emplace_back(std::move(host), fence);
  }
}

std::shared_ptr<ActivationEntry> ActivationStoreCore::entry_of(const at::Tensor& x) {
  settle();
  const bool whole = compresses(compression, x.scalar_type()) && x.storage().nbytes() % x.element_size() == 0;
  const ActivationEntry::Key key{x.storage().unsafeGetStorageImpl(), whole ? x.scalar_type() : at::kByte};
  if (const auto found = entries.find(key); found != entries.end()) {
    // An entry with the same storage address has the same storage, because the entry keeps the address from
    // being reused. The contents may have changed since the entry was made, so the version counters are
    // compared.
    const auto e = found->second.lock();
    if (e && !e->dropped && e->version.current_version() == e->stored_version &&
        e->bytes == static_cast<int64_t>(x.storage().nbytes())) {
      return e;
    }
  }
  ++alive;
  const auto e = std::make_shared<ActivationEntry>(shared_from_this(), x);
  begin_out(*e);
  e->layer = marked ? layer : ++layer;
  entries[key] = e;
  layers[e->layer].push_back(e);
  pending.push_back(e);
  stored += e->bytes;
  return e;
}

void ActivationStoreCore::begin_out(ActivationEntry& e) {
  const c10::OptionalDeviceGuard guard(device);
  const int64_t size = pages(e.encoding.bytes);
  if (file && live_host + size > host_bytes) {
    e.at = file->allocate(size);
    e.disk_bytes = size;
  }
  e.host = host_memory(size);
  // The copies below may use a raw pointer to the entry, because the entry's destructor waits for them.
  ActivationEntry* const entry = &e;
  e.out = out.run({Fence::now(device)}, [entry] {
    if (entry->dropped) return;
    const int64_t count = entry->bytes / static_cast<int64_t>(c10::elementSize(entry->dtype));
    encode(entry->encoding, elements(entry->source, entry->dtype, count), entry->host);
  });
  if (e.at < 0) return;
  e.out = write.run({}, [entry, file = file.get(), copied = e.out] {
    copied->synchronize();
    if (!entry->dropped) file->wait(file->write(entry->at, entry->host.data_ptr(), entry->disk_bytes));
  });
}

void ActivationStoreCore::begin_in(ActivationEntry& e) {
  const c10::OptionalDeviceGuard guard(device);
  // The destination `copy` is allocated on this thread's current stream, but a CopyLane copies it in another
  // stream. That stream must therefore wait for the work that is already in the current stream. Later, the
  // current stream waits for the copy.
  const at::Tensor copy = at::empty({e.bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  std::vector<FencePtr> after{Fence::now(device), e.out};
  ActivationEntry* const entry = &e;
  if (e.at >= 0) {
    e.staging = host_memory(e.disk_bytes);
    after.push_back(read.run({e.out}, [entry, file = file.get(), to = e.staging.data_ptr()] {
      if (!entry->dropped) file->wait(file->read(entry->at, to, entry->disk_bytes));
    }));
  }
  e.copy = copy.storage(), e.copy_identity = weak(e.copy), e.copy_stream = current_stream(device);
  const at::Tensor from = e.at >= 0 ? e.staging : e.host;
  const int64_t count = e.bytes / static_cast<int64_t>(c10::elementSize(e.dtype));
  const at::Tensor to = elements(e.copy, e.dtype, count);
  e.in = in.run(std::move(after), [entry, from = from.data_ptr(), size = from.numel(), to] {
    if (!entry->dropped) decode(entry->encoding, at::from_blob(from, {size}, at::kByte), to);
  });
  reloaded += e.bytes;
}

void ActivationStoreCore::end_copy(ActivationEntry& e) {
  if (!e.source) return;  // settle() has waited for the copy
  e.dropped = true;
  try {
    e.out->block(current_stream(device));
  } catch (...) {
  }
}

void ActivationStoreCore::forget_copy(ActivationEntry& e) {
  try {
    if (e.in) e.in->block(e.copy_stream);
  } catch (...) {
  }
  e.copy = c10::Storage();
  retire(std::move(e.staging), e.in);
  e.staging = at::Tensor();
  e.copy_identity = e.identity;
}

c10::Storage ActivationStoreCore::on_device(ActivationEntry& e) {
  // The source storage is still on the device, because it has not been freed yet or another tensor uses it.
  if (c10::Storage source = present(e.identity, e.bytes)) return source;
  const auto stream = current_stream(device);
  c10::Storage copy = e.in ? present(e.copy_identity, e.bytes) : c10::Storage();
  if (!copy || e.copy_stream != stream) {
    forget_copy(e);
    begin_in(e);
    copy = e.copy;
  }
  try {
    e.in->block(stream);
  } catch (...) {
    forget_copy(e);
    e.in = nullptr;  // let the next call start a new copy
    throw;
  }
  retire(std::move(e.staging), e.in);
  e.staging = at::Tensor();
  return copy;
}

void ActivationStoreCore::prefetch_before(int64_t of) {
  auto next = layers.lower_bound(of);
  for (int64_t k = 0; k < prefetch && next != layers.begin(); ++k) {
    --next;
    for (const auto& candidate : next->second) {
      const auto e = candidate.lock();
      if (e && e->unread > 0 && !e->source && !e->copy && !present(e->identity, e->bytes)) begin_in(*e);
    }
  }
}

void ActivationStoreCore::settle(int64_t most) {
  int64_t behind = 0;  // bytes of earlier layers that are still on the device
  for (const auto& one : pending) {
    if (const auto e = one.lock(); e && e->layer < layer) behind += e->bytes;
  }
  while (!pending.empty()) {
    const auto e = pending.front().lock();
    // the current layer stays on the device, because backward begins with the last layer
    if (e && e->layer >= layer) return;
    const bool stays = compression != Compression::kNone || (e && !e->out->is_done());
    if (e && layer - e->layer <= max_pending && behind <= most && stays) return;
    pending.pop_front();
    if (e == nullptr) continue;
    behind -= e->bytes;
    if (e->dropped) continue;  // the host may have no copy, so the source stays
    // block() throws if the copy failed; the source storage then stays on the device
    e->out->block(e->stream);
    copied_out += e->encoding.bytes;
    gone.push_back(std::move(e->source));
    e->source = c10::Storage();
    if (e->at >= 0) retire(std::exchange(e->host, at::Tensor()), e->out);
  }
}

}  // namespace shoestring::offload
