#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <shoestring/distributed/distributed.h>

#include "distributed/compressor.h"

namespace shoestring::distributed {

/// Elements [begin, end) of a parameter that one rank steps. They lie in a bucket from element `offset` on.
struct ReducedPiece {
  int64_t begin, end;
  size_t owner, bucket;
  int64_t offset;
};
struct ReducedParam {
  at::Tensor tensor;
  std::vector<ReducedPiece> pieces;
  bool has_arrived;
};
/// Pieces that one rank steps, and that are sent together.
struct ReducedBucket {
  size_t owner;
  int64_t elements;
  std::vector<size_t> params;  // of the pieces, in the order in which backward computes their gradients
  size_t missing;
  at::Tensor buffer;  // gradients of this rank, until they are sent
  at::Tensor sum;     // on the owner: gradients of all ranks
};

/// Deals the parts of parameters that each rank steps out to buckets, which are in the order of sending.
std::pair<std::vector<ReducedParam>, std::vector<ReducedBucket>> deal_out(
    const std::vector<at::Tensor>& params, const std::vector<std::vector<optim::ParameterPart>>& parts,
    int64_t bucket_bytes);

/// Returns the bytes that each of `ranks` ranks sends at a time when the weights of a split step are copied.
int64_t gather_chunk(int64_t ranks);

/// The gradients of ZeRO-2 over a process group. Each rank receives the means of the parts that it steps;
/// buckets of gradients are sent while backward computes the others.
class ReducedParts final : public optim::SplitGradients {
 public:
  ReducedParts(GroupPtr group, const ShardOptions& options);

  std::string group() const override { return name_; }
  void set_parts(const std::vector<at::Tensor>& params,
                 const std::vector<std::vector<optim::ParameterPart>>& parts) override;
  void add(const at::Tensor& param) override;
  bool any() const override { return any_; }
  void finish() override;
  at::Tensor part(const at::Tensor& param) const override;
  void clear() override;

 private:
  struct Sent {
    size_t bucket;
    at::Tensor sum;    // sum of plain gradients
    at::Tensor codes;  // codes of compressed gradients; on the owner, of all ranks (ranks, bytes)
    c10::intrusive_ptr<c10d::Work> work;
  };

  void begin_round();
  void end_round();
  void take(ReducedParam& param, const at::Tensor* grad);
  void send_complete();
  Sent send(size_t index);
  void receive_first();

  const GroupPtr group_;
  const ShardOptions options_;
  const std::string name_;
  std::optional<Compressor> compressor_;
  std::vector<ReducedParam> params_;
  std::unordered_map<c10::TensorImpl*, size_t> numbers_;
  std::vector<ReducedBucket> buckets_;
  std::deque<Sent> under_way_;
  size_t next_ = 0;     // the bucket that is sent next
  size_t arrived_ = 0;  // parameters whose gradient has arrived in this backward
  bool any_ = false;
};

}  // namespace shoestring::distributed
