// The emulator under PyTorch: loading this library sends every operator that has a CUDA kernel there when it is called
// with CPU tensors. The kernels work in the memory of those tensors.

#include <cstring>

#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include "kernels/cuda.h"
#include "simt.h"

namespace {

const shoestring::cuda::Runtime kRuntime{[](int) -> void* { return nullptr; }};

// Tells the emulator what memory there is, fills it with NaN, and keeps allocations apart, so that a stray access finds
// nobody else's memory.
class TrackedAllocator final : public c10::Allocator {
 public:
  explicit TrackedAllocator(c10::Allocator* below) : below_(below) {}

  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr whole = below_->allocate(size + 2 * kGap);
    char* begin = static_cast<char*>(whole.get()) + kGap;
    std::memset(begin, 0xff, size);
    simt::add_memory(begin, size);
    auto* kept = new Kept{std::move(whole), begin};
    return {begin, kept, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }

 private:
  static constexpr size_t kGap = 1024;
  struct Kept {
    c10::DataPtr whole;
    void* begin;
  };
  static void release(void* context) {
    auto* kept = static_cast<Kept*>(context);
    simt::remove_memory(kept->begin);
    delete kept;
  }
  c10::Allocator* below_;
};

void run_on_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CUDA), stack);
}

const bool kLoaded = [] {
  shoestring::cuda::provide("runtime", &kRuntime);
  static TrackedAllocator allocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(&allocator, /*priority=*/255);
  static torch::Library redirect(torch::Library::IMPL, "shoestring", c10::DispatchKey::CPU, __FILE__, __LINE__);
  c10::WarningUtils::WarningHandlerGuard quiet([] {
    static struct : c10::WarningHandler {
      void process(const c10::Warning&) override {}  // that kernels are replaced is the purpose
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
