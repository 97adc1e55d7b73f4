// Copies the weights that each rank has stepped to all ranks.

#include <algorithm>
#include <array>
#include <vector>

#include <ATen/Functions.h>

#include <shoestring/distributed/distributed.h>

#include "distributed/backends.h"
#include "distributed/split_gradients.h"

namespace shoestring::distributed {

// All ranks together send 8 MiB, so that the buffers hardly depend on their number, unless these would be
// messages of less than 256 KiB.
int64_t gather_chunk(int64_t ranks) {
  return std::max<int64_t>((int64_t{8} << 20) / ranks / 256 * 256, 256 << 10);
}

namespace {

using at::Tensor;
using optim::ParameterPart;

// Reads or writes the bytes of a rank's parts as one sequence.
class Bytes {
 public:
  explicit Bytes(const std::vector<ParameterPart>& parts) {
    for (const auto& [param, begin, end] : parts) {
      const Tensor bytes = param.detach().view({-1}).narrow(0, begin, end - begin).view(at::kByte);
      parts_.push_back(bytes);
      size_ += bytes.numel();
    }
  }
  int64_t size() const { return size_; }

  // Copies the next bytes to `buffer`, or from it. Fewer bytes are copied at the end of the sequence.
  void copy(const Tensor& buffer, bool from) {
    for (int64_t at = 0; at < buffer.numel() && part_ < parts_.size();) {
      const Tensor& part = parts_[part_];
      const int64_t count = std::min(buffer.numel() - at, part.numel() - begin_);
      Tensor part_range = part.narrow(0, begin_, count), buffer_range = buffer.narrow(0, at, count);
      from ? part_range.copy_(buffer_range) : buffer_range.copy_(part_range);
      at += count;
      begin_ += count;
      if (begin_ == part.numel()) {
        ++part_;
        begin_ = 0;
      }
    }
  }

 private:
  std::vector<Tensor> parts_;
  int64_t size_ = 0, begin_ = 0;
  size_t part_ = 0;
};

void gather(const GroupPtr& group, const std::vector<std::vector<ParameterPart>>& parts) {
  const at::NoGradGuard no_grad;
  const auto this_rank = static_cast<size_t>(group->getRank());
  std::vector<Bytes> bytes(parts.begin(), parts.end());
  int64_t most = 0;
  at::Device device(at::kCPU);
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    most = std::max(most, bytes[rank].size());
    if (!parts[rank].empty()) device = parts[rank][0].param.device();
  }
  if (parts.size() < 2 || most == 0) return;
  const auto ranks = static_cast<int64_t>(parts.size());
  const int64_t chunk = std::min(gather_chunk(ranks), most);
  const auto options = at::TensorOptions(device).dtype(at::kByte);
  // While a chunk is on its way, the one before is copied to the parameters.
  struct Chunk {
    Tensor sent, all;
    c10::intrusive_ptr<c10d::Work> work;
  };
  std::array<Chunk, 2> chunks;
  for (Chunk& c : chunks) c = {at::empty({chunk}, options), at::empty({chunk * ranks}, options), {}};
  const int64_t count = (most + chunk - 1) / chunk;
  for (int64_t i = 0; i <= count; ++i) {
    if (i < count) {
      Chunk& next = chunks[i % 2];
      bytes[this_rank].copy(next.sent, /*from=*/false);
      next.work = group->_allgather_base(next.all, next.sent);
    }
    if (i == 0) continue;
    Chunk& last = chunks[(i - 1) % 2];
    wait_for(group, last.work, "all-gather of split weights");
    for (int64_t rank = 0; rank < ranks; ++rank) {
      if (static_cast<size_t>(rank) != this_rank)
        bytes[static_cast<size_t>(rank)].copy(last.all.narrow(0, rank * chunk, chunk), /*from=*/true);
    }
  }
}

}  // namespace

void shard(optim::LowMemoryOptimizer& optimizer, const GroupPtr& group, const ShardOptions& options) {
  TORCH_CHECK_VALUE(group.defined(), "shard: group: expected a process group, received none");
  TORCH_CHECK_VALUE(options.bucket_bytes() > 0, "shard: bucket_bytes: expected a number above 0, received ",
                    options.bucket_bytes());
  TORCH_CHECK_VALUE(!options.find_unused() || options.gradients(),
                    "shard: find_unused: expected split gradients, received whole ones, for which ",
                    "DataParallel has this option");
  TORCH_CHECK_VALUE(options.compress() == "none" || options.gradients(),
                    "shard: compress: expected split gradients, received whole ones, for which DataParallel ",
                    "has this option");
  std::shared_ptr<optim::SplitGradients> gradients;
  if (options.gradients()) gradients = std::make_shared<ReducedParts>(group, options);
  optimizer.set_shard(
      group->getRank(), group->getSize(), registered_name(group),
      [group](const auto& parts) { gather(group, parts); }, std::move(gradients));
}

}  // namespace shoestring::distributed
