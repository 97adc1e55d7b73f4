// Averages the weights of processes every few hundred steps, with an outer optimizer (arXiv 2311.08105), in
// fragments and while training goes on (arXiv 2501.18512).

#include "distributed/diloco.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>

#include <shoestring/optim/rules.h>

#include "distributed/backends.h"
#include "distributed/named_backend.h"
#include "optim/rule.h"

namespace shoestring::distributed {

using at::Tensor;

namespace detail {
namespace {

constexpr const char* kAverage = "average of the weights";

std::vector<int64_t> sizes_of(const std::vector<Tensor>& tensors) {
  std::vector<int64_t> sizes;
  for (const Tensor& tensor : tensors) sizes.push_back(tensor.numel());
  return sizes;
}

// Returns the tensors "<name>.0", "<name>.1" and so on.
std::vector<Tensor> numbered(const TensorDict& state, const std::string& name) {
  std::vector<Tensor> tensors;
  while (const Tensor* tensor = state.find(c10::str(name, ".", tensors.size()))) tensors.push_back(*tensor);
  return tensors;
}

}  // namespace

Averaging::Averaging(std::string name, std::vector<Tensor> parameters, GroupPtr group,
                     const DiLoCoOptions& options)
    : name_(std::move(name)), options_(options), bits_(bits_of(options.compress(), name_.c_str())),
      alpha_(options.alpha().value_or(options.overlap() > 0 ? 0.5 : 0.0)), params_(std::move(parameters)),
      group_(std::move(group)) {
  const auto check = [&](bool good, const char* argument, const std::string& expected, auto received) {
    TORCH_CHECK_VALUE(good, name_, ": ", argument, ": expected ", expected, ", received ", received);
  };
  check(group_.defined(), "group", "a process group", "none");
  check(options.every() >= 1, "every", "at least 1", options.every());
  check(options.lr() > 0, "lr", "a number above 0", options.lr());
  check(options.momentum() >= 0 && options.momentum() < 1, "momentum", "a number from 0 to below 1",
        options.momentum());
  check(options.fragments() >= 1 && options.fragments() <= options.every(), "fragments",
        c10::str("a number from 1 to every, ", options.every()), options.fragments());
  check(options.overlap() >= 0 && options.overlap() < options.every(), "overlap",
        c10::str("a number of steps from 0 to below every, ", options.every()), options.overlap());
  check(alpha_ >= 0 && alpha_ < 1, "alpha", "a number from 0 to below 1", alpha_);
  check(alpha_ == 0 || options.overlap() > 0, "alpha", "0 without overlap", alpha_);
  check(options.bucket_bytes() > 0, "bucket_bytes", "a number above 0", options.bucket_bytes());
  for (const Tensor& param : params_)
    TORCH_CHECK_TYPE(param.is_floating_point(), name_, ": parameters: expected floating-point dtypes, ",
                     "received one in ", param.scalar_type(), ". Leave it out.");
  deal_out((options.bucket_bytes() + 3) / 4);
  share();
}

void Averaging::use(std::vector<Tensor> parameters) {
  const auto alone = lock();
  params_ = std::move(parameters);
}

std::vector<std::vector<int64_t>> averaged_buckets(const std::vector<Tensor>& params,
                                                   int64_t bucket_elements) {
  std::vector<c10::Device> devices;  // in the order of their first parameters
  for (const Tensor& p : params)
    if (std::find(devices.begin(), devices.end(), p.device()) == devices.end()) devices.push_back(p.device());
  std::vector<std::vector<int64_t>> buckets;
  for (const c10::Device& device : devices) {
    std::vector<int64_t> open;
    int64_t elements = 0;
    for (size_t i = 0; i < params.size(); ++i) {
      if (params[i].device() != device) continue;
      open.push_back(static_cast<int64_t>(i));
      elements += params[i].numel();
      if (elements < bucket_elements) continue;
      buckets.push_back(std::exchange(open, {}));
      elements = 0;
    }
    if (elements > 0) buckets.push_back(std::move(open));
  }
  return buckets;
}

// Gives the largest parameters first, each to the smallest fragment. Layers of the same shapes go to the
// fragments in turn, so each fragment has layers of all depths.
void Averaging::deal_out(int64_t bucket_elements) {
  const int64_t count = options_.fragments();
  fragments_.resize(static_cast<size_t>(count));
  std::vector<size_t> order(params_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return params_[a].numel() > params_[b].numel(); });
  std::vector<int64_t> elements(fragments_.size());
  std::vector<std::vector<size_t>> owned(fragments_.size());
  for (const size_t i : order) {
    const auto least = std::min_element(elements.begin(), elements.end()) - elements.begin();
    elements[least] += params_[i].numel();
    owned[least].push_back(i);
  }
  for (int64_t f = 0; f < count; ++f) {
    Fragment& fragment = fragments_[f];
    fragment.due = (f + 1) * options_.every() / count % options_.every();
    std::sort(owned[f].begin(), owned[f].end());
    std::vector<Tensor> params;
    for (const size_t i : owned[f]) params.push_back(params_[i]);
    for (const auto& indices : averaged_buckets(params, bucket_elements)) {
      Bucket& bucket = fragment.buckets.emplace_back();
      for (const int64_t i : indices) bucket.params.push_back(owned[f][i]);
    }
  }
}

// Returns the weights of a bucket, (elements), fp32.
Tensor Averaging::flat(const Bucket& bucket) const {
  std::vector<Tensor> parts;
  for (const size_t i : bucket.params) parts.push_back(params_[i].detach().to(at::kFloat).flatten());
  return at::cat(parts);
}

// Mixes the averaged weights with `alpha` times those of this process, and writes them to the parameters.
void Averaging::give(const Bucket& bucket, double alpha) {
  int64_t begin = 0;
  for (const size_t i : bucket.params) {
    Tensor param = params_[i].detach();
    Tensor averaged = bucket.anchor.narrow(0, begin, param.numel()).view_as(param);
    begin += param.numel();
    param.copy_(alpha == 0 ? averaged : at::lerp(averaged, param.to(at::kFloat), alpha));
  }
}

// Sends how far this process has gone since the last average, against the direction of its steps.
void Averaging::begin(Fragment& fragment) {
  fragment.begun = steps_;
  const int64_t ranks = group_->getSize();
  for (size_t b = 0; b < fragment.buckets.size(); ++b) {
    Bucket& bucket = fragment.buckets[b];
    bucket.mean = bucket.anchor.clone();
    int64_t begin = 0;
    for (const size_t i : bucket.params) {
      const Tensor param = params_[i].detach();
      bucket.mean.narrow(0, begin, param.numel()).sub_(param.flatten());
      begin += param.numel();
    }
    if (ranks == 1) continue;
    if (fragment.compressor) {
      const auto index = static_cast<int64_t>(b);
      const bool is_last = b + 1 == fragment.buckets.size();
      // The anchor names the residual: local parts of DTensors may be other tensors in each step.
      bucket.future = options_.overlap() == 0
                          ? fragment.compressor->all_reduce(bucket.mean, {bucket.anchor}, index, is_last)
                          : fragment.compressor->begin(bucket.mean, {bucket.anchor}, index);
    } else {
      try {
        std::vector<Tensor> sum{bucket.mean};
        bucket.work = group_->allreduce(sum);
      } catch (const std::exception& error) {
        fail_collective(*group_, error, c10::str(name_, ": ", kAverage));
      }
      sent_ += 2 * (ranks - 1) * bucket.mean.numel() * 4 / ranks;
    }
  }
}

// Begins the second hop of an overlapped average in few bits. All ranks do so in the same step, so that they
// issue collectives in one order.
void Averaging::send_means(Fragment& fragment) {
  if (fragment.compressor && !fragment.is_second) fragment.compressor->send_means();
  fragment.is_second = true;
}

// Waits for the mean differences of all buckets, before any weight changes.
void Averaging::receive(Fragment& fragment) {
  if (fragment.is_received) return;
  if (fragment.compressor) {
    send_means(fragment);
    fragment.compressor->finish();
  }
  for (Bucket& bucket : fragment.buckets) {
    if (bucket.future) std::exchange(bucket.future, {})->waitAndThrow();
    if (!bucket.work) continue;
    wait_for(group_, std::exchange(bucket.work, {}), c10::str(name_, ": ", kAverage));
    bucket.mean.div_(group_->getSize());
  }
  fragment.is_received = true;
}

// Waits for an average, and takes an outer step with Nesterov's momentum. The weights become `alpha` times
// those of this process.
void Averaging::finish(Fragment& fragment, double alpha) {
  receive(fragment);
  for (Bucket& bucket : fragment.buckets) {
    Tensor mean = std::exchange(bucket.mean, Tensor());
    if (bucket.momentum.defined()) {
      bucket.momentum.mul_(options_.momentum()).add_(mean);
      mean.add_(bucket.momentum, options_.momentum());
    }
    bucket.anchor.sub_(mean, options_.lr());
    give(bucket, alpha);
  }
  ++fragment.averages;
  fragment.begun = -1;
  fragment.is_second = fragment.is_received = false;
}

bool Averaging::step() {
  const auto alone = lock();
  const at::NoGradGuard no_grad;
  ++steps_;
  bool is_changed = false;
  const int64_t overlap = options_.overlap();
  try {
    check_failure();
    for (Fragment& fragment : fragments_) {
      if (fragment.begun < 0) continue;
      const int64_t age = steps_ - fragment.begun;
      if (age == (overlap + 1) / 2) send_means(fragment);  // each hop has half the time
      if (age < overlap) continue;
      finish(fragment, alpha_);
      is_changed = true;
    }
    for (Fragment& fragment : fragments_) {
      if (steps_ % options_.every() != fragment.due) continue;
      begin(fragment);
      if (overlap > 0) continue;
      finish(fragment, 0);
      is_changed = true;
    }
  } catch (...) {
    abandon();
    throw;
  }
  return is_changed;
}

void Averaging::average() {
  const auto alone = lock();
  const at::NoGradGuard no_grad;
  try {
    for (Fragment& fragment : fragments_)
      if (fragment.begun >= 0) finish(fragment, alpha_);
    for (Fragment& fragment : fragments_) {
      begin(fragment);
      finish(fragment, 0);
    }
  } catch (...) {
    abandon();
    throw;
  }
}

// Raises if another rank has reported a failed rank, since the others then wait for this rank in a new group.
void Averaging::check_failure() const {
  const auto listener = listener_of(*group_);
  const auto failure = listener ? listener->failure() : std::nullopt;
  TORCH_CHECK_WITH(DistBackendError, !failure, listener->rank(), name_, ": step ", steps_,
                   ": expected all ranks to go on, received an error on another rank", *failure);
}

// Drops the averages under way. Weights and averaged weights have not changed.
void Averaging::abandon() {
  for (Fragment& fragment : fragments_) {
    fragment.begun = -1;
    fragment.is_second = fragment.is_received = false;
    for (Bucket& bucket : fragment.buckets) {
      bucket.mean = Tensor();
      bucket.work = {};
      bucket.future = {};
    }
    if (fragment.compressor) sent_ += fragment.compressor->sent_bytes();
    fragment.compressor.reset();
    if (bits_ > 0 && group_->getSize() > 1) fragment.compressor = std::make_unique<Compressor>(group_, bits_);
  }
}

void Averaging::regroup(GroupPtr group) {
  TORCH_CHECK_VALUE(group.defined(), name_, ": group: expected a process group, received none");
  const auto alone = lock();
  group_ = std::move(group);
  share();
}

// Returns the numbers of all ranks, (ranks, numbers).
Tensor Averaging::of_all_ranks(const std::vector<double>& numbers) const {
  std::vector<Tensor> input{at::tensor(numbers, at::kDouble)};
  std::vector<std::vector<Tensor>> all(1);
  for (int i = 0; i < group_->getSize(); ++i) all[0].push_back(at::empty_like(input[0]));
  wait_for(group_, group_->allgather(all, input), c10::str(name_, ": comparison of the ranks"));
  return at::stack(all[0]);
}

// Gives all ranks the newest averaged weights of any rank, or the weights of rank 0 if there are none.
void Averaging::share() {
  const at::NoGradGuard no_grad;
  abandon();
  const std::vector<std::pair<const char*, double>> settings{{"every", options_.every()},
                                                             {"lr", options_.lr()},
                                                             {"momentum", options_.momentum()},
                                                             {"bits of compress", bits_},
                                                             {"fragments", options_.fragments()},
                                                             {"overlap", options_.overlap()},
                                                             {"alpha", alpha_},
                                                             {"bucket_bytes", options_.bucket_bytes()}};
  std::vector<double> values;
  for (const auto& [name, value] : settings) values.push_back(value);
  const Tensor rank_values = of_all_ranks(values);
  for (int64_t i = 0; i < rank_values.size(1); ++i)
    for (int64_t rank = 1; rank < rank_values.size(0); ++rank)
      TORCH_CHECK_VALUE(rank_values[rank][i].equal(rank_values[0][i]), name_, ": ", settings[i].first,
                        ": expected the same on all ranks, received ", rank_values[0][i].item<double>(),
                        " on rank 0 and ", rank_values[rank][i].item<double>(), " on rank ", rank);

  std::vector<double> versions{static_cast<double>(steps_)};
  for (const Fragment& fragment : fragments_) versions.push_back(fragment.averages);
  const Tensor all = of_all_ranks(versions);
  const Tensor newest = all.narrow(1, 1, all.size(1) - 1).sum(1);
  TensorDict params;
  for (size_t i = 0; i < params_.size(); ++i) params.insert(c10::str("parameter ", i), params_[i].detach());
  if (newest.max().item<double>() >= 0) {
    check_same(group_, params, name_.c_str());
    receive_state(all, newest.argmax().item<int64_t>());
    return;
  }
  broadcast_tensors(group_, params, name_.c_str());
  for (Fragment& fragment : fragments_) {
    fragment.averages = 0;
    for (Bucket& bucket : fragment.buckets) {
      bucket.anchor = flat(bucket);
      if (options_.momentum() > 0) bucket.momentum = at::zeros_like(bucket.anchor);
    }
  }
}

// Copies the fragments that some rank does not have, or has an older average of, from rank `source`. Rows of
// `all` are the steps of a rank, and the number of averages of each of its fragments.
void Averaging::receive_state(const Tensor& all, int64_t source) {
  c10d::BroadcastOptions from;
  from.rootRank = source;
  std::vector<std::vector<Bucket>> received(fragments_.size());
  for (size_t f = 0; f < fragments_.size(); ++f) {
    const Tensor versions = all.select(1, static_cast<int64_t>(f) + 1);
    if (versions.eq(versions[source]).all().item<bool>()) continue;
    const bool is_behind = fragments_[f].averages < versions[source].item<int64_t>();
    for (const Bucket& bucket : fragments_[f].buckets) {
      // Another failure must leave the averaged weights as they are, so they arrive in other memory.
      Bucket copy{bucket.params, is_behind ? flat(bucket) : bucket.anchor, bucket.momentum, {}, {}, {}};
      if (is_behind && options_.momentum() > 0) copy.momentum = at::empty_like(copy.anchor);
      for (const Tensor& tensor : {copy.anchor, copy.momentum}) {
        if (!tensor.defined()) continue;
        std::vector<Tensor> sent{tensor};
        try {
          group_->broadcast(sent, from)->wait();
        } catch (const std::exception& error) {
          fail_collective(*group_, error, c10::str(name_, ": broadcast of the averaged weights"));
        }
      }
      if (is_behind) received[f].push_back(std::move(copy));
    }
  }
  for (size_t f = 0; f < fragments_.size(); ++f) {
    Fragment& fragment = fragments_[f];
    const double alpha = fragment.averages < 0 ? 0 : alpha_;
    for (size_t b = 0; b < received[f].size(); ++b) {
      fragment.buckets[b] = std::move(received[f][b]);
      give(fragment.buckets[b], alpha);
    }
    fragment.averages = all[source][static_cast<int64_t>(f) + 1].item<int64_t>();
  }
  steps_ = all.select(1, 0).max().item<int64_t>();
}

int64_t Averaging::steps() const {
  const auto alone = lock();
  return steps_;
}

TensorDict Averaging::state() {
  const auto alone = lock();
  const at::NoGradGuard no_grad;
  TensorDict state;
  state.insert("steps", at::full({}, steps_, at::kLong));
  std::vector<int64_t> begun;
  size_t i = 0;
  for (Fragment& fragment : fragments_) {
    begun.push_back(fragment.begun);
    try {
      if (fragment.begun >= 0) receive(fragment);
    } catch (...) {
      abandon();
      throw;
    }
    for (const Bucket& bucket : fragment.buckets) {
      const std::string number = c10::str(".", i++);
      state.insert("anchor" + number, bucket.anchor);
      if (bucket.momentum.defined()) state.insert("momentum" + number, bucket.momentum);
      if (fragment.begun >= 0) state.insert("mean" + number, bucket.mean);
    }
  }
  state.insert("begun", at::tensor(begun, at::kLong));
  return state;
}

void Averaging::load_state(const TensorDict& state) {
  const auto alone = lock();
  const at::NoGradGuard no_grad;
  const auto entry = [&](const std::string& name) {
    const Tensor* tensor = state.find(name);
    TORCH_CHECK_VALUE(tensor != nullptr, name_, ": state: expected an entry ", name, ", received none");
    return *tensor;
  };
  const int64_t steps = entry("steps").item<int64_t>();
  const Tensor begun = entry("begun").to(at::kCPU, at::kLong);
  TORCH_CHECK_VALUE(begun.sizes() == at::IntArrayRef({options_.fragments()}), name_,
                    ": state: begun: ", "expected ", options_.fragments(), " fragments, received ",
                    begun.numel());
  std::vector<std::vector<Tensor>> loaded(2);  // anchors and momenta
  std::vector<Tensor> means;
  size_t i = 0;
  for (int64_t f = 0; f < options_.fragments(); ++f)
    for (const Bucket& bucket : fragments_[f].buckets) {
      loaded[0].push_back(bucket.anchor);
      if (bucket.momentum.defined()) loaded[1].push_back(bucket.momentum);
      const std::string name = c10::str("mean.", i++);
      means.push_back(begun[f].item<int64_t>() >= 0 ? entry(name) : Tensor());
      TORCH_CHECK_VALUE(!means.back().defined() || means.back().numel() == bucket.anchor.numel(), name_,
                        ": state: ", name, ": expected ", bucket.anchor.numel(), " elements, received ",
                        means.back().numel());
    }
  const char* const names[]{"anchor", "momentum"};
  for (size_t k = 0; k < loaded.size(); ++k) {
    const auto expected = sizes_of(loaded[k]), in_state = sizes_of(numbered(state, names[k]));
    TORCH_CHECK_VALUE(expected == in_state, name_, ": state: ", names[k], ": expected buckets of ",
                      at::IntArrayRef(expected), " elements, received ", at::IntArrayRef(in_state));
  }
  abandon();
  for (size_t k = 0; k < loaded.size(); ++k) {
    const auto saved = numbered(state, names[k]);
    for (size_t b = 0; b < loaded[k].size(); ++b) loaded[k][b].copy_(saved[b].view_as(loaded[k][b]));
  }
  i = 0;
  for (int64_t f = 0; f < options_.fragments(); ++f) {
    Fragment& fragment = fragments_[f];
    fragment.begun = begun[f].item<int64_t>();
    fragment.is_second = fragment.is_received = fragment.begun >= 0;
    for (Bucket& bucket : fragment.buckets)
      if (const Tensor mean = means[i++]; mean.defined())
        bucket.mean = mean.to(bucket.anchor.options(), /*non_blocking=*/false, /*copy=*/true).flatten();
  }
  steps_ = steps;
}

int64_t Averaging::sent_bytes() const {
  const auto alone = lock();
  int64_t bytes = sent_;
  for (const Fragment& fragment : fragments_)
    if (fragment.compressor) bytes += fragment.compressor->sent_bytes();
  return bytes;
}

int64_t Averaging::residual_bytes() const {
  const auto alone = lock();
  int64_t bytes = 0;
  for (const Fragment& fragment : fragments_)
    if (fragment.compressor) bytes += fragment.compressor->residual_bytes();
  return bytes;
}

}  // namespace detail

namespace {

// Returns the parameters of an optimizer that keeps no second copy of them.
std::vector<Tensor> parameters_of(const torch::optim::Optimizer& optimizer, const char* name) {
  constexpr const char* kExpected =
      ": optimizer: expected one that keeps no second copy of the weights, received ";
  TORCH_CHECK_TYPE(dynamic_cast<const optim::ScheduleFreeAdamW*>(&optimizer) == nullptr, name, kExpected,
                   "ScheduleFreeAdamW. Use AdamW.");
  std::vector<Tensor> params;
  for (const auto& group : optimizer.param_groups()) {
    const auto* low_memory = dynamic_cast<const optim::LowMemoryOptions*>(&group.options());
    TORCH_CHECK_TYPE(
        low_memory == nullptr || optim::detail::Access::weight_rounding(*low_memory) != "remainder", name,
        kExpected, "one with weight_rounding(\"remainder\"). Round to nearest or stochastically.");
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  return params;
}

DiLoCoOptions options_of(const LocalSGDOptions& options) {
  return DiLoCoOptions()
      .every(options.every())
      .lr(1.0)
      .momentum(0.0)
      .compress(options.compress())
      .fragments(options.fragments())
      .overlap(options.overlap())
      .alpha(options.alpha())
      .bucket_bytes(options.bucket_bytes());
}

}  // namespace

DiLoCo::DiLoCo(const char* name, std::vector<Tensor> parameters, GroupPtr group, const DiLoCoOptions& options)
    : averaging_(
          std::make_unique<detail::Averaging>(name, std::move(parameters), std::move(group), options)) {}
DiLoCo::DiLoCo(std::vector<Tensor> parameters, GroupPtr group, const DiLoCoOptions& options)
    : DiLoCo("DiLoCo", std::move(parameters), std::move(group), options) {}
DiLoCo::DiLoCo(const torch::optim::Optimizer& optimizer, GroupPtr group, const DiLoCoOptions& options)
    : DiLoCo("DiLoCo", parameters_of(optimizer, "DiLoCo"), std::move(group), options) {}
DiLoCo::~DiLoCo() = default;
DiLoCo::DiLoCo(DiLoCo&&) noexcept = default;
DiLoCo& DiLoCo::operator=(DiLoCo&&) noexcept = default;

bool DiLoCo::step() { return averaging_->step(); }
void DiLoCo::average() { averaging_->average(); }
void DiLoCo::regroup(GroupPtr group) { averaging_->regroup(std::move(group)); }
int64_t DiLoCo::steps() const { return averaging_->steps(); }
TensorDict DiLoCo::state() const { return averaging_->state(); }
void DiLoCo::load_state(const TensorDict& state) { averaging_->load_state(state); }
std::map<std::string, int64_t> DiLoCo::statistics() const {
  return {{"sent", averaging_->sent_bytes()}, {"residuals", averaging_->residual_bytes()}};
}

LocalSGD::LocalSGD(std::vector<Tensor> parameters, GroupPtr group, const LocalSGDOptions& options)
    : DiLoCo("LocalSGD", std::move(parameters), std::move(group), options_of(options)) {}
LocalSGD::LocalSGD(const torch::optim::Optimizer& optimizer, GroupPtr group, const LocalSGDOptions& options)
    : DiLoCo("LocalSGD", parameters_of(optimizer, "LocalSGD"), std::move(group), options_of(options)) {}

}  // namespace shoestring::distributed
