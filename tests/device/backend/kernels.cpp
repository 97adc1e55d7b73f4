#include "kernels.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "core/cuda_tables.h"
#include "device_memory.h"
#include "pinned_memory.h"
#include "simt.h"
#include "streams.h"

namespace simdev {
namespace {

// The emulator runs one launch at a time, and its list of memory must not change meanwhile.
std::mutex& emulator() {
  static auto& one = *new std::mutex;
  return one;
}

// A copy of a kernel's arguments, which may hold tensor maps of 64 bytes alignment.
struct Arguments {
  static constexpr std::align_val_t kAlignment{64};
  explicit Arguments(size_t n) : size(n), data(static_cast<char*>(operator new(n, kAlignment))) {}
  ~Arguments() { operator delete(data, kAlignment); }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  const size_t size;
  char* const data;
};

// Replaces the addresses that tensors hold by those of kernels. Arguments are the only way by which a pointer
// reaches a kernel. Pointers are aligned there, and no other number looks like an address of these mappings.
// Addresses of another device stay, and so do those of freed memory for the emulator, which reports both as
// out of bounds once a kernel uses them. Arrays in arguments may hold old addresses that no kernel uses.
void translate(const Arguments& arguments, int device) {
  for (size_t i = 0; i + sizeof(void*) <= arguments.size; i += sizeof(void*)) {
    void* p;
    std::memcpy(&p, arguments.data + i, sizeof p);
    if (const int owner = device_of(p); owner >= 0 && owner != device) continue;
    void* const translated = kernel_address(p);
    std::memcpy(arguments.data + i, &translated, sizeof p);
  }
}

const char* refuse(const std::string& text) {
  static thread_local std::string last;
  last = text;
  return last.c_str();
}

// `stream` is a stream's index plus one, since null would be a valid index.
const char* launch(const void* function, int64_t blocks, int threads, int shared_bytes, void* stream,
                   void (*kernel)(void*), const void* arguments, size_t size) {
  const int index = static_cast<int>(reinterpret_cast<intptr_t>(stream)) - 1;
  if (index < 0) return refuse("the stream is null");
  const int device = device_of_stream(index);
  if (device != current_device()) {
    return refuse("invalid resource handle: the stream belongs to device " + std::to_string(device) +
                  ", and the current device is " + std::to_string(current_device()) +
                  "; a device guard is missing");
  }
  const auto copy = std::make_shared<Arguments>(size);
  std::memcpy(copy->data, arguments, size);
  translate(*copy, device);
  enqueue(index, {"kernel",
                  [=] {
                    const std::lock_guard lock(emulator());
                    const char* error =
                        simt::run(function, blocks, threads, shared_bytes, kernel, copy->data);
                    if (error != nullptr) throw std::runtime_error(error);
                  },
                  {}});
  return nullptr;
}

const shoestring::cuda::Runtime kRuntime{
    [](int device) -> void* { return reinterpret_cast<void*>(intptr_t{current_stream(device)} + 1); }, pin,
    unpin};

}  // namespace

void connect_kernels() {
  simt::set_launcher(launch);
  shoestring::cuda::provide("runtime_simdev", &kRuntime);
}

void add_kernel_memory(void* begin, size_t size) {
  const std::lock_guard lock(emulator());
  simt::add_memory(begin, size);
}
void remove_kernel_memory(void* begin) {
  const std::lock_guard lock(emulator());
  simt::remove_memory(begin);
}

}  // namespace simdev
