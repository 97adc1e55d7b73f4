// Every operator that has no implementation of its own here. It runs the CPU kernel in the thread of the
// current stream, over the kernels' addresses of the tensors. The host only computes the shapes of the
// results, by the operator's Meta implementation, and goes on.

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "fallback.h"
#include "generator.h"
#include "streams.h"
#include "tensors.h"

namespace simdev {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

const c10::Device kCpu(c10::kCPU);
const c10::Device kMeta(c10::kMeta);

std::atomic<int64_t> waits{0};

// Returns a value with `f` applied to each of its tensors, and each device replaced by `device`.
template <class F>
IValue mapped(const IValue& value, c10::Device device, const F& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& t : value.toTensorVector()) all.push_back(f(t));
    return all;
  }
  if (value.isList() && value.toList().elementType()->isSubtypeOf(*c10::OptionalType::ofTensor())) {
    c10::List<std::optional<Tensor>> all;
    for (const IValue& e : value.toListRef())
      all.push_back(e.isTensor() && e.toTensor().defined() ? std::optional(f(e.toTensor())) : std::nullopt);
    return all;
  }
  if (value.isDevice()) return device;
  return value;
}

template <class F>
void each_tensor(const IValue& value, const F& f) {
  mapped(value, kCpu, [&](const Tensor& t) { return f(t), t; });
}

// Names of operators live as long as the process.
const char* name_of(const c10::OperatorHandle& op) {
  static auto& mutex = *new std::mutex;
  static auto& names = *new std::unordered_map<c10::OperatorName, std::string>;
  const std::lock_guard lock(mutex);
  auto& name = names[op.operator_name()];
  if (name.empty()) name = toString(op.operator_name());
  return name.c_str();
}

bool is_write(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// A call of an operator: its arguments on the stack, and what the host can say about its results.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack), name_(name_of(op)), count_(schema_.arguments().size()),
        device_(device_of_arguments()), guard_(device_) {
    check_devices();
  }

  void run() {
    for (const auto& result : schema_.returns()) {
      if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return make_views();
    }
    resize_outputs();
    std::vector<IValue> arguments = kernel_arguments();
    find_results();
    if (infer_results()) {
      add_to_stream(std::move(arguments));
    } else {
      run_and_wait(std::move(arguments));
    }
    finish(std::move(results_));
  }

 private:
  const IValue& argument(size_t i) const { return stack_[stack_.size() - count_ + i]; }
  const c10::Argument& formal(size_t i) const { return schema_.arguments()[i]; }

  c10::Device device_of_arguments() const {
    std::optional<c10::Device> found;
    for (size_t i = 0; i < count_; ++i) {
      if (argument(i).isDevice() && argument(i).toDevice().type() == kType && !found)
        found = argument(i).toDevice();
      each_tensor(argument(i), [&](const Tensor& t) {
        if (is_on_device(t) && !found) found = t.device();
      });
    }
    const c10::Device current(kType, static_cast<c10::DeviceIndex>(current_device()));
    return found && found->has_index() ? *found : current;
  }

  // As on a GPU, all tensors must be on one device, except numbers and indices.
  void check_devices() const {
    if (op_.schema().name().rfind("aten::", 0) != 0) return;
    const bool indexes = op_.schema().name().find("index") != std::string::npos;
    for (size_t i = 0; i < count_; ++i) {
      each_tensor(argument(i), [&](const Tensor& t) {
        const bool allowed = t.device() == device_ || t.dim() == 0 || (t.is_cpu() && indexes);
        TORCH_CHECK(allowed, "simdev: ", name_, ": ", formal(i).name(),
                    ": expected all tensors on one device, ", device_, ", received one on ", t.device());
      });
    }
  }

  // The tensors as the Meta implementation gets them. Numbers stay, since they take part in type promotion.
  IValue meta(const IValue& value) const {
    if (value.isGenerator()) return IValue();
    return mapped(value, kMeta, [](const Tensor& t) {
      if (!is_on_device(t) && t.dim() == 0) return t;
      return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(kMeta));
    });
  }
  Stack infer() const {
    Stack stack;
    for (size_t i = 0; i < count_; ++i) stack.push_back(meta(argument(i)));
    // Kernels may return references to their arguments, and boxed calls drop the arguments first.
    const Stack kept = stack;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    return stack;
  }

  // Views read nothing, so they are made at once: the CPU's view of the same bytes says where they lie.
  void make_views() {
    std::optional<Tensor> base;
    Stack stack;
    for (size_t i = 0; i < count_; ++i) {
      stack.push_back(mapped(argument(i), kCpu, [&](const Tensor& t) {
        if (!base) base = t;
        return is_on_device(t) ? for_view(t) : t;
      }));
    }
    const Stack kept = stack;
    op_.callBoxed(&stack);
    TORCH_CHECK(base, "simdev: ", name_, ": expected a tensor");
    const void* const storage = base->unsafeGetTensorImpl()->storage().data();
    for (IValue& value : stack) {
      value = mapped(value, device_, [&](const Tensor& view) {
        Tensor t = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(base->storage()), base->key_set(), view.dtype());
        const int64_t bytes = storage == nullptr || view.numel() == 0
                                  ? view.storage_offset() * static_cast<int64_t>(view.element_size())
                                  : static_cast<const char*>(view.const_data_ptr()) - kernel_address(storage);
        t.unsafeGetTensorImpl()->set_storage_offset(bytes / static_cast<int64_t>(view.element_size()));
        t.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides());
        return t;
      });
    }
    finish(std::move(stack));
  }

  // An argument `out` without elements gets its size from the operator.
  void resize_outputs() {
    std::vector<size_t> empty;
    for (size_t i = 0; i < count_; ++i) {
      if (formal(i).is_out() && argument(i).isTensor() && argument(i).toTensor().numel() == 0)
        empty.push_back(i);
    }
    if (empty.empty()) return;
    std::vector<IValue> arguments;
    for (size_t i = 0; i < count_; ++i) arguments.push_back(meta(argument(i)));
    Stack stack = arguments;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    for (const size_t i : empty)
      at::native::resize_output(argument(i).toTensor(), arguments[i].toTensor().sizes());
  }

  // The arguments as the kernel gets them, and the bytes that it accesses.
  std::vector<IValue> kernel_arguments() {
    bool has_generator = false;
    std::vector<IValue> arguments;
    for (size_t i = 0; i < count_; ++i) {
      const bool writes = is_write(formal(i));
      if (argument(i).isGenerator() || formal(i).type()->str().find("Generator") != std::string::npos) {
        const at::Generator given = argument(i).isGenerator() ? argument(i).toGenerator() : at::Generator();
        draw_.emplace(given, device_.index(), name_);
        arguments.emplace_back(draw_->cpu_generator());
        has_generator = true;
        continue;
      }
      arguments.push_back(mapped(argument(i), kCpu, [&](const Tensor& t) {
        if (is_on_device(t)) {
          accesses_.push_back(range_of(t, writes));
          return for_kernel(t);
        }
        writes_host_ |= writes;
        if (writes) return t;
        Tensor copy = t.clone();  // the host may change the tensor
        if (t.unsafeGetTensorImpl()->is_wrapped_number())
          copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        return copy;
      }));
    }
    TORCH_CHECK(has_generator || !op_.hasTag(at::Tag::nondeterministic_seeded), "simdev: ", name_,
                " takes no generator, so its random numbers would be those of the host");
    return arguments;
  }

  // The results are arguments that were written, or stay None for new tensors.
  void find_results() {
    for (const auto& result : schema_.returns()) {
      IValue found;
      for (size_t i = 0; i < count_ && result.alias_info() != nullptr; ++i) {
        if (formal(i).alias_info() != nullptr && *formal(i).alias_info() == *result.alias_info())
          found = argument(i);
      }
      results_.push_back(std::move(found));
    }
  }

  // Makes the new tensors among the results. Returns false if their shapes depend on data.
  bool infer_results() {
    if (writes_host_) return false;
    bool makes_tensors = false;
    for (const auto& result : schema_.returns()) {
      if (result.alias_info() != nullptr) continue;
      const auto& type = *result.type();
      if (!type.isSubtypeOf(*c10::TensorType::get()) && !type.isSubtypeOf(*c10::ListType::ofTensors()))
        return false;  // a number
      makes_tensors = true;
    }
    if (!makes_tensors) return true;
    if (!op_.hasKernelForDispatchKey(c10::DispatchKey::Meta) &&
        !op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
      return false;
    Stack inferred;
    try {
      inferred = infer();
    } catch (const std::exception&) {  // implementations in Python raise exceptions of their own
      return false;
    }
    // For 16-bit rows, the Meta implementations of norms return statistics in fp32, and the CPU's in 16 bits.
    const bool is_norm =
        schema_.name() == "aten::native_layer_norm" || schema_.name() == "aten::native_group_norm";
    const auto statistics = is_norm ? statistics_dtype() : at::kFloat;
    for (size_t i = 0; i < results_.size(); ++i) {
      if (schema_.returns()[i].alias_info() != nullptr) continue;
      results_[i] = mapped(inferred[i], device_, [&](const Tensor& t) {
        return empty_as(is_norm && i > 0 ? t.to(statistics) : t, device_);
      });
    }
    return true;
  }

  // Returns the dtype of the mean and the reciprocal deviation that a norm on the CPU returns.
  at::ScalarType statistics_dtype() const {
    const auto dtype = argument(0).toTensor().scalar_type();
    for (size_t i = 1; i < count_; ++i) {
      if (argument(i).isTensor() && argument(i).toTensor().defined() &&
          argument(i).toTensor().scalar_type() != dtype)
        return at::kFloat;  // the weights have another dtype than the rows
    }
    return dtype;
  }

  void add_to_stream(std::vector<IValue> arguments) {
    std::vector<IValue> outputs;
    for (size_t i = 0; i < results_.size(); ++i) {
      if (schema_.returns()[i].alias_info() != nullptr) {
        outputs.emplace_back();
        continue;
      }
      outputs.push_back(mapped(results_[i], kCpu, [&](const Tensor& t) {
        accesses_.push_back(range_of(t, true));
        return for_kernel(t);
      }));
    }
    enqueue_call([op = op_, arguments = std::move(arguments), outputs = std::move(outputs)]() mutable {
      const auto kept = arguments;
      op.callBoxed(&arguments);
      const auto deliver = [](const Tensor& to, const Tensor& from) {
        TORCH_CHECK(to.sizes() == from.sizes() && to.scalar_type() == from.scalar_type(), "expected ",
                    to.sizes(), " of ", to.scalar_type(), " as the Meta implementation says, received ",
                    from.sizes(), " of ", from.scalar_type());
        to.copy_(from);
      };
      for (size_t i = 0; i < outputs.size(); ++i) {
        if (outputs[i].isTensor() && outputs[i].toTensor().defined()) {
          deliver(outputs[i].toTensor(), arguments[i].toTensor());
        } else if (outputs[i].isTensorList()) {
          const auto to = outputs[i].toTensorVector(), from = arguments[i].toTensorVector();
          for (size_t k = 0; k < to.size(); ++k) deliver(to[k], from[k]);
        }
      }
    });
  }

  // A GPU's kernel might need no wait here, so the host's clock learns nothing from it.
  void run_and_wait(std::vector<IValue> arguments) {
    ++waits;
    auto values = std::make_shared<Stack>(std::move(arguments));
    auto error = std::make_shared<std::exception_ptr>();
    const Position position = enqueue_call([op = op_, values, error] {
      try {
        const Stack kept = *values;
        op.callBoxed(values.get());
      } catch (...) {
        *error = std::current_exception();
      }
    });
    wait_silently(position);
    check_error();
    if (*error) std::rethrow_exception(*error);
    for (size_t i = 0; i < results_.size(); ++i) {
      if (!results_[i].isNone()) continue;
      results_[i] = mapped((*values)[i], device_, [&](const Tensor& made) {
        Tensor t = empty_as(made, device_);
        enqueue(current_stream(device_.index()),
                {name_, [to = for_kernel(t), made] { to.copy_(made); }, {range_of(t, true)}});
        return t;
      });
    }
  }

  Position enqueue_call(std::function<void()> run) {
    if (draw_) {
      run = [draw = *draw_, run = std::move(run)] {
        draw.wait_for_earlier();
        run();
      };
    }
    const Position position =
        enqueue(current_stream(device_.index()), {name_, std::move(run), std::move(accesses_)});
    if (draw_) draw_->set_position(position);
    return position;
  }

  void finish(Stack results) {
    torch::jit::drop(stack_, count_);
    for (IValue& value : results) stack_.push_back(std::move(value));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  const char* const name_;
  const size_t count_;
  const c10::Device device_;
  const c10::OptionalDeviceGuard guard_;
  std::vector<Range> accesses_;
  std::vector<IValue> results_;
  std::optional<Draw> draw_;
  bool writes_host_ = false;
};

// shoestring's own operators have host functions for CUDA, which launch emulated kernels. The accesses of the
// kernels are those of the operator: what its schema says, and its results.
void run_host_function(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  std::optional<c10::Device> device;
  Operation before, after;
  before.name = after.name = name_of(op);
  for (size_t i = 0; i < arguments.size(); ++i) {
    each_tensor((*stack)[stack->size() - arguments.size() + i], [&](const Tensor& t) {
      if (!is_on_device(t)) return;
      if (!device) device = t.device();
      before.accesses.push_back(range_of(t, is_write(arguments[i])));
    });
  }
  const int stream = current_stream(device ? device->index() : current_device());
  before.run = after.run = [] {};
  enqueue(stream, std::move(before));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CUDA), stack);
  const size_t results = op.schema().returns().size();
  for (size_t i = 0; i < results; ++i) {
    each_tensor((*stack)[stack->size() - results + i], [&](const Tensor& t) {
      if (is_on_device(t)) after.accesses.push_back(range_of(t, true));
    });
  }
  enqueue(stream, std::move(after));
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const bool emulates = config().emulate && op.operator_name().getNamespace() == "shoestring" &&
                        op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  if (emulates) return run_host_function(op, stack);
  Call(op, *stack).run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

int64_t prefer_cpu_kernels(const std::string& name_space) {
  static auto& libraries = *new std::vector<std::unique_ptr<torch::Library>>;
  libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, name_space,
                                                       c10::DispatchKey::PrivateUse1, __FILE__, __LINE__));
  int64_t count = 0;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.getNamespace() != name_space) continue;
    const bool has_composite = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                               op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || !has_composite)
      continue;
    std::string full = name.name.substr(name_space.size() + 2);
    if (!name.overload_name.empty()) full += "." + name.overload_name;
    libraries.back()->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    ++count;
  }
  return count;
}

int64_t count_waits() { return waits; }

}  // namespace simdev

namespace at::native {
// Attention is composed of other operators.
static int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                                double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}  // namespace at::native
