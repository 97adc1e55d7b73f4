#include "checkpoint/hooks.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <typeinfo>
#include <utility>
#include <vector>

#include <shoestring/checkpoint/autograd.h>

#include "checkpoint/operator_tape.h"

// For every tensor that autograd saves, LibTorch asks its autograd engine for the default saved-tensor hooks.
// The engine of a process without Python has none. install_autograd_engine() replaces this engine by a
// subclass that returns the hooks of this file and otherwise behaves alike.

namespace shoestring::activations {
namespace {

thread_local std::vector<std::shared_ptr<SavedTensorHooks>> hooks_stack;

struct Adapter : torch::autograd::SavedVariableHooks {
  explicit Adapter(std::shared_ptr<SavedTensorHooks> hooks) : hooks_(std::move(hooks)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const at::NoGradGuard no_grad;
    const NoTape no_tape;
    const auto hooks = std::move(hooks_);
    // Detach the tensor before it is packed: a saved output would hold its own autograd node, which makes a
    // reference cycle.
    packed_ = hooks->pack(tensor.requires_grad() ? tensor.detach() : tensor);
  }

  at::Tensor call_unpack_hook() override {
    const at::NoGradGuard no_grad;
    return packed_->unpack();
  }

  std::shared_ptr<SavedTensorHooks> hooks_;
  std::shared_ptr<Packed> packed_;
};

struct Engine : torch::autograd::Engine {
  ~Engine() override { stop(); }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (hooks_stack.empty() || hooks_stack.back() == nullptr) return nullptr;
    return std::make_unique<Adapter>(hooks_stack.back());
  }
  // An engine allocates its thread pool in its first backward pass, so a null pool means that there was no
  // backward pass.
  static bool has_run(const torch::autograd::Engine& engine) {
    return engine.*&Engine::thread_pool_shared_ != nullptr;
  }
};

torch::autograd::Engine& engine() {
  static Engine engine_with_hooks;
  return engine_with_hooks;
}

bool installed() { return &torch::autograd::Engine::get_default_engine() == &engine(); }

}  // namespace

HooksGuard::HooksGuard(const char* caller, std::shared_ptr<SavedTensorHooks> hooks) {
  expect_engine(caller);
  hooks_stack.push_back(std::move(hooks));
}

HooksGuard::~HooksGuard() { hooks_stack.pop_back(); }

void expect_engine(const char* caller) {
  TORCH_CHECK(installed(), caller,
              ": autograd engine: expected shoestring::install_autograd_engine() at the start of main(), "
              "received another engine. In a process with Python, call shoestring.",
              caller, " from Python instead.");
}

}  // namespace shoestring::activations

namespace shoestring {

void install_autograd_engine() {
  using torch::autograd::Engine;
  if (activations::installed()) return;
  const Engine& present = Engine::get_default_engine();
  TORCH_CHECK(
      typeid(present) == typeid(Engine),
      "install_autograd_engine: expected LibTorch's own autograd engine, received Python's or another "
      "library's. In a process with Python, call shoestring.checkpoint and "
      "shoestring.offload_activations from Python instead.");
  TORCH_CHECK(
      !activations::Engine::has_run(present),
      "install_autograd_engine: expected a process without a backward pass so far, received one. Call "
      "install_autograd_engine() at the start of main().");
  torch::autograd::set_default_engine_stub(&activations::engine);
}

}  // namespace shoestring
