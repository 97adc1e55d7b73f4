#include "data/prefetch_ring.h"

#include <omp.h>

#include <algorithm>
#include <utility>

#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>

#include "offload/first_error.h"

namespace shoestring::data {
namespace {

using at::Tensor;
using offload::Fence;

constexpr const char* kPrefetcher = "Prefetcher";
// Tensors begin at multiples of this many bytes, as in PyTorch's CUDA allocator.
constexpr int64_t kPrefetchAlignment = 512;

int64_t aligned_bytes(int64_t bytes) {
  return (bytes + kPrefetchAlignment - 1) / kPrefetchAlignment * kPrefetchAlignment;
}

c10::Device checked_device(c10::Device device) {
  if (device.is_cpu()) return device;
  TORCH_CHECK_VALUE(!device.is_meta() && c10::impl::hasDeviceGuardImpl(device.type()), kPrefetcher,
                    ": device: expected the CPU or an accelerator of this PyTorch, got ", device,
                    ". Install a PyTorch for this device, or use cpu.");
  const c10::impl::VirtualGuardImpl guard(device.type());
  const int count = guard.deviceCount();
  TORCH_CHECK_VALUE(device.index() < count && count > 0, kPrefetcher,
                    ": device: expected one of the devices of this machine, got ", device,
                    " where PyTorch finds ", count, " of this type. Use a lower index, or cpu.");
  if (!device.has_index()) device.set_index(guard.getDevice().index());
  return device;
}

// Returns a tensor over part of a flat tensor of bytes. Unlike a view, it has a version counter of its own,
// so that a change of one tensor of a batch does not count as a change of the others.
Tensor part_of(const Tensor& bytes, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides,
               at::ScalarType dtype) {
  Tensor part = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(bytes.storage()), bytes.key_set(),
                                                         c10::scalarTypeToTypeMeta(dtype));
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t first = bytes.storage_offset() + offset;
  part.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, first / item);
  return part;
}

Tensor bytes_of(const Tensor& memory, int64_t count) { return part_of(memory, 0, {count}, {1}, at::kByte); }

}  // namespace

PrefetchRing::PrefetchRing(c10::Device device, int64_t depth, int64_t start, std::optional<int64_t> stop,
                           bool poison)
    : device_(checked_device(device)), stop_(stop), poison_(poison), memory_(kPrefetcher, device_),
      position_(start), read_(start), returned_(start) {
  TORCH_CHECK_VALUE(depth >= 1, kPrefetcher, ": depth: expected at least 1, got ", depth,
                    ". Use 2 to read one batch ahead.");
  TORCH_CHECK_VALUE(start >= 0, kPrefetcher, ": start: expected at least 0, got ", start,
                    ". Use the number of a batch.");
  TORCH_CHECK_VALUE(!stop || *stop >= start, kPrefetcher, ": stop: expected at least start, which is ", start,
                    ", got ", stop.value_or(0), ". Use a larger stop, or none.");
  slots_.resize(static_cast<size_t>(depth));
  ended_ = stop_ == start;
  if (!device_.is_cpu())
    stream_ = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
}

PrefetchRing::~PrefetchRing() {
  for (const Slot& slot : slots_) {
    offload::FirstError ignored;
    ignored.guard([&] {
      if (slot.copied) slot.copied->synchronize();
    });
  }
}

std::optional<int64_t> PrefetchRing::claim() {
  process_.check(kPrefetcher);
  // Initialise PyTorch's number of threads before limiting it, or the first operator would reset the limit.
  at::internal::lazy_init_num_threads();
  omp_set_num_threads(1);
  {
    std::unique_lock lock(mutex_);
    const auto depth = static_cast<int64_t>(slots_.size());
    changed_.wait(lock, [&] { return closed_ || ended_ || read_ < returned_ + depth; });
    if (closed_ || ended_) return std::nullopt;
  }
  Slot& slot = slot_of(read_);
  if (slot.copied) slot.copied->synchronize();
  slot.used = slot.wanted = 0;
  const std::lock_guard lock(mutex_);
  claimed_ = read_;
  slot.claimed_at = Clock::now();
  return read_;
}

Tensor PrefetchRing::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  Slot& slot = slot_of(read_);
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  const auto options = at::TensorOptions().dtype(dtype);
  slot.wanted += aligned_bytes(bytes);
  if (!slot.host.defined() || bytes > slot.host.numel() - slot.used || bytes == 0)
    return at::empty(sizes, options);
  char* const begin = static_cast<char*>(slot.host.data_ptr()) + slot.used;
  slot.used = std::min(slot.used + aligned_bytes(bytes), slot.host.numel());
  return at::from_blob(begin, sizes, [host = slot.host](void*) {}, options);
}

void PrefetchRing::check(const Batch& batch) const {
  for (size_t i = 0; i < batch.size(); ++i) {
    const Tensor& t = batch[i];
    const bool is_dense = t.defined() && t.device().is_cpu() && t.layout() == at::kStrided &&
                          !t.is_quantized() && !t.unsafeGetTensorImpl()->is_python_dispatch();
    TORCH_CHECK_VALUE(is_dense, kPrefetcher, ": source: expected dense tensors on the CPU, got ",
                      t.defined() ? t.toString() : "an undefined tensor", " as tensor ", i, " of batch ",
                      read_, ". Return t.cpu(), t.to_dense() or the parts of t.");
  }
}

void PrefetchRing::put(Batch batch) {
  process_.check(kPrefetcher);
  check(batch);
  Slot& slot = slot_of(read_);
  if (stream_) batch = upload(slot, batch);
  {
    const std::lock_guard lock(mutex_);
    slot.batch = std::move(batch);
    ended_ = ++read_ == stop_;
  }
  changed_.notify_all();
}

Batch PrefetchRing::upload(Slot& slot, const Batch& batch) {
  const c10::NoGradGuard no_grad;
  struct Place {
    int64_t offset;
    c10::DimVector strides;
    bool is_filled;  // whether the source has written the tensor there
  };
  const auto* const begin =
      slot.host.defined() ? static_cast<const char*>(slot.host.const_data_ptr()) : nullptr;
  std::vector<Place> places;
  int64_t used = slot.used;
  for (const Tensor& t : batch) {
    const auto* const data = static_cast<const char*>(t.const_data_ptr());
    if (t.numel() > 0 && !t.is_conj() && !t.is_neg() && data >= begin && data < begin + slot.used) {
      places.push_back({data - begin, c10::DimVector(t.strides()), true});
      continue;
    }
    c10::DimVector strides(t.strides());
    if (!t.is_non_overlapping_and_dense()) strides = at::infer_dense_strides(t.sizes(), t.strides());
    places.push_back({used, std::move(strides), false});
    used += aligned_bytes(static_cast<int64_t>(t.nbytes()));
  }
  // All slots grow to the largest batch, so that each slot grows at most once for it.
  largest_ = std::max({largest_, used, slot.wanted});
  if (!slot.host.defined() || slot.host.numel() < used) {
    const Tensor filled = std::exchange(slot.host, memory_.empty({largest_}, at::kByte));
    if (slot.used > 0) bytes_of(slot.host, slot.used).copy_(bytes_of(filled, slot.used));
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    if (places[i].is_filled) continue;
    part_of(slot.host, places[i].offset, batch[i].sizes(), places[i].strides, batch[i].scalar_type())
        .copy_(batch[i]);
  }

  const c10::StreamGuard guard(*stream_);
  if (slot.released) slot.released->block(stream_);
  if (!slot.device.defined() || slot.device.numel() < used)
    slot.device = at::empty({largest_}, at::TensorOptions().dtype(at::kByte).device(device_));
  if (used > 0) bytes_of(slot.device, used).copy_(bytes_of(slot.host, used), /*non_blocking=*/true);
  slot.copied = Fence::now(device_);
  Batch copies;
  for (size_t i = 0; i < batch.size(); ++i) {
    copies.push_back(
        part_of(slot.device, places[i].offset, batch[i].sizes(), places[i].strides, batch[i].scalar_type()));
  }
  return copies;
}

void PrefetchRing::end(std::exception_ptr error) {
  process_.check(kPrefetcher);
  {
    const std::lock_guard lock(mutex_);
    ended_ = true, error_ = std::move(error);
  }
  changed_.notify_all();
}

void PrefetchRing::close() {
  if (!process_.is_here()) return;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

void PrefetchRing::give_back() {
  if (!is_held_) return;
  Slot& slot = slot_of(position_ - 1);
  if (stream_) {
    slot.released = Fence::now(device_);
    // Autograd must notice that the memory of tensors which it has saved will change.
    for (const Tensor& t : slot.batch) {
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
    }
    if (poison_) {
      const c10::StreamGuard guard(*stream_);
      slot.released->block(stream_);
      bytes_of(slot.device, slot.device.numel()).fill_(0xFF);
    }
  }
  slot.batch.clear();
  is_held_ = false;
  {
    const std::lock_guard lock(mutex_);
    returned_ = position_;
  }
  changed_.notify_all();
}

bool PrefetchRing::wait(double seconds) {
  process_.check(kPrefetcher);
  give_back();
  std::unique_lock lock(mutex_);
  if (is_ready()) return true;
  const auto began = Clock::now();
  const bool ready =
      changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return is_ready(); });
  // Until the reader has claimed this batch, it waits for the device, which still reads the slot's host
  // memory.
  if (claimed_ >= position_) {
    const auto waited = Clock::now() - std::max(began, slot_of(position_).claimed_at);
    seconds_waited_ = seconds_waited_ + std::chrono::duration<double>(waited).count();
  }
  return ready;
}

std::optional<Batch> PrefetchRing::next() {
  process_.check(kPrefetcher);
  // On a device, the call of a second thread would take back the batch that the first thread is about to use.
  const std::unique_lock alone(consumer_, std::try_to_lock);
  TORCH_CHECK(alone.owns_lock(), kPrefetcher,
              ": next: expected one thread at a time, got a call while another thread waits for batch ",
              position(),
              ". Call next from one thread, or hold a mutex around next and the use of its batch.");
  constexpr double kSeconds = 60;  // wait_for() of a much longer time would overflow
  while (!wait(kSeconds)) {
  }
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!closed_, kPrefetcher, ": expected an open prefetcher, got a closed one. Create a new one.");
  if (position_ == read_) {
    if (error_) std::rethrow_exception(error_);
    return std::nullopt;
  }
  Slot& slot = slot_of(position_);
  if (!stream_) {
    ++position_, is_held_ = true;
    return std::move(slot.batch);
  }
  const auto stream = offload::current_stream(device_);
  slot.copied->block(stream);
  // The memory belongs to the ring's stream. The allocator must not reuse it before this stream is done,
  // should the ring be destroyed.
  c10::impl::VirtualGuardImpl(device_.type())
      .recordDataPtrOnStream(slot.device.storage().data_ptr(), *stream);
  ++position_, is_held_ = true;
  return slot.batch;
}

}  // namespace shoestring::data
