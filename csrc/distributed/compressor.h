#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <shoestring/distributed/distributed.h>

namespace shoestring::distributed {

/// Returns the number of bits of "8bit", "4bit" or "1bit", or 0 for "none". Raises for other texts.
int64_t bits_of(const std::string& compress, const char* caller);

/// Raises unless the gradients of a parameter can be compressed. `caller` begins the error, which says
/// `which` parameter it is.
void check_compressible(const char* caller, const at::Tensor& parameter, const std::string& which);

/// Returns the size of a rank's part of a bucket of compressed gradients: the bytes of its codes, which are
/// equal for all ranks, and its elements, which may be fewer on the last ranks.
std::tuple<int64_t, int64_t> compressed_part(int64_t elements, int64_t ranks, int64_t rank, int64_t bits);

/// Averages gradients over the ranks of a group in few bits, with error feedback. Each rank keeps what its
/// codes have left out, and adds it to the gradients of the next step.
///
/// The mean of all ranks on all ranks takes two hops. Each rank owns an equal part of a bucket. An all-to-all
/// brings the codes of a part to its owner, which averages them and encodes the mean, with an error of its
/// own; an all-gather brings the codes of the means to all ranks, so all ranks decode the same bits.
///
/// Thread-safe: a method waits while another thread is in one, and so for the collectives of that thread.
class Compressor {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  Compressor(GroupPtr group, int64_t bits);

  /// Begins to replace the gradients of a bucket by their means. Call it for all buckets of a step in the
  /// order of their index, on all ranks. A bucket's second hop begins when the next bucket is added, so that
  /// all ranks issue collectives in one order; after the last bucket all futures are complete.
  ///
  /// `params` are the parameters whose gradients lie in `gradient`, one after the other. Their errors follow
  /// them if they move to another bucket. If there are none, errors belong to the index, and begin at zero
  /// where the gradient has another size than in the step before.
  FuturePtr all_reduce(const at::Tensor& gradient, const std::vector<at::Tensor>& params, int64_t index,
                       bool is_last);

  /// The parts of all_reduce(), for callers that compute while buckets are on their way: begins the first hop
  /// of a bucket, begins the second hop of all buckets, and completes the futures of all buckets.
  FuturePtr begin(const at::Tensor& gradient, const std::vector<at::Tensor>& params, int64_t index);
  void send_means();
  void finish();

  /// A reduce-scatter that is under way.
  struct Scatter {
    at::Tensor codes, parts;
    c10::intrusive_ptr<c10d::Work> work;
  };

  /// Begins to send each rank its part of `input`, (ranks * n). `key` names the gradient from step to step.
  /// The function has read `input` when it returns.
  Scatter begin_scatter(const at::Tensor& input, int64_t key);

  /// Waits for a reduce-scatter, and writes the mean over the ranks of this rank's part, (n), to `output`.
  void end_scatter(const Scatter& scatter, at::Tensor output) const;

  /// Compresses a gradient that `key` names from step to step. Returns the codes.
  at::Tensor encode(const at::Tensor& gradient, int64_t key);

  /// Writes the mean of compressed gradients, the rows of `codes`, to `output`.
  void decode(at::Tensor output, const at::Tensor& codes) const;

  /// Sets all errors to zero.
  void reset();

  int64_t bits() const { return bits_; }
  /// Bytes that this rank has sent to others.
  int64_t sent_bytes() const;
  /// Bytes of the errors of this rank.
  int64_t residual_bytes() const;
  /// Errors of this rank: those of a parameter's gradients, or of a key, which is the index of a bucket in
  /// all_reduce(). None before the first step.
  std::optional<at::Tensor> residual(const at::Tensor& param) const;
  std::optional<at::Tensor> residual(int64_t key) const;
  /// Errors of the means of this rank's part of a bucket.
  std::optional<at::Tensor> residual_of_means(int64_t index) const;

 private:
  struct Bucket {
    std::vector<c10::TensorImpl*> params;
    at::Tensor error;  // error of the gradients of this rank
    at::Tensor owned;  // error of the means of this rank's part
  };
  // A bucket that is under way.
  struct Flight {
    Bucket* bucket;
    at::Tensor gradient;
    int64_t bytes;  // of the codes of each rank's part
    at::Tensor codes, parts, means;
    c10::intrusive_ptr<c10d::Work> work;
    bool is_second;
    FuturePtr future;
  };

  [[nodiscard]] std::unique_lock<std::recursive_mutex> lock() const { return std::unique_lock(mutex_); }
  Bucket& bucket_of(const at::Tensor& gradient, const std::vector<at::Tensor>& params, int64_t index);
  at::Tensor& error_of(const at::Tensor& gradient, int64_t key);
  void enter(int64_t key);
  void enter_stream(std::optional<c10::StreamGuard>& guard, const c10::Device& device);
  void note(const at::Tensor& codes);
  void send_means(Flight& flight);
  void finish(Flight& flight);
  void drop_errors(at::Tensor& error) const;

  const GroupPtr group_;
  const int64_t bits_, ranks_, rank_;
  std::unordered_map<int64_t, Bucket> buckets_;
  std::unordered_map<int64_t, at::Tensor> errors_;              // errors of encode(), by key
  std::unordered_map<c10::TensorImpl*, at::Tensor> of_params_;  // views of the buckets' errors
  std::deque<Flight> flights_;
  std::unordered_set<int64_t> entered_;  // buckets or keys of this step
  // Whether all codes of this step, and of the last one, are finite; was_finite_ is undefined if it is known.
  at::Tensor finite_, was_finite_;
  std::optional<c10::Stream> stream_;
  int64_t sent_ = 0;
  mutable std::recursive_mutex mutex_;
};

}  // namespace shoestring::distributed
