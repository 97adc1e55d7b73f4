// Averages gradients over processes in 8, 4 or 1 bits, with error feedback.

#include "distributed/compressor.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <shoestring/quantization/ops.h>

#include "distributed/backends.h"

namespace shoestring::distributed {

using at::Tensor;

namespace {

// The bytes of the record of a block.
int64_t record_of(int64_t bits) { return compressed_gradient_bytes(1, bits); }

}  // namespace

int64_t bits_of(const std::string& compress, const char* caller) {
  if (compress == "none") return 0;
  if (compress == "8bit") return 8;
  if (compress == "4bit") return 4;
  if (compress == "1bit") return 1;
  TORCH_CHECK_VALUE(false, caller,
                    ": compress: expected \"none\", \"8bit\", \"4bit\" or \"1bit\", received \"", compress,
                    "\"");
}

void check_compressible(const char* caller, const Tensor& parameter, const std::string& which) {
  const auto dtype = parameter.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, caller,
                   ": compress: expected parameters in fp32, bf16 or fp16, received ", which, " in ", dtype,
                   ". Convert it, or compress none.");
}

std::tuple<int64_t, int64_t> compressed_part(int64_t elements, int64_t ranks, int64_t rank, int64_t bits) {
  const int64_t record = record_of(bits), block = bits == 4 ? 128 : 256;
  const int64_t records = (compressed_gradient_bytes(elements, bits) / record + ranks - 1) / ranks;
  return {records * record, std::clamp<int64_t>(elements - rank * records * block, 0, records * block)};
}

Compressor::Compressor(GroupPtr group, int64_t bits)
    : group_(std::move(group)), bits_(bits), ranks_(group_->getSize()), rank_(group_->getRank()) {}

Compressor::FuturePtr Compressor::all_reduce(const Tensor& gradient, const std::vector<Tensor>& params,
                                             int64_t index, bool is_last) {
  const auto alone = lock();
  const at::NoGradGuard no_grad;
  FuturePtr future = begin(gradient, params, index);
  std::optional<c10::StreamGuard> guard;
  if (!flights_.empty()) enter_stream(guard, gradient.device());
  // The link stays busy with this bucket while the one before is averaged.
  const size_t waiting = is_last ? 0 : 1;
  for (size_t i = 0; i + waiting < flights_.size(); ++i) {
    if (!flights_[i].is_second) send_means(flights_[i]);
  }
  while (flights_.size() > (is_last ? 0 : 2)) {
    finish(flights_.front());
    flights_.pop_front();
  }
  return future;
}

void Compressor::send_means() {
  const auto alone = lock();
  const at::NoGradGuard no_grad;
  std::optional<c10::StreamGuard> guard;
  for (Flight& flight : flights_) {
    if (!guard) enter_stream(guard, flight.gradient.device());
    if (!flight.is_second) send_means(flight);
  }
}

void Compressor::finish() {
  const auto alone = lock();
  const at::NoGradGuard no_grad;
  std::optional<c10::StreamGuard> guard;
  for (; !flights_.empty(); flights_.pop_front()) {
    if (!guard) enter_stream(guard, flights_.front().gradient.device());
    finish(flights_.front());
  }
}

// On a GPU everything runs on a stream of its own, so that backward goes on.
void Compressor::enter_stream(std::optional<c10::StreamGuard>& guard, const c10::Device& device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guards(device.type());
  if (!stream_) stream_ = guards.getStreamFromGlobalPool(device);
  c10::Event ready(device.type());
  ready.record(guards.getStream(device));
  ready.block(*stream_);
  guard.emplace(*stream_);
}

Compressor::FuturePtr Compressor::begin(const Tensor& gradient, const std::vector<Tensor>& params,
                                        int64_t index) {
  const auto alone = lock();
  const at::NoGradGuard no_grad;
  const c10::Device device = gradient.device();
  const auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::TensorType::get(), device.is_cpu() ? std::vector<c10::Device>{} : std::vector{device});
  if (ranks_ == 1) {
    future->markCompleted(c10::IValue(gradient));
    return future;
  }
  std::optional<c10::StreamGuard> guard;
  enter_stream(guard, device);

  enter(index);
  Bucket& bucket = bucket_of(gradient, params, index);
  const auto [bytes, owned] = compressed_part(gradient.numel(), ranks_, rank_, bits_);
  const int64_t code_bytes = compressed_gradient_bytes(gradient.numel(), bits_);
  const Tensor all = at::empty({ranks_ * bytes}, gradient.options().dtype(at::kByte));
  Flight flight{&bucket, gradient, bytes, all, Tensor(), Tensor(), {}, false, future};
  Tensor codes = flight.codes.narrow(0, 0, code_bytes);
  // Records beyond the gradient are never decoded, but no bytes of freed memory leave the process.
  flight.codes.narrow(0, code_bytes, flight.codes.numel() - code_bytes).zero_();
  drop_errors(bucket.error);
  compress_gradient_(bucket.error, gradient, codes, bits_);
  flight.parts = at::empty_like(flight.codes);
  if (!bucket.owned.defined()) bucket.owned = at::zeros({owned}, gradient.options().dtype(at::kFloat));
  try {
    std::vector<int64_t> equal;
    flight.work = group_->alltoall_base(flight.parts, flight.codes, equal, equal);
  } catch (const std::exception& error) {
    fail_collective(*group_, error, "all-to-all of compressed gradients");
  }
  sent_ += (ranks_ - 1) * bytes;
  flights_.push_back(std::move(flight));
  return future;
}

// Begins a step when a bucket comes again. The buckets of a backward that did not end are dropped.
void Compressor::enter(int64_t key) {
  if (entered_.insert(key).second) return;
  entered_ = {key};
  flights_.clear();
  was_finite_ = std::exchange(finite_, Tensor());
  if (was_finite_.defined() && was_finite_.is_cpu() && was_finite_.item<bool>()) was_finite_ = Tensor();
}

// Notes whether the scales of codes are finite.
void Compressor::note(const Tensor& codes) {
  if (codes.numel() == 0) return;
  const Tensor finite = codes.view(at::kFloat).view({-1, record_of(bits_) / 4}).select(1, 0).isfinite().all();
  finite_ = finite_.defined() ? finite_.logical_and(finite) : finite;
}

// After a step whose codes were not finite, errors begin at zero: an optimizer or GradScaler skips such a
// step, and the scale of the next gradients may be another one.
void Compressor::drop_errors(Tensor& error) const {
  if (!was_finite_.defined()) return;
  if (was_finite_.is_cpu()) {
    error.zero_();
  } else {
    error.mul_(was_finite_);
  }
}

Compressor::Bucket& Compressor::bucket_of(const Tensor& gradient, const std::vector<Tensor>& params,
                                          int64_t index) {
  Bucket& bucket = buckets_[index];
  std::vector<c10::TensorImpl*> pointers;
  int64_t elements = 0;
  for (const Tensor& param : params) {
    pointers.push_back(param.unsafeGetTensorImpl());
    elements += param.numel();
  }
  if (params.empty()) elements = gradient.numel();
  if (bucket.params == pointers && bucket.error.defined() && bucket.error.numel() == elements) return bucket;
  TORCH_CHECK(elements == gradient.numel(),
              "compress: expected a bucket of the gradients of its parameters, ", elements,
              " elements, received ", gradient.numel());
  Tensor error = at::zeros({elements}, gradient.options().dtype(at::kFloat));
  int64_t begin = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    Tensor part = error.narrow(0, begin, params[i].numel());
    begin += params[i].numel();
    Tensor& param_error = of_params_[pointers[i]];
    if (param_error.defined()) part.copy_(param_error);
    param_error = part;
  }
  // Other buckets with these parameters are dropped: they come again later in this step, with others, or
  // never.
  for (auto entry = buckets_.begin(); entry != buckets_.end();) {
    const auto& old = entry->second.params;
    const bool moved = entry->first != index && std::any_of(old.begin(), old.end(), [&](const auto* param) {
                         return std::find(pointers.begin(), pointers.end(), param) != pointers.end();
                       });
    entry = moved ? buckets_.erase(entry) : std::next(entry);
  }
  bucket = {std::move(pointers), std::move(error), {}};
  return bucket;
}

// The second hop: averages the codes of this rank's part, and sends the codes of the means to all ranks.
void Compressor::send_means(Flight& flight) {
  wait_for(group_, flight.work, "all-to-all of compressed gradients");
  const int64_t bytes = flight.bytes;
  Tensor& error = flight.bucket->owned;
  Tensor mean = at::empty_like(error);
  decompress_mean_(mean, flight.parts.view({ranks_, bytes}), bits_);
  // The memory of the first hop's codes serves those of the means.
  Tensor codes = flight.codes.narrow(0, 0, bytes);
  const int64_t code_bytes = compressed_gradient_bytes(error.numel(), bits_);
  Tensor filled = codes.narrow(0, 0, code_bytes);
  codes.narrow(0, code_bytes, bytes - code_bytes).zero_();
  drop_errors(error);
  compress_gradient_(error, mean, filled, bits_);
  flight.means = codes;
  try {
    flight.work = group_->_allgather_base(flight.parts, flight.means);
  } catch (const std::exception& failure) {
    fail_collective(*group_, failure, "all-gather of compressed gradients");
  }
  sent_ += (ranks_ - 1) * bytes;
  flight.is_second = true;
}

void Compressor::finish(Flight& flight) {
  wait_for(group_, flight.work, "all-gather of compressed gradients");
  const Tensor codes = flight.parts.narrow(0, 0, compressed_gradient_bytes(flight.gradient.numel(), bits_));
  decompress_mean_(flight.gradient, codes.unsqueeze(0), bits_);
  note(codes);
  flight.future->markCompleted(c10::IValue(flight.gradient));
}

Tensor& Compressor::error_of(const Tensor& gradient, int64_t key) {
  enter(key);
  Tensor& error = errors_[key];
  if (!error.defined() || error.numel() != gradient.numel())
    error = at::zeros({gradient.numel()}, gradient.options().dtype(at::kFloat));
  drop_errors(error);
  return error;
}

Tensor Compressor::encode(const Tensor& gradient, int64_t key) {
  const auto alone = lock();
  const at::NoGradGuard no_grad;
  Tensor& error = error_of(gradient, key);
  Tensor codes =
      at::empty({compressed_gradient_bytes(gradient.numel(), bits_)}, gradient.options().dtype(at::kByte));
  compress_gradient_(error, gradient, codes, bits_);
  note(codes);
  return codes;
}

void Compressor::decode(Tensor output, const Tensor& codes) const { decompress_mean_(output, codes, bits_); }

Compressor::Scatter Compressor::begin_scatter(const Tensor& input, int64_t key) {
  const auto alone = lock();
  const at::NoGradGuard no_grad;
  const int64_t part = input.numel() / ranks_;
  TORCH_CHECK(input.numel() == part * ranks_, "compress: input: expected an equal part for each of ", ranks_,
              " ranks, received ", input.numel(), " elements");
  const int64_t bytes = compressed_gradient_bytes(part, bits_);
  Tensor& error = error_of(input, key);
  Tensor codes = at::empty({ranks_ * bytes}, input.options().dtype(at::kByte));
  const Tensor flat = input.view({-1});
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    Tensor rank_error = error.narrow(0, rank * part, part), to = codes.narrow(0, rank * bytes, bytes);
    compress_gradient_(rank_error, flat.narrow(0, rank * part, part), to, bits_);
  }
  note(codes);
  Tensor parts = at::empty_like(codes);
  sent_ += (ranks_ - 1) * bytes;
  try {
    std::vector<int64_t> equal;
    auto work = group_->alltoall_base(parts, codes, equal, equal);
    return {codes, parts, std::move(work)};
  } catch (const std::exception& failure) {
    fail_collective(*group_, failure, "all-to-all of compressed gradients");
  }
}

void Compressor::end_scatter(const Scatter& scatter, Tensor output) const {
  const at::NoGradGuard no_grad;
  wait_for(group_, scatter.work, "all-to-all of compressed gradients");
  const int64_t bytes = compressed_gradient_bytes(output.numel(), bits_);
  TORCH_CHECK(scatter.parts.numel() == ranks_ * bytes,
              "compress: output: expected the part of a rank, received ", output.numel(), " elements");
  decode(std::move(output), scatter.parts.view({ranks_, bytes}));
}

void Compressor::reset() {
  const auto alone = lock();
  for (auto& [index, bucket] : buckets_) {
    bucket.error.zero_();
    if (bucket.owned.defined()) bucket.owned.zero_();
  }
  for (auto& [key, error] : errors_) error.zero_();
}

int64_t Compressor::sent_bytes() const {
  const auto alone = lock();
  return sent_;
}

int64_t Compressor::residual_bytes() const {
  const auto alone = lock();
  int64_t bytes = 0;
  for (const auto& [index, bucket] : buckets_) {
    bytes += static_cast<int64_t>(bucket.error.nbytes());
    if (bucket.owned.defined()) bytes += static_cast<int64_t>(bucket.owned.nbytes());
  }
  for (const auto& [key, error] : errors_) bytes += static_cast<int64_t>(error.nbytes());
  return bytes;
}

std::optional<Tensor> Compressor::residual(const Tensor& param) const {
  const auto alone = lock();
  const auto entry = of_params_.find(param.unsafeGetTensorImpl());
  if (entry == of_params_.end()) return std::nullopt;
  return entry->second;
}

std::optional<Tensor> Compressor::residual_of_means(int64_t index) const {
  const auto alone = lock();
  const auto bucket = buckets_.find(index);
  if (bucket == buckets_.end() || !bucket->second.owned.defined()) return std::nullopt;
  return bucket->second.owned;
}

std::optional<Tensor> Compressor::residual(int64_t key) const {
  const auto alone = lock();
  if (const auto found = errors_.find(key); found != errors_.end()) return found->second;
  if (const auto found = buckets_.find(key); found != buckets_.end()) return found->second.error;
  return std::nullopt;
}

}  // namespace shoestring::distributed
