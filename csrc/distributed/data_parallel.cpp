// Data parallelism by c10d::Reducer. No other file calls its constructor, whose arguments change between
// versions of LibTorch.

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <shoestring/distributed/distributed.h>
#include <shoestring/runs/training.h>

#include "distributed/backends.h"
#include "distributed/compressor.h"

namespace shoestring::distributed {
namespace {

using at::Tensor;

constexpr const char* kSame = "comparison of the parameters of all ranks";

std::vector<std::string> lines_of(const std::vector<uint8_t>& bytes) {
  std::istringstream text(std::string(bytes.begin(), bytes.end()));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

}  // namespace

void check_same(const GroupPtr& group, const TensorDict& tensors, const char* caller) {
  std::string text;  // a line for each tensor
  for (const auto& item : tensors)
    text += c10::str(item.key(), " ", item.value().sizes(), " ", item.value().scalar_type(), "\n");
  const auto hash = static_cast<int64_t>(std::hash<std::string>()(text));
  const auto number = at::TensorOptions(device_of(*group)).dtype(at::kLong);
  std::vector<Tensor> hash_here{at::full({1}, hash, number)};
  std::vector<std::vector<Tensor>> all(1);
  for (int i = 0; i < group->getSize(); ++i) all[0].push_back(at::empty({1}, number));
  wait_for(group, group->allgather(all, hash_here), kSame);
  int64_t differing = 0;
  for (int64_t rank = group->getSize() - 1; rank > 0; --rank)
    if (!all[0][rank].equal(all[0][0])) differing = rank;
  if (differing == 0) return;

  const auto store = group->getStore();
  const int64_t rank = group->getRank();
  const auto key = [&](int64_t of) { return c10::str("parameters/", of, "/", all[0][of].item<int64_t>()); };
  if (rank == 0 || rank == differing) store->set(key(rank), std::vector<uint8_t>(text.begin(), text.end()));
  const auto first = lines_of(store->get(key(0))), second = lines_of(store->get(key(differing)));
  const auto line_of = [](const std::vector<std::string>& lines, size_t i) {
    return i < lines.size() ? lines[i] : std::string("no more");
  };
  size_t i = 0;
  while (i < first.size() && i < second.size() && first[i] == second[i]) ++i;
  TORCH_CHECK(false, caller, ": module: expected the same parameters on all ranks; parameter ", i, " is ",
              line_of(first, i), " on rank 0 and ", line_of(second, i), " on rank ", differing);
}

namespace {

// Copies the tensors of rank 0 to all ranks, those of one dtype together.
void broadcast(const GroupPtr& group, const std::vector<Tensor>& tensors) {
  if (group->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<Tensor>> by_dtype;
  for (const Tensor& tensor : tensors)
    if (tensor.numel() > 0) by_dtype[tensor.scalar_type()].push_back(tensor.detach());
  try {
    for (const auto& [dtype, same_dtype] : by_dtype)
      c10d::broadcast_coalesced(group, same_dtype, 250 << 20, 0);
  } catch (const std::exception& error) {
    fail_collective(*group, error, "broadcast of the tensors of rank 0");
  }
}

// Returns the running statistics of normalisation layers, and the counters beside them. Forward changes them
// on each rank for itself. Other buffers, such as quantised weights, do not change.
std::vector<Tensor> statistics_of(const torch::nn::Module& module) {
  std::vector<Tensor> statistics;
  const auto add = [&](const torch::nn::Module& layer) {
    const auto buffers = layer.named_buffers(/*recurse=*/false);
    if (const Tensor* mean = buffers.find("running_mean"); mean == nullptr || !mean->defined()) return;
    for (const auto& item : buffers)
      if (item.value().defined()) statistics.push_back(item.value());
  };
  add(module);
  for (const auto& layer : module.modules(/*include_self=*/false)) add(*layer);
  return statistics;
}

// Averages the buckets of a Reducer in few bits.
class CompressHook final : public c10d::CommHookInterface {
 public:
  CompressHook(const GroupPtr& group, int64_t bits) : compressor_(group, bits) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    return compressor_.all_reduce(bucket.getBuffer(), bucket.getParameters(),
                                  static_cast<int64_t>(bucket.getIndex()), bucket.isLast());
  }
  Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  Compressor compressor_;
};

}  // namespace

void broadcast_tensors(const GroupPtr& group, const TensorDict& tensors, const char* caller) {
  check_same(group, tensors, caller);
  broadcast(group, tensors.values());
}

void broadcast_module(const torch::nn::Module& module, const GroupPtr& group) {
  TORCH_CHECK_VALUE(group.defined(), "broadcast_module: group: expected a process group, received none");
  broadcast_tensors(group, training_tensors(module, /*frozen=*/true), "broadcast_module");
}

struct DataParallel::Impl {
  Impl(const torch::nn::Module& module, GroupPtr ranks, const DataParallelOptions& options)
      : group(std::move(ranks)) {
    TORCH_CHECK_VALUE(group.defined(), "DataParallel: group: expected a process group, received none");
    TORCH_CHECK_VALUE(options.bucket_bytes() > 0, "DataParallel: bucket_bytes: expected a number above 0, ",
                      "received ", options.bucket_bytes());
    const TensorDict tensors = training_tensors(module, /*frozen=*/true);
    std::vector<Tensor> parameters;
    for (const auto& item : tensors) {
      if (!item.value().requires_grad()) {
        frozen.emplace_back(item.key(), item.value());
        continue;
      }
      names.push_back(item.key());
      parameters.push_back(item.value());
    }
    TORCH_CHECK_VALUE(!parameters.empty(), "DataParallel: module: expected parameters that require ",
                      "gradients, received none");
    const int64_t bits = bits_of(options.compress(), "DataParallel");
    for (size_t i = 0; bits > 0 && i < parameters.size(); ++i)
      check_compressible("DataParallel", parameters[i], names[i]);
    broadcast_tensors(group, tensors, "DataParallel");
    statistics = statistics_of(module);

    const auto cap = static_cast<size_t>(options.bucket_bytes());
    // The first bucket is small, so that the first reduction begins early.
    const auto first = std::min<size_t>(cap, c10d::kDefaultFirstBucketBytes);
    auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(parameters, {first, cap});
    std::reverse(buckets.begin(), buckets.end());  // backward computes the last layers first
    reducer = std::make_unique<c10d::Reducer>(
        parameters, std::move(buckets), group, std::vector<bool>(parameters.size(), false),
        static_cast<int64_t>(cap), options.find_unused(), options.gradient_as_bucket_view(),
        /*param_names=*/std::unordered_map<size_t, std::string>(), static_cast<int64_t>(first),
        /*skip_all_reduce_unused_params=*/false,
        /*use_python_reducer=*/false, std::vector<int64_t>{});
    finds_unused = options.find_unused();
    if (bits > 0) reducer->register_comm_hook(std::make_unique<CompressHook>(group, bits));
  }

  GroupPtr group;
  std::unique_ptr<c10d::Reducer> reducer;
  std::vector<std::string> names;  // names of the trained parameters
  std::vector<std::pair<std::string, Tensor>> frozen;
  std::vector<Tensor> statistics;  // statistics of normalisation layers
  bool finds_unused = false;
  int64_t steps = 0;
  std::recursive_mutex mutex;  // held during a backward
};

DataParallel::DataParallel(const torch::nn::Module& module, GroupPtr group,
                           const DataParallelOptions& options)
    : impl_(std::make_unique<Impl>(module, std::move(group), options)) {}
DataParallel::~DataParallel() = default;
DataParallel::DataParallel(DataParallel&&) noexcept = default;
DataParallel& DataParallel::operator=(DataParallel&&) noexcept = default;

const GroupPtr& DataParallel::group() const { return impl_->group; }

void DataParallel::backward(const at::Tensor& loss) {
  TORCH_CHECK_VALUE(loss.requires_grad(), "DataParallel: backward: loss: expected a tensor that requires ",
                    "gradients, received one that does not");
  const std::lock_guard lock(impl_->mutex);
  for (const auto& [name, tensor] : impl_->frozen)
    TORCH_CHECK(
        !tensor.requires_grad(),
        "DataParallel: module: expected gradients of the parameters that were trained at the beginning, "
        "received a module that trains ",
        name,
        ", too, whose gradient the ranks would not average. Make DataParallel with find_unused(true) "
        "while it requires gradients, and freeze it afterwards.");
  c10d::Reducer& reducer = *impl_->reducer;
  const int64_t step = ++impl_->steps;
  const std::vector<int64_t> before = reducer.get_backward_stats();
  try {
    if (reducer.should_rebuild_buckets()) reducer.rebuild_buckets();
    reducer.prepare_for_backward(impl_->finds_unused ? std::vector<Tensor>{loss} : std::vector<Tensor>{});
    loss.backward();
  } catch (const c10::OutOfMemoryError&) {
    throw;  // callers try smaller batches
  } catch (const std::exception& error) {
    fail_collective(*impl_->group, error, c10::str("DataParallel: backward ", step));
  }
  try {
    reducer.check_finalized();
  } catch (const std::exception&) {
    // The time of a parameter changes when its gradient is ready.
    const std::vector<int64_t> after = reducer.get_backward_stats();
    std::vector<std::string> missing;
    for (size_t i = 0; i < after.size(); ++i)
      if (after[i] == before[i]) missing.push_back(impl_->names[i]);
    TORCH_CHECK(false, "DataParallel: backward: loss: expected a loss that uses all trained parameters, ",
                "received one that does not use ", c10::Join(", ", missing),
                ". Freeze them before, or pass find_unused(true).");
  }
  broadcast(impl_->group, impl_->statistics);
}

}  // namespace shoestring::distributed
