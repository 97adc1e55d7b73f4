#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
// Runs a checkpointed function in forward, and again in backward, with the help of hooks on the tensors that
// autograd saves.

#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/core/amp.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <map>
#include <mutex>

#include "checkpoint/hooks.h"
#include "checkpoint/kept_buffers.h"
#include "checkpoint/kept_results.h"
#include "checkpoint/operator_tape.h"
#include "checkpoint/rng_state.h"

// During the first run of a checkpointed function, hooks replace each tensor that autograd saves by a Number,
// its position in the order of saving. When backward first asks for one of these tensors, the function runs a
// second time. The tensors that autograd saves in the second run become the values of the Numbers.

namespace shoestring {
namespace activations {

using at::Tensor;

// Frame is not in an anonymous namespace: CheckpointRun::Scope, which a public header declares, has a Frame
// as a member.
struct Frame;

struct Number : Packed {
  Number(std::shared_ptr<Frame> frame, const Tensor& tensor)
      : frame(std::move(frame)), sizes(tensor.sizes().vec()), dtype(tensor.scalar_type()),
        device(tensor.device()) {}
  Tensor unpack() override;

  const std::shared_ptr<Frame> frame;
  const std::vector<int64_t> sizes;
  const at::ScalarType dtype;
  const c10::Device device;
  std::map<int, Tensor> values;  // the recomputed tensor for each backward pass, by graph task id
};

// Exception that ends the second run early. It is thrown through the function once all needed tensors have
// been recomputed. It derives from std::exception because LibTorch's engine passes on no other exceptions.
struct Stop : std::exception {};

struct Frame : std::enable_shared_from_this<Frame> {
  Frame(const CheckpointOptions& options, const std::vector<Tensor>& arguments, detail::RunAgain again,
        detail::BuffersOf buffers_of)
      : again(std::move(again)), buffers_of(std::move(buffers_of)), buffers(options.buffers()),
        early_stop(options.early_stop()) {
    for (const Tensor& tensor : arguments) inputs.emplace_back(tensor, /*is_output=*/false);
    if (options.preserve_rng_state()) rng = RngState(arguments);
    if (!options.keep().empty()) tape = c10::make_intrusive<OperatorTape>(options.keep());
  }

  Tensor value(Number& number);
  void run_again(int pass);

  const detail::RunAgain again;
  const detail::BuffersOf buffers_of;
  const std::vector<Tensor> buffers;
  const bool early_stop;
  std::vector<torch::autograd::SavedVariable> inputs;
  RngState rng;
  // The autocast settings of the first run, which the second run uses too.
  const std::vector<shoestring::detail::AutocastState> autocast = shoestring::detail::autocast_states();
  c10::intrusive_ptr<OperatorTape> tape;
  KeptResults kept;
  std::vector<std::weak_ptr<Number>> numbers;
  // True once the first run of the function has ended, so that the number of tensors it has saved is final. A
  // second run that starts earlier may save more tensors.
  bool complete = false;
  std::recursive_mutex mutex;
};

struct FirstRun : SavedTensorHooks {
  explicit FirstRun(std::shared_ptr<Frame> frame) : frame(std::move(frame)) {}
  std::shared_ptr<Packed> pack(const Tensor& tensor) override {
    auto number = std::make_shared<Number>(frame, tensor);
    frame->numbers.push_back(number);
    return number;
  }
  const std::shared_ptr<Frame> frame;
};

struct SecondRun : SavedTensorHooks {
  SecondRun(Frame& frame, int pass) : frame(frame), pass(pass) {}

  struct Itself : Packed {
    explicit Itself(Tensor tensor) : tensor(std::move(tensor)) {}
    Tensor unpack() override { return tensor; }
    const Tensor tensor;
  };

  std::shared_ptr<Packed> pack(const Tensor& tensor) override {
    const size_t i = seen++;
    if (const auto number = i < frame.numbers.size() ? frame.numbers[i].lock() : nullptr) {
      TORCH_CHECK(tensor.sizes() == at::IntArrayRef(number->sizes) && tensor.scalar_type() == number->dtype &&
                      tensor.device() == number->device,
                  "checkpoint: saved tensor ", i, " was ", number->dtype, number->sizes, " on ",
                  number->device, " in forward and is ", tensor.scalar_type(), tensor.sizes(), " on ",
                  tensor.device(), " in backward: the function has to do the same both times");
      number->values[pass] = tensor;
    }
    if (frame.early_stop && seen >= frame.numbers.size()) throw Stop();
    return std::make_shared<Itself>(tensor);
  }

  Frame& frame;
  const int pass;
  size_t seen = 0;
};

struct Replay {
  explicit Replay(OperatorTape* tape) : tape(tape) {
    if (tape) tape->replay();
  }
  ~Replay() {
    if (tape) tape->end();
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;
  OperatorTape* tape;
};

Tensor Number::unpack() { return frame->value(*this); }

Tensor Frame::value(Number& number) {
  const int pass = torch::autograd::get_current_graph_task_id();
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (!number.values.contains(pass)) run_again(pass);
  // An autograd node usually unpacks a saved tensor once, so the recomputed tensor is dropped. If the node
  // unpacks it again, the function runs again.
  const auto found = number.values.find(pass);
  Tensor value = found->second;
  number.values.erase(found);
  return value;
}

void Frame::run_again(int pass) {
  std::vector<Tensor> arguments;
  for (const auto& input : inputs) arguments.push_back(input.unpack());
  // When the current backward pass ends, free the recomputed tensors that the pass did not use.
  if (pass >= 0) {
    torch::autograd::Engine::get_default_engine().queue_callback([pass, weak = weak_from_this()] {
      const auto frame = weak.lock();
      if (!frame) return;
      for (const auto& one : frame->numbers) {
        if (const auto number = one.lock()) number->values.erase(pass);
      }
    });
  }
  const auto hooks = std::make_shared<SecondRun>(*this, pass);
  // Both runs must save the same number of tensors only if the first run has ended and early_stop is off.
  // More tensors may be saved by a second run inside the first run, or by a function that catches the
  // exception Stop.
  const bool exact = complete && !early_stop;
  std::vector<Tensor> changing = buffers_of();
  changing.insert(changing.end(), buffers.begin(), buffers.end());
  {
    const at::AutoGradMode gradients(true);
    const NoTape no_outer_tape;
    const Replay replay(tape.get());
    const AutocastGuard autocast_as_then(autocast);
    const RngGuard rng_after(rng);
    rng.restore();
    const HooksGuard guard("checkpoint", hooks);
    KeptBuffersGuard buffers_guard(changing);
    const KeptResultsRun second(kept, /*is_second=*/true);
    try {
      again(arguments);
    } catch (const Stop&) {
    }
    buffers_guard.done();
  }
  TORCH_CHECK(exact ? hooks->seen == numbers.size() : hooks->seen >= numbers.size(),
              "checkpoint: the function saved ", numbers.size(), " tensors in forward and ", hooks->seen,
              " in backward: it has to do the same both times");
}

}  // namespace activations

namespace detail {

using at::Tensor;

using namespace activations;

struct CheckpointRun::Scope {
  explicit Scope(const std::shared_ptr<Frame>& frame) : frame(frame), tape(frame->tape) {
    guard.emplace("checkpoint", std::make_shared<FirstRun>(frame));
    first.emplace(frame->kept, /*is_second=*/false);
    if (tape) tape->record();
  }
  ~Scope() {
    first.reset();
    guard.reset();
    if (tape && !finished) tape->abandon();
  }
  void finish() {
    // Remove the hooks of this checkpoint before tape->end(). end() saves the stored operator results as
    // saved tensors, which must go to the hooks that are active around the checkpoint.
    first.reset();
    guard.reset();
    frame->complete = true;
    finished = true;
    if (tape) tape->end();
  }
  bool finished = false;
  const std::shared_ptr<Frame> frame;
  const c10::intrusive_ptr<OperatorTape> tape;
  std::optional<HooksGuard> guard;
  std::optional<KeptResultsRun> first;
};

CheckpointRun::CheckpointRun(const CheckpointOptions& options, const std::vector<Tensor>& inputs,
                             RunAgain again, BuffersOf buffers) {
  if (!c10::GradMode::is_enabled()) return;
  scope_ =
      std::make_unique<Scope>(std::make_shared<Frame>(options, inputs, std::move(again), std::move(buffers)));
}

void CheckpointRun::finish() {
  if (scope_) scope_->finish();
}

CheckpointRun::~CheckpointRun() = default;

void check_segments(int64_t segments, int64_t count) {
  TORCH_CHECK(segments >= 1 && segments <= count,
              "checkpoint_sequential: segments: expected 1 to the number of functions (", count,
              "), received ", segments);
}

}  // namespace detail
}  // namespace shoestring
