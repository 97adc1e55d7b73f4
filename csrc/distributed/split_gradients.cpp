// Sends gradients to the processes that step them, while backward computes the others.

#include "distributed/split_gradients.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>

#include "distributed/backends.h"

namespace shoestring::distributed {

using at::Tensor;
using optim::ParameterPart;

namespace {
constexpr size_t kBucketsUnderWay = 4;  // buckets that are sent at the same time
}

ReducedParts::ReducedParts(GroupPtr group, const ShardOptions& options)
    : group_(std::move(group)), options_(options), name_(registered_name(group_)) {
  // The gradients of one process are not sent, so nothing is compressed.
  const int64_t bits = bits_of(options.compress(), "shard");
  if (bits > 0 && group_->getSize() > 1) compressor_.emplace(group_, bits);
}

std::pair<std::vector<ReducedParam>, std::vector<ReducedBucket>> deal_out(
    const std::vector<Tensor>& params, const std::vector<std::vector<ParameterPart>>& parts,
    int64_t bucket_bytes) {
  std::vector<ReducedParam> dealt;
  std::unordered_map<c10::TensorImpl*, size_t> numbers;
  for (const Tensor& p : params) {
    numbers[p.unsafeGetTensorImpl()] = dealt.size();
    dealt.push_back({p, {}, false});
  }
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    for (const auto& [param, begin, end] : parts[rank])
      dealt[numbers.at(param.unsafeGetTensorImpl())].pieces.push_back({begin, end, rank, 0, 0});
  }
  // Backward computes the gradients of the last parameters first. A bucket holds parts of one rank and one
  // dtype; of each, one bucket at a time is open.
  std::vector<ReducedBucket> buckets;
  std::map<std::tuple<size_t, at::ScalarType, std::string>, size_t> open;
  for (size_t i = dealt.size(); i-- > 0;) {
    const Tensor& tensor = dealt[i].tensor;
    for (ReducedPiece& piece : dealt[i].pieces) {
      const auto key = std::make_tuple(piece.owner, tensor.scalar_type(), tensor.device().str());
      const auto index_in_open = open.find(key);
      const int64_t elements = piece.end - piece.begin;
      const bool fits =
          index_in_open != open.end() &&
          (buckets[index_in_open->second].elements + elements) * tensor.element_size() <= bucket_bytes;
      const size_t index = fits ? index_in_open->second : buckets.size();
      if (!fits) {
        open[key] = index;
        buckets.push_back({piece.owner, 0, {}, 0, {}, {}});
      }
      piece.offset = buckets[index].elements;
      buckets[index].elements += elements;
      buckets[index].params.push_back(i);
    }
  }
  // Buckets are sent in the order in which they are complete if gradients come in the expected order. The
  // order is the same on all ranks, whatever the order of their gradients.
  std::stable_sort(buckets.begin(), buckets.end(),
                   [](const auto& a, const auto& b) { return a.params.back() > b.params.back(); });
  for (size_t index = 0; index < buckets.size(); ++index) {
    for (const size_t i : buckets[index].params) {
      for (ReducedPiece& piece : dealt[i].pieces)
        if (piece.owner == buckets[index].owner) piece.bucket = index;
    }
  }
  return {std::move(dealt), std::move(buckets)};
}

void ReducedParts::set_parts(const std::vector<Tensor>& params,
                             const std::vector<std::vector<ParameterPart>>& parts) {
  for (const Tensor& p : params) {
    if (compressor_) check_compressible("shard", p, "one");
    numbers_.emplace(p.unsafeGetTensorImpl(), numbers_.size());
  }
  std::tie(params_, buckets_) = deal_out(params, parts, options_.bucket_bytes());
  begin_round();
}

void ReducedParts::begin_round() {
  for (ReducedBucket& bucket : buckets_) bucket.missing = bucket.params.size();
  for (ReducedParam& param : params_) param.has_arrived = false;
  next_ = 0;
  arrived_ = 0;
}

void ReducedParts::add(const Tensor& tensor) {
  const auto number = numbers_.find(tensor.unsafeGetTensorImpl());
  TORCH_CHECK(number != numbers_.end(),
              "shard: expected gradients of the parameters that required them in the first backward, ",
              "received one of another parameter");
  ReducedParam& param = params_[number->second];
  if (param.has_arrived) end_round();  // another backward has begun
  param.has_arrived = any_ = true;
  ++arrived_;
  const Tensor grad = tensor.grad();
  take(param, &grad);
  tensor.mutable_grad() = Tensor();
  send_complete();
}

// Copies a gradient to its buckets, divided by the ranks unless it is compressed. A null pointer means zeros.
void ReducedParts::take(ReducedParam& param, const Tensor* grad) {
  const Tensor flat = grad != nullptr ? grad->reshape({-1}) : Tensor();
  for (const ReducedPiece& piece : param.pieces) {
    ReducedBucket& bucket = buckets_[piece.bucket];
    if (!bucket.buffer.defined()) bucket.buffer = at::empty({bucket.elements}, param.tensor.options());
    const int64_t elements = piece.end - piece.begin;
    Tensor target = bucket.buffer.narrow(0, piece.offset, elements);
    if (grad == nullptr) {
      target.zero_();
    } else if (compressor_) {
      target.copy_(flat.narrow(0, piece.begin, elements));
    } else {
      at::mul_out(target, flat.narrow(0, piece.begin, elements), at::scalar_tensor(1.0 / group_->getSize()));
    }
    --bucket.missing;
  }
}

void ReducedParts::send_complete() {
  for (; next_ < buckets_.size() && buckets_[next_].missing == 0; ++next_) {
    under_way_.push_back(send(next_));
    while (under_way_.size() > kBucketsUnderWay) receive_first();
  }
  if (next_ == buckets_.size() && arrived_ == params_.size()) begin_round();
}

ReducedParts::Sent ReducedParts::send(size_t index) {
  ReducedBucket& bucket = buckets_[index];
  const auto root = static_cast<int64_t>(bucket.owner);
  std::vector<Tensor> sent{std::exchange(bucket.buffer, Tensor())};
  try {
    if (!compressor_) {
      c10d::ReduceOptions reduce;
      reduce.rootRank = root;
      return {index, sent[0], {}, group_->reduce(sent, reduce)};
    }
    c10d::GatherOptions gather;
    gather.rootRank = root;
    sent[0] = compressor_->encode(sent[0], static_cast<int64_t>(index));
    Tensor all = sent[0];
    std::vector<std::vector<Tensor>> rows;
    if (root == group_->getRank()) {
      all = at::empty({group_->getSize(), all.numel()}, all.options());
      rows.push_back(all.unbind(0));
    }
    return {index, {}, all, group_->gather(rows, sent, gather)};
  } catch (const std::exception& error) {
    fail_collective(*group_, error, "reduction of gradients");
  }
}

// Waits for the first bucket that is under way. The owner keeps its memory as its gradients, or adds it to
// those of an earlier backward.
void ReducedParts::receive_first() {
  auto [index, sum, codes, work] = std::move(under_way_.front());
  under_way_.pop_front();
  wait_for(group_, work, "reduction of gradients");
  ReducedBucket& bucket = buckets_[index];
  if (bucket.owner != static_cast<size_t>(group_->getRank())) return;
  if (compressor_) {
    sum = at::empty({bucket.elements},
                    codes.options().dtype(params_[bucket.params.back()].tensor.scalar_type()));
    compressor_->decode(sum, codes);
  }
  if (bucket.sum.defined()) {
    bucket.sum.add_(sum);
  } else {
    bucket.sum = sum;
  }
}

// Completes a backward in which gradients are missing, or raises.
void ReducedParts::end_round() {
  std::vector<std::string> missing;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].has_arrived) missing.push_back(c10::str(i, " of shape ", params_[i].tensor.sizes()));
  }
  TORCH_CHECK(options_.find_unused() || missing.empty(),
              "shard: expected a backward that computes the gradients of all parameters, received one that ",
              "does not use parameter ", c10::Join(", ", missing),
              " of the optimizer. Freeze them before the first step, or pass find_unused.");
  for (ReducedParam& param : params_) {
    if (!param.has_arrived) take(param, nullptr);
  }
  arrived_ = params_.size();
  send_complete();
}

void ReducedParts::finish() {
  if (arrived_ > 0) end_round();
  while (!under_way_.empty()) receive_first();
}

Tensor ReducedParts::part(const Tensor& tensor) const {
  const auto number = numbers_.find(tensor.unsafeGetTensorImpl());
  if (number == numbers_.end() || !any_) return {};
  for (const ReducedPiece& piece : params_[number->second].pieces) {
    if (piece.owner == static_cast<size_t>(group_->getRank()))
      return buckets_[piece.bucket].sum.narrow(0, piece.offset, piece.end - piece.begin);
  }
  return at::empty({0}, tensor.options());
}

void ReducedParts::clear() {
  while (!under_way_.empty()) receive_first();
  for (ReducedBucket& bucket : buckets_) bucket.buffer = bucket.sum = Tensor();
  any_ = false;
  begin_round();
}

}  // namespace shoestring::distributed
