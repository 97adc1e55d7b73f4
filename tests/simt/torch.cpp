// Connects the emulator to PyTorch. When this library is loaded, every operator that has a CUDA kernel runs
// this kernel in the emulator if it is called with CPU tensors. The kernels work directly in the memory of
// these tensors.

#include <pthread.h>

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include "core/cuda_tables.h"
#include "simt.h"

namespace {

const shoestring::cuda::Runtime kRuntime{[](int) -> void* { return nullptr; },
                                         [](void*, size_t) -> const char* { return nullptr; },
                                         [](void*) -> const char* { return nullptr; }};

// Allocates CPU tensors, registers their memory with the emulator, and fills it with NaN. A gap around each
// allocation ensures that an access out of bounds does not hit another tensor.
class TrackedAllocator final : public c10::Allocator {
 public:
  explicit TrackedAllocator(c10::Allocator* below) : below_(below) {
    // A forked child must not inherit a lock that a thread of the parent holds (as in memory.cpp).
    pthread_atfork([] { lock_.lock(); }, [] { lock_.unlock(); }, [] { lock_.unlock(); });
  }

  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, c10::Device(c10::kCPU)};
    c10::DataPtr whole = below_->allocate(size + 2 * kGap);
    char* begin = static_cast<char*>(whole.get()) + kGap;
    std::memset(begin, 0xff, size);
    simt::add_memory(begin, size);
    const std::lock_guard lock(lock_);
    whole_.emplace(begin, std::move(whole));
    return {begin, begin, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }

 private:
  static constexpr size_t kGap = 1024;
  static void release(void* begin) {
    if (begin == nullptr) return;
    simt::remove_memory(begin);
    const std::lock_guard lock(lock_);
    whole_.erase(begin);
  }
  c10::Allocator* below_;
  // The map and its lock are never destroyed, since tensors may live until the process ends.
  static inline auto& whole_ = *new std::unordered_map<void*, c10::DataPtr>;
  static inline auto& lock_ = *new std::mutex;
};

// While an object of this class exists, memory of tensor arguments that TrackedAllocator did not provide is
// registered with the emulator. Such memory comes from a file, from NumPy, or from before this library was
// loaded.
class Lent {
 public:
  explicit Lent(const torch::jit::Stack& arguments) {
    for (const auto& argument : arguments) lend(argument);
  }
  ~Lent() {
    for (void* begin : memory_) simt::remove_memory(begin);
  }

 private:
  void lend(const c10::IValue& value) {
    if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) lend(element);
    }
    if (!value.isTensor() || !value.toTensor().has_storage()) return;
    const auto& storage = value.toTensor().storage();
    // A storage whose weight is away has no memory, and its checked accessors raise an error.
    void* begin = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().mutable_get();
    if (begin == nullptr || storage.nbytes() == 0 || simt::knows_memory(begin)) return;
    simt::add_memory(begin, storage.nbytes());
    memory_.push_back(begin);
  }
  std::vector<void*> memory_;
};

void run_on_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Lent lent(*stack);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CUDA), stack);
}

const bool kLoaded = [] {
  shoestring::cuda::provide("runtime", &kRuntime);
  c10::SetCPUAllocator(new TrackedAllocator(c10::GetCPUAllocator()), /*priority=*/255);
  auto& redirect =
      *new torch::Library(torch::Library::IMPL, "shoestring", c10::DispatchKey::CPU, __FILE__, __LINE__);
  c10::WarningUtils::WarningHandlerGuard quiet([] {
    static struct : c10::WarningHandler {
      void process(const c10::Warning&) override {}  // ignores PyTorch's warning about replaced kernels
    } handler;
    return &handler;
  }());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("shoestring::", 0) != 0) continue;
    if (!dispatcher.findOp(name)->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    redirect.impl(name.name.substr(12).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cuda>());
  }
  return true;
}();

}  // namespace

// Functions for the tests in Python, which load this library with ctypes (see simt.h).
#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))
SIMT_EXPORT bool simt_set_capability(int capability) { return simt::set_capability(capability); }
SIMT_EXPORT bool simt_set_gpu(const char* name) { return simt::set_gpu(name); }
// Returns a line for each GPU: name, compute capability, bytes of shared memory, multiprocessors.
SIMT_EXPORT const char* simt_gpus() {
  static std::string text;
  text.clear();
  for (const simt::Gpu& gpu : simt::gpus()) {
    text += std::string(gpu.name) + "\t" + std::to_string(gpu.capability) + "\t" +
            std::to_string(gpu.shared_bytes) + "\t" + std::to_string(gpu.multiprocessors) + "\n";
  }
  return text.c_str();
}
// Returns the number of threads per block in the last launch, by which tests recognise the kernel that ran.
SIMT_EXPORT int simt_last_threads() { return simt::last_threads(); }
SIMT_EXPORT void simt_log_launches(bool on, bool only) { simt::log_launches(on, only); }
// Returns a line for each launch since the last call: kernel, file, threads, static and dynamic bytes.
SIMT_EXPORT const char* simt_take_launches() {
  static std::string text;
  text.clear();
  for (const simt::Launch& launch : simt::take_launches()) {
    text += launch.kernel + "\t" + launch.file + "\t" + std::to_string(launch.threads) + "\t" +
            std::to_string(launch.static_bytes) + "\t" + std::to_string(launch.dynamic_bytes) + "\n";
  }
  return text.c_str();
}
