#include "checkpoint/operator_tape.h"

// Records the operator calls in the first run of a checkpointed function, and returns the recorded results in
// the second run.

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <shoestring/checkpoint/checkpoint.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <deque>
#include <map>
#include <optional>
#include <utility>

namespace shoestring::activations {

struct OperatorTape::Run {
  OperatorTape* tape;  // records this run's operator calls; null if no tape may record them
  bool recording;
  int pass = torch::autograd::get_current_graph_task_id();
  // for each operator, the number of its calls so far in a second run
  std::unordered_map<const Operator*, size_t> played = {};
};

namespace {

// The dispatch key on which a fallback sees all operator calls. It comes between autograd and the backends,
// and PyTorch 2.11 to 2.15 have no kernel for it. PyTorch 2.11 calls Python's dispatch modes after this key.
// PyTorch 2.15 calls them before it, so modes also see calls whose results come from the tape.
constexpr auto kKey = c10::DispatchKey::Fake;

// The runs of checkpointed functions that are active on this thread. Only the innermost run sees operator
// calls. The container is a deque, because push and pop must not move the other elements.
thread_local std::deque<OperatorTape::Run> run_stack;

OperatorTape::Run* top_run() {
  return run_stack.empty() || run_stack.back().tape == nullptr ? nullptr : &run_stack.back();
}

// The watches that are active on this thread. All of them see operator calls.
thread_local std::vector<OperatorWatch*> watches;

void include_key_if_used() {
  c10::impl::tls_set_dispatch_key_included(kKey, top_run() != nullptr || !watches.empty());
}

void push_run(OperatorTape* tape, bool recording) {
  run_stack.push_back({tape, recording});
  include_key_if_used();
}

void pop_run() {
  run_stack.pop_back();
  include_key_if_used();
}

void see(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* arguments) {
  // Exclude the dispatch key during the call, so that operators called inside this operator are not recorded.
  const c10::impl::ExcludeDispatchKeyGuard once(kKey);
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (!watches.empty()) {
    const auto inputs =
        at::ArrayRef<c10::IValue>(*arguments).slice(arguments->size() - op.schema().arguments().size());
    for (OperatorWatch* watch : watches) watch->before(op, inputs);
  }
  OperatorTape::Run* run = top_run();
  // Calls on a thread without a run are not recorded: the thread has inherited the dispatch key from another
  // thread. Calls of a backward pass inside the function are not recorded either. In the first run, that pass
  // may use another thread than in the second run, so its calls would not match.
  if (run == nullptr || run->pass != torch::autograd::get_current_graph_task_id())
    return op.redispatchBoxed(below, arguments);
  run->tape->call(*run, op, below, arguments);
}

// Registers the fallback for the dispatch key Fake when the process makes its first tape or watch. A process
// without them leaves the key free for other libraries. The registration stays until the process ends.
void claim_key() {
  [[maybe_unused]] static const torch::Library& library = []() -> torch::Library& {
    auto& claimed = *new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    claimed.fallback(torch::CppFunction::makeFromBoxedFunction<&see>());
    return claimed;
  }();
}

// Named groups of operators for `keep`. Their results are expensive to compute, and small compared with the
// tensors that a block saves.
const std::map<std::string, std::set<std::string>>& groups() {
  static const std::map<std::string, std::set<std::string>> all{
      {"attention",
       {"shoestring::attention", "shoestring::attention_with_lse", "shoestring::_attention_forward",
        "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention_forward", "aten::_efficient_attention_forward"}},
      {"products",
       {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm",
        "aten::convolution", "shoestring::linear_group", "shoestring::quantized_linear",
        "shoestring::lora_linear", "shoestring::lora_linear_group",
        "shoestring::_lora_linear_group_forward"}}};
  return all;
}

// Maps the name of an operator to the operator that runs in its place if a result needs a gradient. If `keep`
// names the first one, the results of the second one are kept.
const std::multimap<std::string, std::string>& computed_by() {
  static const std::multimap<std::string, std::string> all{
      {"shoestring::add_layer_norm", "shoestring::_layer_norm_forward"},
      {"shoestring::add_rms_norm", "shoestring::_rms_norm_forward"},
      {"shoestring::attention", "shoestring::attention_with_lse"},
      {"shoestring::attention", "shoestring::_attention_forward"},
      {"shoestring::attention_with_lse", "shoestring::_attention_forward"},
      {"shoestring::cross_entropy", "shoestring::_cross_entropy_rows"},
      {"shoestring::cross_entropy_with_stats", "shoestring::_cross_entropy_rows"},
      {"shoestring::layer_norm", "shoestring::_layer_norm_forward"},
      {"shoestring::linear", "shoestring::linear_group"},
      {"shoestring::linear_cross_entropy", "shoestring::_linear_cross_entropy_rows"},
      {"shoestring::linear_cross_entropy_shard", "shoestring::_linear_cross_entropy_rows"},
      {"shoestring::linear_cross_entropy_with_stats", "shoestring::_linear_cross_entropy_rows"},
      {"shoestring::linear_distillation", "shoestring::_linear_distillation_rows"},
      {"shoestring::lora_linear", "shoestring::_lora_linear_group_forward"},
      {"shoestring::lora_linear_group", "shoestring::_lora_linear_group_forward"},
      {"shoestring::rms_norm", "shoestring::_rms_norm_forward"},
  };
  return all;
}

// Returns a tensor that shares the data and the version counter of `tensor` but belongs to no autograd graph.
at::Tensor detached(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(
      impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

// Returns a copy of `value`, a tensor, a list of tensors or anything else, in which by(tensor) replaces each
// defined tensor.
template <class F>
c10::IValue replaced(const c10::IValue& value, const F& by) {
  if (value.isTensor()) return value.toTensor().defined() ? by(value.toTensor()) : value;
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector())
    list.push_back(tensor.defined() ? by(tensor) : tensor);
  return list;
}

c10::IValue detached(const c10::IValue& value) {
  return replaced(value, [](const at::Tensor& tensor) { return detached(tensor); });
}

// Returns the operator names in `keep`. The name of a group is replaced by the names of its operators, and
// tags are left out.
std::set<std::string> operators_of(const std::vector<std::string>& keep) {
  std::set<std::string> operators;
  for (const auto& name : keep) {
    TORCH_CHECK(!name.empty(),
                "checkpoint: keep: expected names of operators, groups or tags, received an empty one");
    const auto group = groups().find(name);
    if (group != groups().end()) operators.insert(group->second.begin(), group->second.end());
    if (name.find("::") == std::string::npos) continue;
    const auto dot = name.find('.');
    const std::string overload =
        dot == std::string::npos || name.substr(dot) == ".default" ? "" : name.substr(dot + 1);
    bool is_operator = false;
    for (const auto& registered : c10::Dispatcher::singleton().getAllOpNames()) {
      is_operator |= registered.name == name.substr(0, dot) &&
                     (dot == std::string::npos || registered.overload_name == overload);
    }
    TORCH_CHECK(
        is_operator,
        "checkpoint: keep: expected \"attention\", \"products\", a tag, or an operator such as \"aten::mm\", "
        "received \"",
        name, "\", which is no operator");
    operators.insert(name);
    const auto [first, last] = computed_by().equal_range(name.substr(0, dot));
    for (auto inner = first; inner != last; ++inner) operators.insert(inner->second);
  }
  return operators;
}

uint32_t version(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;  // inference tensors have no version counter
}

std::vector<uint32_t> versions(at::ArrayRef<c10::IValue> values) {
  std::vector<uint32_t> all;
  each_tensor(values, [&](const at::Tensor& tensor) { all.push_back(version(tensor)); });
  return all;
}

std::vector<int64_t> sizes_of(at::ArrayRef<c10::IValue> values) {
  std::vector<int64_t> all;
  each_tensor(values, [&](const at::Tensor& tensor) {
    all.insert(all.end(), tensor.sizes().begin(), tensor.sizes().end());
    all.push_back(-static_cast<int64_t>(tensor.scalar_type()) - 1);
  });
  return all;
}

}  // namespace

void OperatorWatch::watch() {
  claim_key();
  watches.push_back(this);
  include_key_if_used();
}

void OperatorWatch::unwatch() {
  watches.pop_back();
  include_key_if_used();
}

NoTape::NoTape() { push_run(nullptr, /*recording=*/false); }

NoTape::~NoTape() { pop_run(); }

OperatorTape::OperatorTape(const std::vector<std::string>& keep) : names_(keep.begin(), keep.end()) {
  claim_key();
  names_.merge(operators_of(keep));
}

void OperatorTape::record() {
  operators_.clear();
  recorded_ = false;
  push_run(this, /*recording=*/true);
}

void OperatorTape::replay() { push_run(names_.empty() ? nullptr : this, /*recording=*/false); }

void OperatorTape::abandon() {
  const bool recording = run_stack.back().recording;
  pop_run();
  if (!recording) return;
  made_.clear();
  operators_.clear();
}

void OperatorTape::end() {
  const bool recording = run_stack.back().recording;
  pop_run();
  if (!recording) return;
  made_.clear();
  for (auto& [handle, op] : operators_) {
    for (Result& result : op.calls) save(handle.schema().name(), result);
  }
  recorded_ = true;
}

void OperatorTape::check_unchanged(const std::string& op, const Result& result) {
  TORCH_CHECK(versions(result.values) == result.versions, "checkpoint: the result of ", op,
              " is kept, but was modified in place; keep the result of the later operator, or modify a copy");
}

void OperatorTape::save(const std::string& op, Result& result) {
  check_unchanged(op, result);
  const at::Tensor nothing = at::empty({0});
  for (auto& value : result.values) {
    value = replaced(value, [&](const at::Tensor& tensor) {
      result.saved.emplace_back(tensor, /*is_output=*/false);
      return nothing;
    });
  }
}

OperatorTape::Operator& OperatorTape::operator_of(const c10::OperatorHandle& handle) {
  const auto found = operators_.find(handle);
  if (found != operators_.end()) return found->second;
  const auto& schema = handle.schema();
  bool aliasing = false;
  for (const auto& result : schema.returns()) aliasing |= result.alias_info() != nullptr;
  for (const auto& argument : schema.arguments())
    aliasing |= argument.alias_info() && argument.alias_info()->isWrite();
  const std::string full =
      schema.name() + "." + (schema.overload_name().empty() ? "default" : schema.overload_name());
  const bool is_kept = names_.contains(schema.name()) || names_.contains(full);
  TORCH_CHECK(!is_kept || !aliasing, "checkpoint: keep: ", full,
              " returns a view of its argument or modifies it in place, so there is no result to keep; name "
              "the operator before it");
  return operators_.emplace(handle, Operator{is_kept, aliasing, {}}).first->second;
}

void OperatorTape::call(Run& run, const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                        torch::jit::Stack* arguments) {
  Operator& op = operator_of(handle);
  if (op.aliasing) return handle.redispatchBoxed(keys, arguments);
  const size_t count = handle.schema().arguments().size();
  const auto inputs = at::ArrayRef<c10::IValue>(*arguments).slice(arguments->size() - count);

  if (!run.recording) {
    const size_t number = run.played[&op]++;
    if (number >= op.calls.size() || op.calls[number].values.empty())
      return handle.redispatchBoxed(keys, arguments);
    Result& result = op.calls[number];
    TORCH_CHECK(sizes_of(inputs) == result.arguments, "checkpoint: ", handle.schema().name(),
                " is kept, and received arguments of other sizes or dtypes in backward than in forward: the "
                "function has to do "
                "the same both times");
    if (!recorded_) check_unchanged(handle.schema().name(), result);
    std::vector<c10::IValue> handed_out;
    size_t next = 0;
    for (const auto& value : result.values) {
      handed_out.push_back(replaced(value, [&](const at::Tensor& tensor) {
        return detached(recorded_ ? result.saved[next++].unpack() : tensor);
      }));
    }
    if (result.rng) result.rng->restore();
    torch::jit::drop(*arguments, count);
    arguments->insert(arguments->end(), handed_out.begin(), handed_out.end());
    return;
  }

  Result result{{}, {}, {}, sizes_of(inputs), std::nullopt};
  const bool random = handle.hasTag(at::Tag::nondeterministic_seeded);
  std::vector<at::Tensor> tensors;
  if (random) each_tensor(inputs, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  handle.redispatchBoxed(keys, arguments);
  const auto results =
      at::ArrayRef<c10::IValue>(*arguments).slice(arguments->size() - handle.schema().returns().size());
  if (op.is_kept) {
    for (const auto& value : results) result.values.push_back(detached(value));
    result.versions = versions(results);
  }
  if (random) result.rng = RngState(tensors);
  op.calls.push_back(std::move(result));
  if (!op.is_kept) note_made(op, results);
}

void OperatorTape::note_made(Operator& op, at::ArrayRef<c10::IValue> values) {
  if (values.empty() || !values[0].isTensor()) return;
  const at::Tensor& first = values[0].toTensor();
  if (!first.defined() || !first.has_storage()) return;
  Made made{&op,
            op.calls.size() - 1,
            first.storage().getWeakStorageImpl(),
            first.sizes().vec(),
            first.strides().vec(),
            first.storage_offset(),
            {}};
  for (const auto& value : values.slice(1)) made.others.push_back(detached(value));
  size_t bytes = 0;
  each_tensor(made.others, [&](const at::Tensor& tensor) { bytes += tensor.nbytes(); });
  // Until the function ends, tag_activation may request that this call's results be stored, so all results
  // except the first must be held. If these take more bytes than the first result, they are not held, and
  // tag_activation has no effect on this call.
  if (bytes > first.nbytes()) return;
  made_.push_back(std::move(made));
}

void OperatorTape::tag(const at::Tensor& x, const std::string& tag) {
  if (!names_.contains(tag) || !x.has_storage()) return;
  for (const Made& made : made_) {
    const auto storage = made.storage.lock();
    if (storage.get() != x.storage().unsafeGetStorageImpl()) continue;
    TORCH_CHECK(version(x) == 0, "tag_activation: ", tag,
                ": expected an activation that was not modified in place; tag a copy, or the tensor before "
                "the modification");
    const at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor first = at::as_strided(detached(x), made.sizes, made.strides, made.offset);
    first.unsafeGetTensorImpl()->set_version_counter(x.unsafeGetTensorImpl()->version_counter());
    Result& result = made.op->calls[made.call];
    result.values = {first};
    result.values.insert(result.values.end(), made.others.begin(), made.others.end());
    result.versions = versions(result.values);
    return;
  }
}

}  // namespace shoestring::activations

namespace shoestring {

at::Tensor tag_activation(const at::Tensor& x, const std::string& tag) {
  if (const auto* run = activations::top_run(); run != nullptr && run->recording) run->tape->tag(x, tag);
  return x;
}

}  // namespace shoestring

TORCH_LIBRARY_IMPL(shoestring, CompositeImplicitAutograd, m) {
  m.impl("tag_activation",
         [](const at::Tensor& x, std::string tag) { return shoestring::tag_activation(x, tag); });
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_checkpoint_operators", [](const std::vector<std::string>& keep) {
    const auto operators = shoestring::activations::operators_of(keep);
    return std::vector<std::string>(operators.begin(), operators.end());
  });
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  using shoestring::activations::OperatorTape;
  m.class_<OperatorTape>("OperatorTape")
      .def(torch::init<std::vector<std::string>>())
      .def("record", &OperatorTape::record)
      .def("replay", &OperatorTape::replay)
      .def("end", &OperatorTape::end)
      .def("abandon", &OperatorTape::abandon);
}
