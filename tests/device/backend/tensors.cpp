// How tensors of the device are made, resized, copied and read.

#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "device_memory.h"
#include "pinned_memory.h"
#include "streams.h"

namespace simdev {

using at::Tensor;

bool is_on_device(const Tensor& t) { return t.defined() && t.device().type() == kType; }

Range range_of(const Tensor& t, bool is_write) {
  if (t.numel() == 0) return {nullptr, nullptr, is_write};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  const auto size = static_cast<int64_t>(t.element_size());
  char* const storage = static_cast<char*>(const_cast<void*>(t.unsafeGetTensorImpl()->storage().data()));
  char* const begin = storage + t.storage_offset() * size;
  return {begin, begin + (last + 1) * size, is_write};
}

Tensor for_kernel(const Tensor& t) {
  const at::AutoDispatchBelowADInplaceOrView below;
  char* const begin = range_of(t, false).begin;
  return at::from_blob(begin == nullptr ? nullptr : kernel_address(begin), t.sizes(), t.strides(),
                       at::TensorOptions().dtype(t.dtype()));
}

Tensor for_view(const Tensor& t) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const void* storage = t.unsafeGetTensorImpl()->storage().data();
  if (storage == nullptr) return for_kernel(t);
  const Tensor bytes = at::from_blob(kernel_address(storage), {static_cast<int64_t>(t.storage().nbytes())},
                                     at::TensorOptions().dtype(at::kByte));
  return at::empty({0}, at::TensorOptions().dtype(t.dtype()))
      .set_(bytes.storage(), t.storage_offset(), t.sizes(), t.strides());
}

Tensor empty_as(const Tensor& like, c10::Device device) {
  return at::empty_strided(like.sizes(), like.strides(),
                           at::TensorOptions().dtype(like.dtype()).device(device));
}

namespace {

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// Makes `waiter` wait for what `stream` has at present.
void wait_for(int waiter, int stream) {
  if (waiter == stream) return;
  const std::lock_guard lock(records());
  const Position position{stream, clock_locked(stream)[stream]};
  order_locked(waiter, clock_locked(stream));
  enqueue_locked(waiter, {"wait_event()", [position] { wait_silently(position); }, {}, /*is_kernel=*/false});
}

// Between devices, the copy runs in the source's stream, and both streams wait for each other.
void copy_on_devices(const Tensor& from, const Tensor& to) {
  const int source = current_stream(from.device().index()), target = current_stream(to.device().index());
  wait_for(source, target);
  enqueue(source, {"copy on the device",
                   [from = for_kernel(from), to = for_kernel(to)] { to.copy_(from); },
                   {range_of(from, false), range_of(to, true)}});
  wait_for(target, source);
}

// A copy with pinned memory is asynchronous if the caller asks for it. Other host memory is read at the call,
// since the CUDA driver copies it to a buffer of its own, and written before the call returns.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (is_on_device(from) && is_on_device(to)) {
    copy_on_devices(from, to);
    return to;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const bool is_upload = is_on_device(to);
  const Tensor& host = is_upload ? from : to;
  const Tensor& device = is_upload ? to : from;
  const bool pinned = is_pinned(host.const_data_ptr());
  const int stream = current_stream(device.device().index());
  Operation copy;
  copy.accesses = {range_of(device, is_upload)};
  if (pinned) copy.accesses.push_back(range_of(host, !is_upload));
  const Tensor host_side = pinned ? for_kernel(host) : is_upload ? host.clone() : host;
  const Tensor device_side = for_kernel(device);
  copy.name = is_upload ? "copy from the host" : "copy to the host";
  copy.run = [from = is_upload ? host_side : device_side, to = is_upload ? device_side : host_side] {
    to.copy_(from);
  };
  const Position position = enqueue(stream, std::move(copy));
  if (pinned) use_pinned(host.const_data_ptr(), position);
  if (!non_blocking || (!is_upload && !pinned))
    synchronize_stream(stream, is_upload ? "a copy from the host is not asynchronous"
                                         : "a copy to the host is not asynchronous");
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& t) {
  const int stream = current_stream(t.device().index());
  const Tensor value = at::empty({}, at::TensorOptions().dtype(t.dtype()));
  enqueue(stream, {"item()",
                   [from = for_kernel(t), value] { value.copy_(from.reshape(at::IntArrayRef())); },
                   {range_of(t, false)}});
  synchronize_stream(stream, "item()");
  return value.item();
}

const Tensor& resize(const Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = t.unsafeGetTensorImpl();
  if (t.sizes() != size) {
    impl->set_sizes_contiguous(size);
    const size_t bytes =
        static_cast<size_t>(t.storage_offset() + t.numel()) * static_cast<size_t>(t.element_size());
    if (t.numel() > 0 && bytes > t.storage().nbytes())
      at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), bytes);
  }
  if (format) impl->empty_tensor_restride(*format);
  return t;
}
Tensor& set_tensor(Tensor& t, const Tensor& source) { return at::native::set_tensor_(t, source); }
Tensor& set_storage(Tensor& t, at::Storage source) { return at::native::set_(t, source); }
Tensor& set_storage_offset(Tensor& t, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  return at::native::set_storage_meta__symint(t, source, offset, size, stride);
}
void record_stream_of(Tensor& t, c10::Stream stream) {
  record_stream(t.storage().data_ptr(), from_c10(stream));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("record_stream", record_stream_of);
}

}  // namespace
}  // namespace simdev
