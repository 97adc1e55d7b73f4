#include "checkpoint/hooks.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <typeinfo>
#include <utility>
#include <vector>

#include "checkpoint/operator_tape.h"

// LibTorch asks its autograd engine for default hooks at every saved tensor, and the engine of a process
// without Python has none. The first HooksGuard therefore replaces that engine by a subclass which returns
// our hooks and is otherwise the same.

namespace shoestring::activations {
namespace {

thread_local std::vector<std::shared_ptr<SavedTensorHooks>> hooks_stack;

struct Adapter : torch::autograd::SavedVariableHooks {
  explicit Adapter(std::shared_ptr<SavedTensorHooks> hooks) : hooks_(std::move(hooks)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const at::NoGradGuard no_grad;
    const NoTape no_tape;
    const auto hooks = std::move(hooks_);
    // Detach the tensor: an output would hold its own node, which makes a reference cycle.
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
};

torch::autograd::Engine& engine() {
  static Engine ours;
  return ours;
}

bool installed() {
  static const bool ours = [] {
    const auto& present = torch::autograd::Engine::get_default_engine();
    if (typeid(present) != typeid(torch::autograd::Engine)) return false;
    torch::autograd::set_default_engine_stub(&engine);
    return true;
  }();
  // Python may have replaced the engine since.
  return ours && &torch::autograd::Engine::get_default_engine() == &engine();
}

}  // namespace

HooksGuard::HooksGuard(const char* caller, std::shared_ptr<SavedTensorHooks> hooks) {
  TORCH_CHECK(installed(), caller,
              ": expected a process without Python's autograd engine, which has hooks of its own; "
              "call shoestring.",
              caller, " from Python instead");
  hooks_stack.push_back(std::move(hooks));
}

HooksGuard::~HooksGuard() { hooks_stack.pop_back(); }

}  // namespace shoestring::activations
